"""The line between ranks and their leader: who is taken for a rank, what a loss is, and which of two comes first."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Queue
from typing import Any

import pytest

from tournant.workers import rank_channel
from tournant.workers.errors import ConfigError
from tournant.workers.messages import FRAME_HEADER, pack_frame
from tournant.workers.rank_channel import LeaderLine, RankChannel
from tournant.workers.rank_group import RankLost

TOKEN = b"t" * 32
HOST = "127.0.0.1"


class Leader:
    """A channel, and what it reported."""

    def __init__(self, size: int = 4, silence_s: float = 60.0) -> None:
        self.events: Queue[tuple[int, list[Any]]] = Queue()
        self.losses: Queue[tuple[str, str]] = Queue()
        self.lines: list[LeaderLine] = []
        self.channel = RankChannel(
            HOST,
            size,
            TOKEN,
            lambda rank, data: self.events.put((rank, data)),
            lambda kind, cause: self.losses.put((kind, cause)),
            silence_s,
        )

    def rank(self, number: int) -> LeaderLine:
        """A rank that has arrived."""
        line = LeaderLine(HOST, self.channel.port, TOKEN, number)
        line.send_event(["here"])
        assert self.events.get(timeout=20) == (number, ["here"])
        self.lines.append(line)  # else it would close
        return line

    def loss(self) -> tuple[str, str]:
        return self.losses.get(timeout=20)


@pytest.fixture
def make() -> Iterator[Callable[..., Leader]]:
    made: list[Leader] = []

    def build(**fields: Any) -> Leader:
        made.append(Leader(**fields))
        return made[-1]

    yield build
    for leader in made:
        leader.channel.close(0.0)
        for line in leader.lines:
            line.close()
        assert leader.losses.empty(), "one loss is reported, once"
        assert not leader.channel._thread.is_alive()


def closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it, waiting for that."""
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_events_arrive_in_order_with_their_rank(make: Callable[..., Leader]) -> None:
    leader = make()
    lines = [leader.rank(number) for number in (1, 2, 3)]
    big = b"x" * (1 << 20)
    for line in lines:
        line.beat()
        line.send_event([1, big, {"a": None}])
        line.send_event([2])
    found = [leader.events.get(timeout=20) for _ in range(6)]
    for number in (1, 2, 3):
        assert [data for rank, data in found if rank == number] == [[1, big, {"a": None}], [2]]
    assert lines[0].address == HOST


