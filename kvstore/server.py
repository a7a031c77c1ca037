"""The node store process: `python -m tournant.kvstore.server --socket PATH --host-bytes N ...`, without Ray.

Owns the socket, who is behind each connection, and the process's life: one thread, one loop around the core (shell.py).

Invariants:
 1. Only processes of this user are served: the folder of the socket is 0700, the socket 0600, and the kernel tells
    whose the other end is. A client proves with a pidfd which process it is.
 2. End of file, rubbish and a full output buffer end a connection (ClientClosed); only the pidfd says that the process
    is gone (ClientExited), because a forked child may keep the connection and a stalled process the mapping.
 3. Nothing a client sends or does not read holds up another client or grows without bound.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tournant.kvstore import admin
from tournant.kvstore.admin_desk import AdminDesk
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.disk_io import FolderRefused
from tournant.kvstore.errors import StoreConfigError
from tournant.kvstore.events import (
    Attach,
    Attached,
    ClientClosed,
    ClientExited,
    Detach,
    Disconnect,
    Drain,
    Drained,
    Refused,
    Send,
)
from tournant.kvstore.host_tier import HostMemory
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.server_flags import parse_flags, values_of
from tournant.kvstore.shell import ForClients, NvmePlace, StoreShell
from tournant.kvstore.socket_transport import MAX_PATH_BYTES, RECEIVE_BYTES, peer_credentials
from tournant.kvstore.wire import MAX_REQUEST_BYTES, Answer, FrameBuffer, Request, WireError, decode_request, encode

DRAIN_S = 10.0
ATTACH_S = 30.0  # a connection that has not attached by then is ended
MAX_BACKLOG_BYTES = 4 << 20  # unread replies at which a connection is ended
READY = b"ready\n"
MAX_STRANGERS = 64  # connections that have not attached; the oldest makes room for one more
ACCEPT_AGAIN_S = 1.0  # pause after a connection that the system did not let in
_QUERIES = (admin.StatusQuery, admin.ListBlocks, admin.VerifyBlocks, admin.Clear, admin.PollAnnouncements)
_GC_THRESHOLDS = (
    10_000,
    50,
    1 << 30,
)  # never search all blocks for cycles, which takes a second for a million; none has
_LOG = logging.getLogger("tournant.kvstore")


class _Peer:
    """One connection. number: what the core calls it; pid: of the process behind it; passed: a descriptor that came
    with its bytes, -1 = none; deaf: it takes no more replies, what it had sent is still read to its end.
    """

    def __init__(self, sock: socket.socket, number: int, pid: int) -> None:
        self.sock = sock
        self.number = number
        self.pid = pid
        self.passed = -1
        self.attached = self.deaf = False
        self.since = time.monotonic()
        self.frames = FrameBuffer(MAX_REQUEST_BYTES)
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0


class StoreServer:
    """See the module. listener: a listening socket; parent: pidfd of a process whose end ends this one, -1 = none."""

    def __init__(self, listener: socket.socket, shell: StoreShell, parent: int = -1, drain_s: float = DRAIN_S) -> None:
        self._listener = listener
        self._shell = shell
        self._desk = AdminDesk(shell)
        self._drain_s = drain_s
        self._drain_until: float | None = None
        self._drained = False
        self._peers: dict[int, _Peer] = {}
        self._exits: dict[int, int] = {}  # client -> pidfd
        self._next_number = 1
        self._accept_again = 0.0  # when to listen again after the system gave no descriptor, 0 = it does
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, "new")
        self._selector.register(shell.wake_fd, selectors.EVENT_READ, None)
        self._signals, signals = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        for ending in (self._signals, parent):
            if ending >= 0:
                self._selector.register(ending, selectors.EVENT_READ, "end")

    def run(self) -> None:
        """Serve until a signal or the parent's end, then drain. Raises InvariantViolation when the core finds itself
        broken: the process is then to end, and its clients attach to the next one.
        """
        while not self._drained and (self._drain_until is None or time.monotonic() < self._drain_until):
            exits: list[int] = []
            woken = False
            for key, mask in self._selector.select(self._shell.until_tick_s()):
                if isinstance(key.data, _Peer):
                    self._serve(key.data, mask)
                elif isinstance(key.data, int):
                    exits.append(key.data)
                elif key.data == "end":
                    self._begin_to_drain(key.fd)
                elif key.data == "new":
                    self._accept()
                else:
                    woken = True
            for client in exits:  # after what they had sent
                self._exited(client)
            if woken or self._shell.until_tick_s() <= 0:
                self._end_strangers()
                if self._accept_again and time.monotonic() > self._accept_again:
                    self._accept_again = 0.0
                    self._selector.register(self._listener, selectors.EVENT_READ, "new")
                self._deliver(self._shell.pump())

    def _begin_to_drain(self, fd: int) -> None:
        self._selector.unregister(fd)
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._drain_s
            self._deliver(self._shell.handle(Drain()))

    # ---- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            _LOG.warning("a connection cannot be taken: %s", error)
            self._selector.unregister(self._listener)  # it would be readable all the time
            self._accept_again = time.monotonic() + ACCEPT_AGAIN_S
            return
        pid, uid = peer_credentials(sock)
        if uid != os.geteuid():
            sock.close()
            return
        strangers = [peer for peer in self._peers.values() if not peer.attached]
        if len(strangers) >= MAX_STRANGERS:
            self._end(strangers[0], "too many connections have not attached")
        sock.setblocking(False)
        peer = _Peer(sock, self._next_number, pid)
        self._next_number += 1
        self._peers[peer.number] = peer
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _serve(self, peer: _Peer, mask: int) -> None:
        if peer.number not in self._peers:  # ended by what came before it in this round
            return
        if mask & selectors.EVENT_WRITE:
            self._flush(peer)
        if not mask & selectors.EVENT_READ or peer.number not in self._peers:
            return
        try:
            data = self._receive(peer)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(peer)
            return
        try:
            for body in peer.frames.feed(data):
                self._take(peer, decode_request(body, peer.number))
                if peer.number not in self._peers:
                    return
        except WireError as error:
            self._end(peer, f"not a message of this protocol: {error}")

    def _receive(self, peer: _Peer) -> bytes:
        if peer.attached:
            return peer.sock.recv(RECEIVE_BYTES)
        data, fds, _, _ = socket.recv_fds(peer.sock, RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        for fd in fds:
            if peer.passed >= 0:
                os.close(fd)
            else:
                peer.passed = fd
        return data

    def _take(self, peer: _Peer, message: Request) -> None:
        if isinstance(message, _QUERIES):
            self._desk.answer(message, lambda answer: self._send_to(peer.number, answer), self._deliver)
        elif isinstance(message, Attach):
            problem = "this connection has attached already" if peer.attached else _pidfd_problem(peer)
            if problem:
                self._end(peer, problem)
            else:
                self._deliver(self._shell.handle(message))
        elif not peer.attached:
            self._end(peer, "attach first")
        elif isinstance(message, Detach):
            self._exited(peer.number)
        else:
            self._deliver(self._shell.handle(message))

    def _end(self, peer: _Peer, reason: str = "") -> None:
        """Close a connection; the core hears of it unless it said so itself."""
        if reason:
            _LOG.info("connection %d of process %d is ended: %s", peer.number, peer.pid, reason)
            with suppress(OSError):
                if not peer.unsent:
                    peer.sock.send(encode(Refused(reason[:1000])))
        self._selector.unregister(peer.sock)
        peer.sock.close()
        if peer.passed >= 0:
            os.close(peer.passed)
        del self._peers[peer.number]
        if peer.attached:
            self._deliver(self._shell.handle(ClientClosed(peer.number)))
            if peer.number not in self._shell.core.clients.by_number:
                self._close_pidfd(peer.number)

    def _exited(self, client: int) -> None:
        self._close_pidfd(client)
        if client in self._peers:  # a forked child holds it
            self._end(self._peers[client])
        self._deliver(self._shell.handle(ClientExited(client)))

    def _close_pidfd(self, client: int) -> None:
        pidfd = self._exits.pop(client, -1)
        if pidfd >= 0:
            self._selector.unregister(pidfd)
            os.close(pidfd)

    def _end_strangers(self) -> None:
        late = time.monotonic() - ATTACH_S
        for peer in [peer for peer in self._peers.values() if not peer.attached and peer.since < late]:
            self._end(peer, f"not attached within {ATTACH_S:g} s")

    # ---- replies

    def _deliver(self, instructions: list[ForClients]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                if isinstance(instruction.reply, Attached):
                    self._welcome(instruction.client, instruction.reply)
                else:
                    self._send_to(instruction.client, instruction.reply)
            elif isinstance(instruction, Disconnect):
                if instruction.client in self._peers:
                    self._end(self._peers[instruction.client], instruction.reason)
            elif isinstance(instruction, Drained):
                self._drained = True

    def _welcome(self, client: int, reply: Attached) -> None:
        """The first reply carries pool and generations; from now on the pidfd of the client is watched."""
        peer = self._peers[client]
        peer.attached = True
        self._exits[client], peer.passed = peer.passed, -1
        self._selector.register(self._exits[client], selectors.EVENT_READ, client)
        frame = memoryview(encode(reply))
        memory = self._shell.memory
        try:
            sent = socket.send_fds(peer.sock, [frame], [memory.pool_fd, memory.generations_fd])
        except BlockingIOError as error:
            self._end(peer, f"the pool cannot be passed: {error}")
            return
        except OSError:
            peer.deaf = True
            return
        if sent < len(frame):
            self._queue(peer, frame[sent:])

    def _send_to(self, client: int, reply: Answer) -> None:
        peer = self._peers.get(client)
        if peer is None or peer.deaf:
            return
        try:
            frame = memoryview(encode(reply))
        except WireError as error:
            self._end(peer, f"the answer is too long: {error}")
            return
        if not peer.unsent:
            try:
                frame = frame[peer.sock.send(frame) :]
            except BlockingIOError:
                pass
            except OSError:
                peer.deaf = True
                return
        if frame:
            self._queue(peer, frame)

    def _queue(self, peer: _Peer, frame: memoryview) -> None:
        if peer.unsent_bytes > MAX_BACKLOG_BYTES:
            self._end(peer, f"it leaves {peer.unsent_bytes} bytes of replies unread")
            return
        if not peer.unsent:
            self._selector.modify(peer.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
        peer.unsent.append(frame)
        peer.unsent_bytes += len(frame)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.unsent:
                frame = peer.unsent[0]
                sent = peer.sock.send(frame)
                peer.unsent_bytes -= sent
                if sent < len(frame):
                    peer.unsent[0] = frame[sent:]
                else:
                    peer.unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            peer.deaf = True
            peer.unsent.clear()
        self._selector.modify(peer.sock, selectors.EVENT_READ, peer)


def _pidfd_problem(peer: _Peer) -> str:
    """Why a connection has not shown which process it is, "" when it has."""
    if peer.passed < 0:
        return "the attach came without a pidfd"
    try:
        text = Path(f"/proc/self/fdinfo/{peer.passed}").read_text("ascii", "replace")
    except OSError as error:
        return f"the descriptor that came along cannot be looked at: {error}"
    pids = [line.split()[1] for line in text.splitlines() if line.startswith("Pid:")]
    if pids != [str(peer.pid)]:
        return f"the descriptor that came along is not a pidfd of process {peer.pid}"
    return ""


# -------------------------------------------------------------------- the process


def listen(path: Path) -> socket.socket:
    """A listening socket at a path, in place of one that a dead store left.

    Raises StoreConfigError when the path cannot be used or another store listens there.
    """
    path = path.absolute()
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise StoreConfigError(f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes; choose a shorter one")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreConfigError(f"the folder of the socket {path} cannot be made: {error}") from None
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise StoreConfigError(
                f"{path.parent} has mode {found.st_mode & 0o7777:04o} and owner {found.st_uid}; a store's socket needs "
                f"a folder of user {os.geteuid()} with mode 0700 (chmod 700)"
            )
        fcntl.flock(folder, fcntl.LOCK_EX)  # against another store that starts now
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
        return listener
    except OSError as error:
        raise StoreConfigError(f"the socket {path} cannot be made: {error}") from None
    finally:
        os.close(folder)


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if not path.is_socket():
                raise StoreConfigError(f"{path} is there and no socket; choose another path") from None
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise StoreConfigError(f"another store listens at {path}; stop it or choose another path")


def _parent_pidfd(pid: int | None) -> int:
    if pid is None:
        return -1
    with suppress(OSError, OverflowError):
        pidfd = os.pidfd_open(pid)
        if os.getppid() == pid:  # asked after the opening: the number was not another process's by then
            return pidfd
        os.close(pidfd)
    raise StoreConfigError(f"process {pid} is not the parent of this store, or it has ended")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a store; the exit code: 0 after a drain, 2 when it cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    args = parse_flags(argv)
    try:
        config = StoreConfig(**values_of(args, StoreConfig))
        nvme = (
            None if args.nvme_folder is None else NvmePlace(args.nvme_folder, NvmeConfig(**values_of(args, NvmeConfig)))
        )
        parent = _parent_pidfd(args.with_parent)
        tenant_check = b""
        if args.tenant_check_fd is not None:
            with os.fdopen(args.tenant_check_fd, "rb") as source:
                tenant_check = source.read(64)
        listener = listen(args.socket)
        try:
            shell = StoreShell(config, HostMemory.create(config.host_bytes), nvme, tenant_check)
        except BaseException:
            args.socket.unlink()
            raise
    except (StoreConfigError, FolderRefused, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        _tell(args.ready_fd, " ".join(str(error).split()).encode() + b"\n")
        return 2
    gc.set_threshold(*_GC_THRESHOLDS)
    server = StoreServer(listener, shell, parent, args.drain_s)
    _LOG.info("ready at %s: %s", args.socket, _facts(config, args.nvme_folder, shell))
    _tell(args.ready_fd, READY)
    server.run()
    with suppress(OSError):
        args.socket.unlink()
    if not shell.close():
        os._exit(0)  # a hung call to the disk would hold up the interpreter's end
    return 0


def _facts(config: StoreConfig, nvme_folder: Path | None, shell: StoreShell) -> str:
    pool = f"pool of {config.host_bytes:,} bytes"
    if nvme_folder is None:
        return f"{pool}, no NVMe folder"
    adopted = shell.core.stats.adopted
    return f"{pool}, up to {config.nvme_bytes:,} bytes in {nvme_folder}, {adopted:,} blocks adopted from there"


def _tell(fd: int | None, line: bytes) -> None:
    if fd is not None:
        with os.fdopen(fd, "wb") as receiver:
            receiver.write(line)


if __name__ == "__main__":
    sys.exit(main())
