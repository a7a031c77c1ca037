"""The client's end of a store's unix socket: connecting, frames out and in, the descriptors that come with the first
reply.

Owns one connection and the mapping received over it. Of what the messages mean it knows which have an answer (the rest:
client.py, admin).

Invariant: no more answers are taken in than were asked for, so that a store cannot fill this process's memory.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from tournant.kvstore.errors import StoreRefused, StoreUnavailable
from tournant.kvstore.events import Attach, Bad, CloseRead, Detach, Forget, HardUnpin, Refused, Used
from tournant.kvstore.host_tier import HostMemory, PageLock
from tournant.kvstore.wire import MAX_REPLY_BYTES, Answer, FrameBuffer, Request, WireError, decode_answer, encode

RECEIVE_BYTES = 1 << 18
MAX_PATH_BYTES = 107  # of an address in the unix domain
SENDS_RUBBISH = "sends rubbish"  # in an error that no store of this protocol causes
_UNANSWERED = (Used, CloseRead, Bad, Forget, HardUnpin, Detach)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_RETRY_S = 0.005
_FAREWELL_S = 600.0  # how long a store that does not read is waited for, beside everything else


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that made the other end, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


class SocketTransport:
    """Connects when made. Raises StoreUnavailable when no store of this user listens at the path by the deadline.

    page_lock: see `HostMemory`.
    """

    def __init__(self, path: Path, deadline: float, page_lock: PageLock | None = None) -> None:
        self._path = path
        self._page_lock = page_lock
        self._frames = FrameBuffer(MAX_REPLY_BYTES)
        self._arrived: deque[bytes] = deque()
        self._fds: list[int] = []
        self._memory: HostMemory | None = None
        self._unsent: deque[memoryview] = deque()
        self._attached_by = 0  # the process that has sent an `Attach`
        self._owed = 0  # answers that have not come
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._sock, select.POLLIN)
        self._writable.register(self._sock, select.POLLOUT)
        try:
            self._connect(deadline)
        except BaseException:
            self.close()
            raise

    def _connect(self, deadline: float) -> None:
        while True:
            try:
                self._sock.connect(str(self._path))
                break
            except BlockingIOError:  # its queue of new connections is full
                if time.monotonic() > deadline:
                    raise StoreUnavailable(f"the store at {self._path} does not take connections") from None
                time.sleep(_RETRY_S)
            except OSError as error:
                raise StoreUnavailable(f"no store can be reached at {self._path}: {error}") from None
        _, uid = peer_credentials(self._sock)
        if uid != os.geteuid():
            raise StoreUnavailable(f"the store at {self._path} belongs to user {uid}, not to {os.geteuid()}")

    def send(self, message: Request, deadline: float) -> None:
        """See `client.Transport`. An `Attach` carries a pidfd of this process."""
        self._unsent.append(memoryview(encode(message)))
        self._owed += not isinstance(message, _UNANSWERED)
        if isinstance(message, Attach):
            self._attached_by = os.getpid()
            pidfd = os.pidfd_open(os.getpid())
            try:
                self._write([pidfd], deadline)
            finally:
                os.close(pidfd)
        self._write([], deadline)

    def flush(self) -> None:
        """See `client.Transport`."""
        self._write([], 0.0)

    @property
    def has_unsent(self) -> bool:
        """See `client.Transport`."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """See `client.Transport`."""
        return self._sock.fileno()

    def _write(self, pidfds: list[int], deadline: float) -> None:
        """Send what is unsent, the descriptors with its first byte; without a deadline, as much as there is room
        for.
        """
        while self._unsent:
            left = self._unsent[0]
            try:
                sent = socket.send_fds(self._sock, [left], pidfds) if pidfds else self._sock.send(left)
            except BlockingIOError:
                if not deadline:
                    return
                self._poll(self._writable, deadline, "it does not read")
            except OSError as error:
                raise StoreUnavailable(f"the connection to {self._path} broke: {error}") from None
            else:
                pidfds = []
                if sent < len(left):
                    self._unsent[0] = left[sent:]
                else:
                    self._unsent.popleft()

    def receive(self, deadline: float) -> Answer | None:
        """See `client.Transport`."""
        while not self._arrived:
            try:
                data = self._read()
            except BlockingIOError:
                if not self._readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return None
                continue
            except OSError as error:
                raise StoreUnavailable(f"the connection to {self._path} broke: {error}") from None
            if not data:
                raise StoreUnavailable(f"the store at {self._path} has closed the connection")
            try:
                self._arrived.extend(self._frames.feed(data))
            except WireError as error:
                raise StoreUnavailable(f"the store at {self._path} {SENDS_RUBBISH}: {error}") from None
        try:
            answer = decode_answer(self._arrived.popleft())
        except WireError as error:
            raise StoreUnavailable(f"the store at {self._path} {SENDS_RUBBISH}: {error}") from None
        if not isinstance(answer, Refused):
            self._owed -= 1
            if self._owed < 0:
                raise StoreUnavailable(f"the store at {self._path} {SENDS_RUBBISH}: an answer that nobody asked for")
        return answer

    def _read(self) -> bytes:
        if self._memory is not None:
            return self._sock.recv(RECEIVE_BYTES)
        data, fds, _, _ = socket.recv_fds(self._sock, RECEIVE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        self._fds += fds
        return data

    def _poll(self, poll: select.poll, deadline: float, why: str) -> None:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise StoreUnavailable(f"the store at {self._path} did not answer by the deadline: {why}")

    def memory(self) -> HostMemory:
        """See `client.Transport`. Raises StoreRefused when the store passed none, or none that can be mapped."""
        if self._memory is None:
            if len(self._fds) != 2:
                raise StoreRefused(f"the store passed {len(self._fds)} descriptors; its pool and generations are two")
            fds, self._fds = self._fds, []
            self._memory = HostMemory.adopt(fds[0], fds[1], self._page_lock)
        return self._memory

    def close(self) -> None:
        """See `client.Transport`. A store that still lives is told that this process has unmapped the pool."""
        unmapped = True
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        if self._memory is not None:
            unmapped = self._memory.close()
            self._memory = None
        if unmapped and self._attached_by == os.getpid():  # not of a forked child
            self._attached_by = 0
            with suppress(StoreUnavailable):
                self.send(Detach(0), 0.0)
                if self._unsent:
                    rest = b"".join(self._unsent)
                    threading.Thread(target=_farewell, args=(self._sock, rest), name="farewell", daemon=True).start()
                    return
        self._sock.close()


def _farewell(sock: socket.socket, rest: bytes) -> None:
    """Send the last words to a store that does not read now, and close the socket."""
    with sock, suppress(OSError):
        sock.settimeout(_FAREWELL_S)
        sock.sendall(rest)
