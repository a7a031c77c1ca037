"""The store process: who may attach, what the end of each process means, and that nothing a client does harms
another.
"""

from __future__ import annotations

import gc
import itertools
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.kvstore.store_harness import (
    PATIENCE_S,
    READER,
    SLOT,
    WEIGHTS,
    Store,
    exit_of,
    forked,
    keys,
    read,
    write,
    writer,
)
from tournant.kvstore.block import Version
from tournant.kvstore.client import StoreClient, connect
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.errors import InvariantViolation, StoreConfigError, StoreRefused, StoreUnavailable
from tournant.kvstore.events import Attach, Open
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.slots import SlotState
from tournant.kvstore.socket_transport import SocketTransport
from tournant.kvstore.store_process import start_store
from tournant.kvstore.wire import FRAME_HEADER, MAX_REQUEST_BYTES, FrameBuffer, decode_answer, encode

LENT_PAGES = 8 * SLOT // PAGE_BYTES


class Other:
    """Another process, which runs a body with a client of the store, says so, and waits to be ended."""

    def __init__(self, store: Store, body: Callable[[StoreClient], object]) -> None:
        ours, theirs = os.pipe()

        def run() -> int:
            client = connect(store.socket, writer(credit=8, writer_id=os.getpid()), PATIENCE_S)
            body(client)
            os.write(theirs, b"!")
            while True:
                signal.pause()

        self.pid = forked(run)
        os.close(theirs)
        assert os.read(ours, 1) == b"!", "the other process failed"
        os.close(ours)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        exit_of(self.pid)


def raw(store: Store) -> socket.socket:
    """A bare connection."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE_S)
    sock.connect(str(store.socket))
    return sock


def rest_of(sock: socket.socket) -> bytes:
    """All that comes until the other side closes. An error of a closed connection counts as its end."""
    received = b""
    try:
        while data := sock.recv(1 << 16):
            received += data
    except ConnectionError:
        return received
    return received


def sock_never_read(sock: socket.socket, frames: Iterable[bytes]) -> None:
    """Send and send."""
    for frame in frames:
        sock.sendall(frame)


def attach_frame() -> bytes:
    """A reader's."""
    return encode(Attach(0, WEIGHTS, "bf16", b"", 1, None, (), 0, 0))


def test_ten_clients_at_once(served: Store) -> None:
    served.start(host_bytes=8 << 20)

    def work(number: int) -> int:
        client = connect(served.socket, writer(credit=8, writer_id=100 + number), PATIENCE_S)
        chain = keys(40, str(number % 5))
        for turn in range(10):
            assert write(client, chain, first=1000 * turn + 1) == 40
            assert len(read(client, chain)) > 0
        return 0

    children = [forked(lambda number=number: work(number)) for number in range(10)]  # type: ignore[misc]
    assert [exit_of(pid) for pid in children] == [0] * 10
    served.wait_for(lambda found: found.clients == 0 and dict(found.pages)[SlotState.LENT] == 0)
    assert served.status().pinned_pages == 0


def test_slots_of_a_killed_client_come_back(served: Store) -> None:
    served.start()
    other = Other(served, lambda client: client.take_slot())
    assert served.pages(SlotState.LENT) == LENT_PAGES
    other.kill()
    served.wait_for(lambda found: dict(found.pages)[SlotState.LENT] == 0 and found.clients == 0)


def test_pins_of_a_killed_reader_come_back(served: Store) -> None:
    served.start()
    chain = keys(8)

    def body(client: StoreClient) -> None:
        write(client, chain)
        client.open(chain)
        assert client.hard_pin([(chain[0], read(client, chain[:1])[0])])

    other = Other(served, body)
    assert served.status().pinned_pages == LENT_PAGES
    other.kill()
    served.wait_for(lambda found: found.pinned_pages == 0)
    assert len(read(served.attach(READER), chain)) == 8