@pytest.mark.parametrize(
    "hello",
    [
        pytest.param(pack_frame(["hello", b"u" * 32, 1, "host", 1]), id="another token"),
        pytest.param(pack_frame(["hello", "t" * 32, 1, "host", 1]), id="no bytes"),
        pytest.param(pack_frame(["hello", TOKEN, 0, "host", 1]), id="the leader"),
        pytest.param(pack_frame(["hello", TOKEN, 4, "host", 1]), id="too many"),
        pytest.param(pack_frame(["hello", TOKEN, 2, "host", 1]), id="here already"),
        pytest.param(pack_frame(["hello", TOKEN, 1, "host"]), id="too short"),
        pytest.param(pack_frame(["event", 5]), id="event"),
        pytest.param(pack_frame(["beat"]), id="beat"),
        pytest.param(pack_frame(["failed", "ConfigError", "no"]), id="failed"),
        pytest.param(FRAME_HEADER.pack(1 << 20), id="long"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
    ],
)
def test_strangers_are_closed(make: Callable[..., Leader], hello: bytes) -> None:
    """None of it is a loss, an event or anything else; who belongs there still gets in."""
    leader = make()
    leader.rank(2)
    with socket.create_connection((HOST, leader.channel.port)) as stranger:
        stranger.sendall(hello)
        assert closed(stranger)
    leader.rank(1)
    assert leader.events.empty()


def test_strangers_are_few_and_must_speak(make: Callable[..., Leader], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_channel, "HELLO_S", 0.2)
    monkeypatch.setattr(rank_channel, "MAX_STRANGERS", 2)
    leader = make()
    strangers = [socket.create_connection((HOST, leader.channel.port)) for _ in range(4)]
    assert all(closed(stranger) for stranger in strangers)
    leader.rank(1)


def test_a_rank_gets_in_though_strangers_hold_all_places(
    make: Callable[..., Leader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_channel, "HELLO_S", 600.0)
    monkeypatch.setattr(rank_channel, "MAX_STRANGERS", 2)
    leader = make()
    strangers = [socket.create_connection((HOST, leader.channel.port)) for _ in range(2)]
    leader.rank(1)
    assert closed(strangers[0]), "the one that came first"
    leader.rank(2)
    assert leader.events.empty()
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_says_a_little_now_and_then_must_go_too(
    make: Callable[..., Leader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_channel, "HELLO_S", 0.2)
    leader = make()
    with socket.create_connection((HOST, leader.channel.port)) as stranger, suppress(OSError):
        stranger.settimeout(0.02)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            stranger.sendall(b"\x00")
            with suppress(TimeoutError):
                if not stranger.recv(1):
                    break
        assert time.monotonic() < deadline
    leader.rank(1)


def test_an_end_is_a_loss_at_once(make: Callable[..., Leader]) -> None:
    leader = make()
    lines = [leader.rank(number) for number in (1, 2)]
    lines[1].close()
    kind, cause = leader.loss()
    assert kind == "RankLost"
    assert cause.startswith(f"rank 2 on {socket.gethostname()} (process ")
    assert cause.endswith("): its process ended")
    lines[0].close()  # another one is no other loss, see the fixture


def test_silence_is_a_loss(make: Callable[..., Leader]) -> None:
    leader = make(silence_s=1.0)
    speaks, _silent = leader.rank(1), leader.rank(2)
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.05):
            speaks.beat()

    beating = threading.Thread(target=beat)
    beating.start()
    kind, cause = leader.loss()
    done.set()
    beating.join()
    assert (kind, cause.partition(" on ")[0]) == ("RankLost", "rank 2")
    assert cause.endswith("nothing was heard of it for 1 s")


def test_the_first_cause_is_the_one_that_is_told(make: Callable[..., Leader]) -> None:
    """Ranks that miss another say so, often before the end of the other is seen."""
    leader = make()
    first, second, third = (leader.rank(number) for number in (1, 2, 3))
    first.fail(RankLost("could not hear from the leader"))
    second.fail(RankLost("could not add up"))
    first.close()
    third.fail(ConfigError("no GPU here"))
    kind, cause = leader.loss()
    assert kind == "ConfigError"
    assert cause.startswith("rank 3 on ")
    assert cause.endswith(": ConfigError: no GPU here")


def test_a_rank_that_misses_another_is_believed_when_nobody_says_more(make: Callable[..., Leader]) -> None:
    leader = make()
    line = leader.rank(1)
    line.fail(RankLost("could not add up"))
    kind, cause = leader.loss()
    assert (kind, cause.partition(": ")[2]) == ("RankLost", "RankLost: could not add up")


@pytest.mark.parametrize(
    "rubbish",
    [pack_frame(["orders"]), FRAME_HEADER.pack((64 << 20) + 1), FRAME_HEADER.pack(1) + b"\xc1"],
    ids=["unknown", "long", "broken"],
)
def test_rubbish_of_a_rank_is_a_loss(make: Callable[..., Leader], rubbish: bytes) -> None:
    leader = make()
    line = leader.rank(1)
    line._socket.sendall(rubbish)
    _, cause = leader.loss()
    assert ": it sent what is no frame: " in cause


def test_a_callback_that_fails_is_a_loss(make: Callable[..., Leader]) -> None:
    leader = make()
    line = leader.rank(1)
    leader.channel._on_event = lambda rank, data: [][rank]
    line.send_event([1])
    assert leader.loss() == ("IndexError", "rank 0: IndexError: list index out of range")


def test_after_the_end_ranks_may_go(make: Callable[..., Leader]) -> None:
    leader = make()
    lines = [leader.rank(number) for number in (1, 2, 3)]
    leader.channel.end()
    lines[0].close()
    lines[1].fail(RankLost("the leader is gone"))
    for line in lines:
        line.close()
    leader.channel.close(20.0)
    with pytest.raises(OSError, match="refused"):
        LeaderLine(HOST, leader.channel.port, TOKEN, 1)


def test_a_rank_sees_the_end_of_its_leader(make: Callable[..., Leader]) -> None:
    leader = make()
    line = leader.rank(1)
    leader.channel.close(0.0)
    assert closed(line._socket)
    with pytest.raises(OSError, match=r"Broken pipe|reset"):  # noqa: PT012 - the first one may still be taken
        for _ in range(1000):
            line.beat()
