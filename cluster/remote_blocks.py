"""The agent of a node: says which other node holds the blocks of a chain, and brings them into this node's store.

Owns the socket that links ask (kvstore/agent_wire.py), the threads that answer, and which nodes are left alone. What
the directory knows and how bytes travel is injected: nothing here calls Ray.

Invariants:
 1. Every question is answered, by its deadline or little after it; "nothing" is always a right answer.
 2. A node of which a call failed is asked nothing for REST_S.
 3. A node that had nothing of a chain in a part is not asked for that again for REST_S: the directory knows keys, not
    parts, and one node may hold the layers or heads that another one needs the rest of.
 4. Nothing grows with what links send: connections, questions under way, bytes on their way and unread answers have
    limits.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tournant.cluster.block_adopter import MAX_BATCHES, BlockAdopter, Key, Outcome, key_of
from tournant.cluster.block_giver import IDLE_S
from tournant.cluster.block_transport import BlockTransport
from tournant.cluster.directory_actor import Held
from tournant.kvstore.agent_wire import (
    MAX_FRAME_BYTES,
    AgentAnswer,
    Bring,
    Brought,
    Locate,
    Located,
    Question,
    decode_question,
    encode,
)
from tournant.kvstore.block import Part
from tournant.kvstore.errors import StoreRefused, StoreUnavailable
from tournant.kvstore.server import listen
from tournant.kvstore.socket_transport import RECEIVE_BYTES, peer_credentials
from tournant.kvstore.wire import FrameBuffer, WireError

REST_S = 10.0  # how long a node of which a call failed is left alone
LOOKUP_S = 0.1
TICK_S = 1.0
NUM_LOCATING, NUM_BRINGING = 2, 8  # threads
MAX_LINKS, MAX_OPEN, MAX_BACKLOG_BYTES = 256, 64, 1 << 20  # connections; questions and unread bytes of one
MAX_ADOPTERS = 16
MAX_TRIES = 4  # nodes that are asked for one question
MAX_FRUITLESS = 4096
Lookup = Callable[[Sequence[bytes], float], list[Held]]
_LOG = logging.getLogger("tournant.node_store")


class _Link:
    """One connection. num_open: questions under way."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = FrameBuffer(MAX_FRAME_BYTES)
        self.unsent = bytearray()
        self.num_open = 0