def test_the_end_of_a_connection_is_not_the_end_of_a_process(served: Store) -> None:
    served.start()
    other = Other(served, lambda client: client._transport._sock.close())  # type: ignore[attr-defined]
    served.wait_for(lambda found: found.open_reads == 0)
    assert served.pages(SlotState.LENT) == LENT_PAGES
    other.kill()
    served.wait_for(lambda found: dict(found.pages)[SlotState.LENT] == 0)


def test_a_client_that_is_closed_gives_everything_back(served: Store) -> None:
    served.start(host_bytes=64 * SLOT)
    chain = keys(4)
    for turn in range(5):  # five times 8 slots are more than may be lent
        rank = served.attach(writer(credit=8))
        write(rank, chain, first=turn * 4 + 1)
        rank.hard_pin([(chain[0], Version(rank.identity.writer_id, turn * 4 + 1))])
        rank.open(chain)
        rank.close()
    found = served.wait_for(lambda found: found.clients == 0)
    assert (dict(found.pages)[SlotState.LENT], found.pinned_pages, found.open_reads) == (0, 0, 0)


def test_a_stopped_store_that_wakes_up_reads_the_last_words_of_its_clients(served: Store) -> None:
    served.start(host_bytes=64 * SLOT)
    assert served.process is not None
    chain = keys(4)
    for _ in range(3):
        rank = served.attach(writer(credit=8))
        write(rank, chain)
        served.process.process.send_signal(signal.SIGSTOP)
        rank.start_open(chain)
        with pytest.raises(StoreUnavailable, match="no Opened by the deadline"):
            rank.open(chain, 0.01)
        rank.close()
        served.process.process.send_signal(signal.SIGCONT)
        served.wait_for(lambda found: found.clients == 0 and dict(found.pages)[SlotState.LENT] == 0)


def test_a_pool_that_is_still_looked_at_is_not_given_back(served: Store) -> None:
    served.start()
    rank = served.attach(writer(credit=8))
    view = rank.slot_view(0)
    rank.close()
    assert served.pages(SlotState.LENT) == LENT_PAGES
    assert len(view) == SLOT


def test_a_stopped_client_keeps_its_slots_until_it_is_killed(served: Store) -> None:
    served.start(pin_us=1000)
    other = Other(served, lambda client: client.open(keys(1)))
    other.signal(signal.SIGSTOP)
    rank = served.attach(writer(credit=8))
    write(rank, keys(1000))
    assert served.pages(SlotState.LENT) == 2 * LENT_PAGES
    other.kill()
    served.wait_for(lambda found: dict(found.pages)[SlotState.LENT] == LENT_PAGES)


def test_a_forked_child_that_holds_the_connection_keeps_nothing_else(served: Store) -> None:
    served.start()
    says, said = os.pipe()
    names, named = os.pipe()  # its own: the grandchild may speak before its parent names it

    def grandchild(client: StoreClient) -> None:
        def run() -> int:
            mapped = "tournant-pool" in Path("/proc/self/maps").read_text(encoding="ascii")
            try:
                client.open(keys(1))
            except InvariantViolation:
                os.write(said, b"mapped" if mapped else b"ok")
            while True:
                signal.pause()

        os.write(named, struct.pack("<I", forked(run)))

    other = Other(served, grandchild)
    (pid,) = struct.unpack("<I", os.read(names, 4))
    try:
        assert os.read(says, 10) == b"ok"
        other.kill()
        served.wait_for(lambda found: dict(found.pages)[SlotState.LENT] == 0 and found.clients == 0)
        os.kill(pid, 0)  # it still lives
    finally:
        os.kill(pid, signal.SIGKILL)
        for descriptor in (says, said, names, named):
            os.close(descriptor)


