"""What the store link of a rank says reaches its leader in order, and the leader's own link once it is there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from tests.workers.launch_harness import config_of, described
from tournant.workers.device import CpuDevice
from tournant.workers.messages import StartMessage
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.rank_channel import LeaderLine
from tournant.workers.rank_leader import RankLeader
from tournant.workers.rank_link import RankLink
from tournant.workers.split import Split
from tournant.workers.transfer_messages import Attached, Detached, Event, Lent, Lookup, Order
from tournant.workers.transfer_wire import event_to_wire

PATIENCE_S = 20.0


class PlayedLink:
    """A link that a test plays."""

    def __init__(self, wake: Any) -> None:
        self.wake = wake
        self.lock = threading.Lock()
        self.said: list[Event] = []
        self.orders: list[Order] = []

    def say(self, *events: Event) -> None:
        with self.lock:
            self.said += events
        self.wake()

    def submit(self, orders: Sequence[Order]) -> None:
        self.orders += orders

    def take_events(self) -> list[Event]:
        with self.lock:
            said, self.said = self.said, []
        return said

    def close(self, flush_s: float) -> None:
        assert flush_s == 0.0
        self.said.append(Detached("closed"))


def test_events_go_to_the_leader_one_thread_at_a_time_in_order() -> None:
    made: list[PlayedLink] = []
    sent: list[list[Any]] = []
    senders: set[int] = set()

    def open_link(wake: Any) -> PlayedLink:
        made.append(PlayedLink(wake))
        return made[0]

    def send(events: list[Any]) -> None:
        senders.add(threading.get_ident())
        sent.extend(events)

    link = RankLink(open_link, send)
    events = [Lent(number) for number in range(200)]
    halves = [threading.Thread(target=lambda: [made[0].say(event) for event in events[:100]])]
    halves[0].start()
    halves[0].join()
    for event in events[100:]:
        made[0].say(event)
    link.submit([Lookup(1, ())])
    assert made[0].orders == [Lookup(1, ())]
    link.close()
    assert sent == [event_to_wire(event) for event in [*events, Detached("closed")]], "also the last ones"
    assert senders.isdisjoint({threading.get_ident(), halves[0].ident})


class Leader:
    """A leader of two ranks, and the line of the other one."""

    def __init__(self, offload: OffloadConfig | None) -> None:
        self.losses: Queue[tuple[str, str]] = Queue()
        start = StartMessage(config_of(2, 1), described(), 1, offload)
        self.leader = RankLeader(start, Split(2), 1, CpuDevice(), lambda kind, cause: self.losses.put((kind, cause)))
        place = self.leader.place
        self.line = LeaderLine(place.host, place.channel_port, place.token, 1)

    def close(self) -> None:
        self.line.close()
        self.leader.close()


def test_events_that_come_before_there_is_a_link_are_the_first_it_hears(tmp_path: Path) -> None:
    one = Leader(OffloadConfig(str(tmp_path / "socket")))
    heard: Queue[tuple[int, Sequence[Event]]] = Queue()
    attached = Attached(1, (2,), 3, 4)
    one.line.send_event([event_to_wire(attached)])
    while not one.leader._early:
        threading.Event().wait(0.002)
    one.leader.deliver_to(lambda rank, events: heard.put((rank, list(events))))
    one.line.send_event([event_to_wire(Lent(1)), event_to_wire(Detached("gone"))])
    assert heard.get(timeout=PATIENCE_S) == (1, [attached])
    assert heard.get(timeout=PATIENCE_S) == (1, [Lent(1), Detached("gone")])
    assert one.losses.empty()
    one.close()


@pytest.mark.parametrize("offload", [OffloadConfig("/s"), None], ids=["rubbish", "no tiers"])
def test_what_is_no_event_ends_the_group(offload: OffloadConfig | None) -> None:
    one = Leader(offload)
    one.line.send_event([["lent", -1, 0]] if offload is not None else [event_to_wire(Lent(1))])
    kind, cause = one.losses.get(timeout=PATIENCE_S)
    assert kind == "RankLost"
    assert cause.startswith(f"rank 1 on {socket.gethostname()} ")
    assert ("stands where a number" if offload is not None else "has no tiers below the device") in cause
    one.close()