class RemoteBlocks:
    """See the module. path: of the agent's socket; store: of the store's; node: Ray id of this node; lookup: who holds
    the leading keys of a chain, within some seconds; gone: told that a node does not exist any more; on_tick: called
    once a second.

    Raises StoreConfigError when it cannot listen at the path.
    """

    def __init__(
        self,
        path: Path,
        store: Path,
        node: str,
        lookup: Lookup,
        transport: BlockTransport,
        gone: Callable[[str], None] = lambda node: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._store, self._node = path, store, node
        self._lookup, self._transport, self._gone, self._on_tick = lookup, transport, gone, on_tick
        self._rests_until: dict[str, float] = {}
        self._fruitless: dict[tuple[Part, bytes], dict[str, float]] = {}  # part, first key -> node -> until when
        self._permits = threading.BoundedSemaphore(MAX_BATCHES)
        self._adopters: dict[Key, BlockAdopter] = {}
        self._lock = threading.Lock()  # of the tables above
        self._answers: deque[tuple[_Link, AgentAnswer]] = deque()
        self._links: set[_Link] = set()
        self._stopping = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener = listen(path)
        self._locating = ThreadPoolExecutor(NUM_LOCATING, "locating")
        self._bringing = ThreadPoolExecutor(NUM_BRINGING, "bringing")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, "new")
        self._selector.register(self._bell, selectors.EVENT_READ, "bell")
        self._thread = threading.Thread(target=self._run, daemon=True, name="agent")
        self._thread.start()

    def stop(self) -> None:
        """Answer nothing more and leave the store. What waits for another node is not waited for. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        for threads in (self._locating, self._bringing):
            threads.shutdown(wait=False, cancel_futures=True)
        self._end_adopters(0.0)

    # ---- the thread of the socket

    def _run(self) -> None:
        tick_at = time.monotonic() + TICK_S
        while not self._stopping:
            try:
                for key, mask in self._selector.select(max(0.0, tick_at - time.monotonic())):
                    if isinstance(key.data, _Link):
                        self._serve(key.data, mask)
                    elif key.data == "new":
                        self._accept()
                    else:
                        self._send_answers()
                if time.monotonic() >= tick_at:
                    tick_at = time.monotonic() + TICK_S
                    self._end_adopters(IDLE_S)
                    self._on_tick()
            except Exception:
                _LOG.exception("the agent at %s failed; it goes on", self._path)
                time.sleep(TICK_S)
        for link in list(self._links):
            self._end(link)
        self._selector.close()
        self._listener.close()
        with suppress(OSError):
            self._path.unlink()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        _, uid = peer_credentials(sock)
        if uid != os.geteuid() or len(self._links) >= MAX_LINKS:
            sock.close()
            return
        sock.setblocking(False)
        link = _Link(sock)
        self._links.add(link)
        self._selector.register(sock, selectors.EVENT_READ, link)

    def _serve(self, link: _Link, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(link)
            if not mask & selectors.EVENT_READ:
                return
            data = link.sock.recv(RECEIVE_BYTES)
            if not data:
                self._end(link)
                return
            for body in link.frames.feed(data):
                self._take(link, decode_question(body))
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            _LOG.info("a link is ended: %s", error)
            self._end(link)

    def _take(self, link: _Link, question: Question) -> None:
        if link.num_open >= MAX_OPEN:
            raise WireError(f"{link.num_open} questions are open; at most {MAX_OPEN} may be")
        link.num_open += 1
        until = time.monotonic() + (question.timeout_ms / 1000 if isinstance(question, Bring) else LOOKUP_S)
        threads = self._bringing if isinstance(question, Bring) else self._locating
        threads.submit(self._answer, link, question, until)

    def _end(self, link: _Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link.sock)
            link.sock.close()

    def _send_answers(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._answers:
            link, answer = self._answers.popleft()
            link.num_open -= 1
            if link in self._links:
                link.unsent += encode(answer)
                try:
                    self._flush(link)
                except OSError:
                    self._end(link)

    def _flush(self, link: _Link) -> None:
        with suppress(BlockingIOError):
            while link.unsent:
                del link.unsent[: link.sock.send(link.unsent)]
        if len(link.unsent) > MAX_BACKLOG_BYTES:
            raise OSError("it reads nothing")
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        self._selector.modify(link.sock, wanted, link)

    # ---- threads that answer

    def _answer(self, link: _Link, question: Question, until: float) -> None:
        try:
            answer = self.locate(question) if isinstance(question, Locate) else self.bring(question, until)
        except Exception:
            _LOG.exception("a question about blocks of other nodes failed")
            number = question.request
            answer = Located(number, 0, "") if isinstance(question, Locate) else Brought(number, 0, 0, 0, True)
        self._answers.append((link, answer))
        if not self._stopping:
            os.eventfd_write(self._bell, 1)

    def locate(self, question: Locate) -> Located:
        """The node, not resting and not this one, that is known to hold the most leading keys; in RAM if any does, and
        of several alike always the same, so that ranks of a group that ask get the same versions.
        """
        node, count = self._best(question.keys, question.part)
        return Located(question.request, count, node)

    def _best(self, keys: Sequence[bytes], part: Part) -> tuple[str, int]:
        """Who holds the most, and how many leading keys."""
        if not keys:
            return "", 0
        now = time.monotonic()
        with self._lock:
            left = [*self._rests_until.items(), *self._fruitless.get((part, keys[0]), {}).items()]
        left_out = {node for node, until in left if until > now} | {self._node}
        nodes: set[str] | None = None
        best, count = "", 0
        for run in self._lookup(keys, LOOKUP_S):
            here = {*run.host, *run.nvme} - left_out
            nodes = here if nodes is None else nodes & here
            if not nodes:
                break
            best = min(nodes, key=lambda node: (node not in run.host, node))
            count += run.num_keys
        return best, count

    def bring(self, question: Bring, until: float) -> Brought:
        """Copy blocks of a node into the store here. See `Brought`."""
        began = time.monotonic()
        with self._lock:
            resting = self._rests_until.get(question.node, 0.0) > began
        if resting or question.node == self._node or not question.keys:
            return Brought(question.request, 0, 0, 0, resting)
        for _ in range(MAX_TRIES):
            outcome = self._bring(question, until)
            if not outcome.has_none or time.monotonic() > until:
                break
            lacking = question.keys[outcome.count :]
            self._note_fruitless(question.node, question.part, lacking[0])
            node, _ = self._best(lacking, question.part)
            if not node:
                break
            question = replace(question, node=node)
        if outcome.problem:
            _LOG.warning("node %s is left alone for %g s: %s", question.node[:8], REST_S, outcome.problem)
            with self._lock:
                self._rests_until = {n: t for n, t in self._rests_until.items() if t > began}
                self._rests_until[question.node] = time.monotonic() + REST_S
            if outcome.is_gone:
                self._gone(question.node)
        took = int((time.monotonic() - began) * 1e6)
        return Brought(question.request, outcome.count, outcome.num_bytes, took, bool(outcome.problem))

    def _note_fruitless(self, node: str, part: Part, key: bytes) -> None:
        with self._lock:
            self._fruitless.setdefault((part, key), {})[node] = time.monotonic() + REST_S
            if len(self._fruitless) > MAX_FRUITLESS:
                del self._fruitless[next(iter(self._fruitless))]

    def _bring(self, question: Bring, until: float) -> Outcome:
        adopter = self._adopter(question)
        if adopter is None or not adopter.lock.acquire(timeout=max(0.0, until - time.monotonic())):
            return Outcome()
        try:
            return adopter.bring(question, until)
        except (StoreUnavailable, StoreRefused) as error:
            _LOG.info("the store here takes no blocks of other nodes: %s", error)
            return Outcome()
        finally:
            adopter.lock.release()

    def _adopter(self, question: Bring) -> BlockAdopter | None:
        with self._lock:
            found = self._adopters.get(key_of(question))
            if found is None and len(self._adopters) < MAX_ADOPTERS and not self._stopping:
                found = BlockAdopter(self._store, self._transport, self._permits)
                self._adopters[key_of(question)] = found
            if found is not None:
                found.used_at = time.monotonic()
            return found

    def _end_adopters(self, idle_s: float) -> None:
        """Those that brought nothing for so long leave the store, and count as its clients no more."""
        with self._lock:
            for key, adopter in list(self._adopters.items()):
                if time.monotonic() - adopter.used_at >= idle_s and adopter.lock.acquire(blocking=False):
                    adopter.close()
                    adopter.lock.release()
                    del self._adopters[key]