def test_a_killed_store_leaves_nothing_and_is_replaced(served: Store) -> None:
    served.start()
    gc.collect()  # of what other tests left behind
    maps, fds = _ours_in_maps(), _ours_in_fds()
    rank = served.attach(writer(), timeout_s=PATIENCE_S)
    write(rank, keys(4))
    assert len(_ours_in_maps()) == len(maps) + 2
    old = rank.incarnation
    served.kill()
    for call in (lambda: rank.open(keys(4)), lambda: rank.publish([])):
        with pytest.raises(StoreUnavailable):
            call()
    rank.close()
    assert (_ours_in_maps(), _ours_in_fds()) == (maps, fds)
    assert [path.name for path in served.folder.iterdir()] == [served.socket.name]
    with pytest.raises(StoreUnavailable, match="no store can be reached"):
        served.attach(writer())
    served.start()
    rank = served.attach(writer())
    assert rank.incarnation != old
    assert read(rank, keys(4)) == []
    assert write(rank, keys(4)) == 4


def _ours_in_maps() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines() if "tournant-" in line]


def _ours_in_fds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if "tournant" in _target(fd)]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_a_stopped_store_holds_nobody_up(served: Store) -> None:
    served.start()
    rank = served.attach(writer(), timeout_s=PATIENCE_S)
    write(rank, keys(4))
    assert served.process is not None
    served.process.process.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreUnavailable, match="deadline"):
        rank.open(keys(4), timeout_s=0.05)
    with pytest.raises(StoreUnavailable, match="is over"):
        rank.open(keys(4))
    with pytest.raises(StoreUnavailable):
        served.attach(writer(), timeout_s=0.05)
    served.process.process.send_signal(signal.SIGCONT)
    served.kill()


RUBBISH = {
    "no msgpack": FRAME_HEADER.pack(4) + b"\xc1\xc1\xc1\xc1",
    "too long": FRAME_HEADER.pack(MAX_REQUEST_BYTES + 1),
    "huge": b"\xff" * 100,
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "too deep": FRAME_HEADER.pack(2000) + b"\x91" * 2000,
    "unknown code": FRAME_HEADER.pack(2) + b"\x91\x63",
    "a reply": FRAME_HEADER.pack(4) + b"\x92\x41\xa1x",
    "extra bytes": FRAME_HEADER.pack(len(attach_frame()) - 3) + attach_frame()[4:] + b"\xc0",
    "not attached": encode(Open(0, 1, (b"k" * 32,))),
    "no pidfd": attach_frame(),
}


@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH)
def test_rubbish_ends_the_connection_alone(shared_server: Store, rubbish: bytes) -> None:
    with raw(shared_server) as sock:
        sock.sendall(rubbish)
        answers = list(FrameBuffer(1 << 20).feed(rest_of(sock)))
    assert len(answers) == 1
    assert type(decode_answer(answers[0])).__name__ == "Refused"
    assert shared_server.status().clients == 1


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> object:
    """One store with one client for tests that must not change it."""
    store = Store("socket", tmp_path_factory.mktemp("shared")).start()
    client = store.attach(writer())
    write(client, keys(4))
    yield store
    assert len(read(client, keys(4))) == 4
    store.close()


def test_rubbish_of_a_client_ends_its_connection(shared_server: Store) -> None:
    transport = SocketTransport(shared_server.socket, time.monotonic() + PATIENCE_S)
    client = StoreClient(transport, READER, PATIENCE_S)
    transport._sock.send(FRAME_HEADER.pack(3) + b"abc")
    with pytest.raises(StoreUnavailable):
        client.open(keys(1))
    client.close()


@pytest.mark.parametrize("which", ["pidfd of another process", "no pidfd", "two pidfds"])
def test_a_client_must_show_its_own_pidfd(shared_server: Store, which: str) -> None:
    target = os.getppid() if which.startswith("pidfd") else os.getpid()
    fds = [os.open("/dev/null", os.O_RDONLY)] if which == "no pidfd" else [os.pidfd_open(target)]
    with raw(shared_server) as sock:
        if which == "two pidfds":
            socket.send_fds(sock, [attach_frame()[:1]], fds)
            socket.send_fds(sock, [attach_frame()[1:]], fds)
            assert sock.recv(100), "the first one counts, others are closed"
        else:
            socket.send_fds(sock, [attach_frame()], fds)
            assert b"pidfd of process" in rest_of(sock)
    for fd in fds:
        os.close(fd)


