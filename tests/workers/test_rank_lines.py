"""Lines between ranks: who is let in, that no send waits, and what a line that ends, is silent or garbled says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import Queue
from typing import Any

import pytest

from tournant.kvstore.errors import InvariantViolation
from tournant.workers import rank_lines
from tournant.workers.messages import FRAME_HEADER, pack_frame
from tournant.workers.rank_lines import LineLost, RankLine, form_lines, peers_of
from tournant.workers.split import Split

TOKEN = b"t" * 32
HOST = "127.0.0.1"
PATIENCE_S = 60.0


class Place:
    """Where ranks of a group, each in a thread of this process, find one another."""

    def __init__(self) -> None:
        self.told: dict[str, Future[str]] = {}
        self._lock = threading.Lock()

    def _at(self, name: str) -> Future[str]:
        with self._lock:
            return self.told.setdefault(name, Future())

    def put(self, name: str, text: str) -> None:
        self._at(name).set_result(text)

    def get(self, name: str) -> str:
        return self._at(name).result(PATIENCE_S)

    def form(self, split: Split, rank: int, token: bytes = TOKEN, forming_s: float = PATIENCE_S) -> dict[int, RankLine]:
        return form_lines(split, rank, token, HOST, self.put, self.get, forming_s, PATIENCE_S)

    def door(self) -> tuple[str, int]:
        host, port = self.get("line/0").split()
        return host, int(port)


@pytest.fixture
def pair() -> Iterator[tuple[RankLine, RankLine]]:
    """Both ends of a line, the leader's first."""
    place = Place()
    with ThreadPoolExecutor(1) as threads, ExitStack() as ends:
        other = threads.submit(place.form, Split(2), 1)
        lines = place.form(Split(2), 0)[1], other.result(PATIENCE_S)[0]
        for line in lines:
            ends.callback(line.close)
        yield lines


def raw(line: RankLine, data: bytes) -> None:
    """Send what is perhaps no frame."""
    line._socket.sendall(data)


def closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it, waiting for that."""
    connection.settimeout(PATIENCE_S)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("split", [Split(2, 1), Split(1, 3), Split(2, 2), Split(2, 3), Split(4, 2)], ids=str)
def test_every_line_has_two_ends(split: Split) -> None:
    """The leader has one to each rank, and whoever gets tokens from the last stage one to its like there."""
    place, ranks = Place(), range(split.size)
    with ThreadPoolExecutor(split.size) as threads:
        lines = list(threads.map(lambda rank: place.form(split, rank), ranks))
    ends = {(rank, peer) for rank in ranks for peer in lines[rank]}
    assert ends == {(peer, rank) for rank, peer in ends}
    assert {peer for rank, peer in ends if rank == 0} == set(ranks) - {0}
    if split.pipeline > 1:
        last = split.size - split.tensor
        assert {(lane, last + lane) for lane in range(split.tensor)} <= ends
    assert len(ends) == 2 * (split.size - 1 + (split.tensor - 1 if split.pipeline > 1 else 0))
    for rank, peer in ends:
        lines[rank][peer].send(pack_frame(["from", rank, peer]))
    for rank, peer in ends:
        assert lines[rank][peer].receive() == ["from", peer, rank]
    for name in place.told:
        host, port = place.get(name).split()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
    for mine in lines:
        for line in mine.values():
            line.close()


def test_a_group_of_one_has_no_lines() -> None:
    assert peers_of(Split(), 0) == ([], [])


@pytest.mark.parametrize(
    "hello",
    [
        pytest.param(pack_frame(["hello", b"u" * 32, 1]), id="another token"),
        pytest.param(pack_frame(["hello", "t" * 32, 1]), id="no bytes"),
        pytest.param(pack_frame(["hello", TOKEN, 0]), id="the leader"),
        pytest.param(pack_frame(["hello", TOKEN, 3]), id="too many"),
        pytest.param(pack_frame(["hello", TOKEN, 2]), id="here already"),
        pytest.param(pack_frame(["hello", TOKEN]), id="too short"),
        pytest.param(pack_frame(["step", b"", None]), id="step"),
        pytest.param(pack_frame(["hello", TOKEN, 1]) * 2, id="twice"),
        pytest.param(FRAME_HEADER.pack(1 << 20), id="long"),
        pytest.param(FRAME_HEADER.pack(1) + b"\xc1", id="broken"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_strangers_are_put_out(hello: bytes) -> None:
    """Whoever belongs there still gets in, and only then."""
    place = Place()
    with ThreadPoolExecutor(2) as threads:
        leader, two = (threads.submit(place.form, Split(3), rank) for rank in (0, 2))
        (line,) = two.result(PATIENCE_S).values()
        with socket.create_connection(place.door()) as stranger:
            stranger.sendall(hello)
            if not hello:
                stranger.shutdown(socket.SHUT_WR)
            assert closed(stranger)
        assert not leader.done()
        (other,) = place.form(Split(3), 1).values()
        lines = leader.result(PATIENCE_S)
    assert lines.keys() == {1, 2}
    for one in (line, other, *lines.values()):
        one.close()


def test_a_hello_may_come_in_pieces_and_silent_strangers_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_lines, "MAX_STRANGERS", 2)
    place = Place()
    with ThreadPoolExecutor(1) as threads, ExitStack() as open_ones:
        leader = threads.submit(place.form, Split(2), 0)
        silent = [open_ones.enter_context(socket.create_connection(place.door())) for _ in range(4)]
        assert all(closed(stranger) for stranger in silent[:2])
        hello = pack_frame(["hello", TOKEN, 1])
        silent[3].sendall(hello[:7])
        threading.Event().wait(0.01)  # perhaps it is read in between; it must work anyhow
        silent[3].sendall(hello[7:])
        (line,) = leader.result(PATIENCE_S).values()
        assert closed(silent[2])
        line.close()


def test_a_rank_of_another_group_and_its_leader_end_with_a_cause() -> None:
    place = Place()
    with ThreadPoolExecutor(1) as threads:
        leader = threads.submit(place.form, Split(2), 0, forming_s=2.0)
        with pytest.raises(LineLost, match=r"^rank 1 is not let in: rank 0 .*; are both of the same group\?$"):
            place.form(Split(2), 1, token=b"u" * 32)
        with pytest.raises(LineLost, match=r"^of the awaited ranks 1 did not come within 2 s$"):
            leader.result(PATIENCE_S)


def test_someone_who_welcomes_another_rank_is_left() -> None:
    place = Place()
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as threads:
        place.put("line/0", f"{HOST} {listener.getsockname()[1]}")
        rank = threads.submit(place.form, Split(3), 1)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(pack_frame(["welcome", 2]))
            with pytest.raises(InvariantViolation, match="rank 0 welcomes another one than rank 1"):
                rank.result(PATIENCE_S)


def test_no_send_waits_and_order_is_kept(pair: tuple[RankLine, RankLine]) -> None:
    """Both ends send far more than sockets hold before either receives."""
    big = [["big", number, b"x" * (8 << 20)] for number in range(2)]
    for line in pair:
        for message in big:
            line.send(pack_frame(message))
            line.send(pack_frame(["small", message[1]]))
    want = [message for one in big for message in (one, ["small", one[1]])]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda line: [line.receive() for _ in want], pair)) == [want, want]
    for line in pair:
        line.settle()
        assert line._writer is None
        line.send(pack_frame(["after"]))
    assert [line.receive() for line in pair] == [["after"], ["after"]]


def test_senders_do_not_mix_their_frames(pair: tuple[RankLine, RankLine]) -> None:
    leader, rank = pair

    def send(name: str) -> None:
        for number in range(300):
            leader.send(pack_frame([name, number, b"x" * (number * 100)]))

    heard: Queue[list[Any]] = Queue()
    with ThreadPoolExecutor(3) as threads:
        sending = [threads.submit(send, name) for name in "abc"]
        for _ in range(900):
            heard.put(rank.receive())
        for one in sending:
            one.result(PATIENCE_S)
    messages = [heard.get_nowait() for _ in range(900)]
    for name in "abc":
        assert [number for who, number, _ in messages if who == name] == list(range(300))


def test_an_end_is_noticed_behind_all_that_was_sent(pair: tuple[RankLine, RankLine]) -> None:
    leader, rank = pair
    leader.send(pack_frame(["end"]))
    leader.close()
    leader.close()
    assert rank.receive() == ["end"]
    for _ in range(2):
        with pytest.raises(LineLost, match="rank 0 has ended the connection"):
            rank.receive()
    with pytest.raises(LineLost, match="rank 0 has ended the connection"):
        rank.send(pack_frame(["late"]))
    with pytest.raises(LineLost, match="the line is closed"):
        leader.send(pack_frame(["late"]))


def test_silence_ends_a_line(pair: tuple[RankLine, RankLine]) -> None:
    leader, rank = pair
    rank.limit(0.05)
    raw(leader, FRAME_HEADER.pack(100) + b"some")  # of a frame is silence, too
    with pytest.raises(LineLost, match=r"rank 0 is not heard: nothing for 0\.05 s"):
        rank.receive()


def test_who_takes_nothing_is_left_in_time(pair: tuple[RankLine, RankLine], monkeypatch: pytest.MonkeyPatch) -> None:
    leader, _ = pair
    leader.limit(0.2)
    frame = pack_frame(["big", b"x" * (32 << 20)])
    leader.send(frame)
    with pytest.raises(LineLost, match=r"rank 1 took nothing.* 0\.2 s"):
        leader.settle()
    with pytest.raises(LineLost, match="rank 1 took nothing"):
        leader.send(frame)


def test_what_is_unsent_has_a_limit(pair: tuple[RankLine, RankLine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_lines, "MAX_UNSENT_BYTES", 40 << 20)
    leader, _ = pair
    frame = pack_frame(["big", b"x" * (30 << 20)])
    leader.send(frame)
    with pytest.raises(LineLost, match=f"rank 1 has left more than {40 << 20} bytes unread"):
        leader.send(frame)
    leader.close()
    assert leader._writer is None


@pytest.mark.parametrize(
    ("rubbish", "why"),
    [
        (FRAME_HEADER.pack((64 << 20) + 1), "a frame of 67108865 bytes exceeds the limit"),
        (FRAME_HEADER.pack(1) + b"\xc1", ""),
        (FRAME_HEADER.pack(1) + b"\x01", "a frame must hold an array"),
        (FRAME_HEADER.pack(4) + b"\xdd\xff\xff\xff", ""),
    ],
    ids=["long", "broken", "no array", "promises too much"],
)
def test_what_is_no_frame_is_nobodys_message(pair: tuple[RankLine, RankLine], rubbish: bytes, why: str) -> None:
    leader, rank = pair
    raw(leader, rubbish)
    with pytest.raises(InvariantViolation, match=f"^rank 0 sent what is no frame: {why}"):
        rank.receive()
    with pytest.raises(LineLost, match=r"^rank 0 sent what is no frame: "):
        rank.receive()