def test_a_client_that_never_reads_is_disconnected(served: Store) -> None:
    served.start(max_reads=1 << 20)
    rank = served.attach(writer(credit=64))
    chain = keys(128)
    write(rank, chain)
    with raw(served) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        socket.send_fds(sock, [attach_frame()], [pidfd := os.pidfd_open(os.getpid())])
        os.close(pidfd)
        asked = itertools.count(1)
        with pytest.raises(ConnectionError):
            sock_never_read(sock, (encode(Open(0, number, tuple(chain))) for number in asked))
    assert len(read(rank, chain)) == 128
    served.wait_for(lambda found: found.open_reads == 0 and found.pinned_pages == 0)


def test_paths_and_modes(served: Store) -> None:
    served.start(nvme=NvmeConfig(), nvme_bytes=8 << 20, segment_bytes=1 << 20)
    assert served.socket.stat().st_mode & 0o777 == 0o600
    assert served.nvme_folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(StoreConfigError, match="another store listens"):
        Store("socket", served.folder).start()
    assert served.process is not None
    own = Path(f"/proc/{served.process.process.pid}/fdinfo")
    kept = [fd.name for fd in own.iterdir() if int(fd.name) > 2 and not _close_on_exec(fd)]
    assert kept == []
    served.stop()
    assert not served.socket.exists(), "an orderly end leaves no socket"
    served.folder.chmod(0o755)
    with pytest.raises(StoreConfigError, match="chmod 700"):
        start_store(StoreConfig(host_bytes=1 << 20), served.socket)
    served.folder.chmod(0o700)
    served.socket.write_text("not a socket")
    with pytest.raises(StoreConfigError, match="no socket"):
        start_store(StoreConfig(host_bytes=1 << 20), served.socket)
    with pytest.raises(StoreConfigError, match="longer than"):
        start_store(StoreConfig(host_bytes=1 << 20), served.folder / ("x" * 120))


def _close_on_exec(fd: Path) -> bool:
    flags = next(line for line in fd.read_text(encoding="ascii").splitlines() if line.startswith("flags:"))
    return bool(int(flags.split()[1], 8) & os.O_CLOEXEC)


def test_what_a_client_holds_is_close_on_exec(shared_server: Store) -> None:
    before = set(os.listdir("/proc/self/fdinfo"))
    client = connect(shared_server.socket, READER, PATIENCE_S)
    ours = [Path("/proc/self/fdinfo") / fd for fd in set(os.listdir("/proc/self/fdinfo")) - before]
    assert all(_close_on_exec(fd) for fd in ours if fd.exists())
    client.close()
    assert set(os.listdir("/proc/self/fdinfo")) <= before | {fd.name for fd in ours if not fd.exists()}


def test_a_store_ends_with_its_parent(served: Store) -> None:
    says, said = os.pipe()

    def parent() -> int:
        process = start_store(StoreConfig(host_bytes=1 << 20), served.socket)
        os.write(said, struct.pack("<I", process.process.pid))
        while True:
            signal.pause()

    pid = forked(parent)
    (store_pid,) = struct.unpack("<I", os.read(says, 4))
    store = os.pidfd_open(store_pid)
    os.kill(pid, signal.SIGKILL)
    exit_of(pid)
    assert select.select([store], [], [], PATIENCE_S)[0], "the store lives on without its parent"
    for fd in (store, says, said):
        os.close(fd)


def test_an_attach_is_refused_while_the_writers_part_is_taken(served: Store) -> None:
    served.start()
    served.attach(writer(writer_id=5))
    with pytest.raises(StoreRefused, match="another client of writer 5"):
        served.attach(writer(writer_id=5))
