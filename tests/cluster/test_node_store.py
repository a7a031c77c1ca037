"""A kept store comes back under the same socket whatever ends it, and goes when it is told or idle."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kvstore.store_harness import keys, write, writer
from tournant.cluster.node_store import StoreKeeper, StorePlan
from tournant.kvstore.client import connect
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.errors import StoreConfigError, StoreUnavailable
from tournant.kvstore.nvme_tier import NvmeConfig

PLAN = StorePlan(StoreConfig(4 << 20, chunk_bytes=1 << 20), drain_s=5.0)
Keep = Callable[..., StoreKeeper]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    """Makes keepers, which end with the test."""
    made: list[StoreKeeper] = []

    def make(plan: StorePlan = PLAN, **options: object) -> StoreKeeper:
        made.append(StoreKeeper(plan, tmp_path / "kv", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for keeper in made:
        keeper.stop()
        assert keeper.pid is None or not Path("/proc", str(keeper.pid)).exists()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def with_nvme(folder: Path) -> StorePlan:
    store = StoreConfig(4 << 20, chunk_bytes=1 << 20, nvme_bytes=8 << 20, segment_bytes=1 << 20)
    return StorePlan(store, str(folder), NvmeConfig(), drain_s=10.0)


def test_a_killed_store_is_started_again_at_the_same_socket(keep: Keep) -> None:
    keeper = keep()
    socket = keeper.wait_ready()
    client = connect(socket, writer())
    first = keeper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: keeper.num_starts == 2)
    assert keeper.wait_ready() == socket
    with pytest.raises(StoreUnavailable):
        client.open(keys(1))
    client.close()
    again = connect(socket, writer())
    assert again.incarnation != client.incarnation
    assert keeper.pid != first
    again.close()


def test_what_reached_the_disk_is_adopted_by_the_next_store(
    keep: Keep, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tournant.node_store")
    plan = with_nvme(tmp_path / "nvme")
    keeper = keep(plan)
    client = connect(keeper.wait_ready(), writer())
    assert write(client, keys(3)) == 3
    client.close()
    keeper.stop()  # drains
    second = keep(plan)
    second.wait_ready()
    assert second.status().adopted == 3
    until(lambda: "adopted 3, refused 0, corrupt 0" in caplog.text)


def test_a_store_that_cannot_start_says_why_and_starts_once_it_can(keep: Keep, tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    folder.write_text("not a folder")
    keeper = keep(with_nvme(folder))
    with pytest.raises(StoreConfigError, match=str(folder)):
        keeper.wait_ready()
    folder.unlink()
    until(lambda: keeper.num_starts)
    assert keeper.wait_ready().is_socket()


def test_failures_while_an_earlier_store_ends_are_not_told(keep: Keep) -> None:
    """As after a kill of the process above: the old store still listens for as long as it drains."""
    old = keep()
    old.wait_ready()
    new = keep(patience_s=60.0)
    threading.Timer(0.5, old.stop).start()
    assert new.wait_ready() == old.socket
    assert new.num_starts == 1
    impatient = keep()
    with pytest.raises(StoreConfigError, match="another store listens"):
        impatient.wait_ready()


def test_a_store_without_clients_ends_and_then_gives_no_socket(keep: Keep) -> None:
    idle = threading.Event()
    keeper = keep(replace(PLAN, idle_exit_s=0.5), on_idle=idle.set)
    client = connect(keeper.wait_ready(), writer())
    assert not idle.wait(1.5)
    client.close()
    assert idle.wait(30)
    assert not keeper.socket.exists()
    with pytest.raises(StoreUnavailable, match="is ending"):
        keeper.wait_ready()


def test_a_store_that_does_not_answer_is_replaced(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tournant.cluster.node_store.ASK_S", 0.1)
    keeper = keep(replace(PLAN, idle_exit_s=0.4))  # asked every 0.1 s
    keeper.wait_ready()
    first = keeper.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    until(lambda: keeper.num_starts == 2)
    assert not Path("/proc", str(first)).exists()


@pytest.mark.parametrize("broken", ["os.pidfd_open", "tournant.cluster.node_store.start_store"])
def test_a_keeper_goes_on_whatever_goes_wrong_at_a_start(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(broken, fails("no more descriptors"))
        keeper = keep()
        with pytest.raises(StoreUnavailable, match="no more descriptors"):
            keeper.wait_ready(30)
        assert "no more descriptors" in caplog.text
    until(lambda: keeper.num_starts)
    connect(keeper.wait_ready(), writer()).close()


def test_a_store_whose_watch_goes_wrong_is_watched_on(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = keep(replace(PLAN, idle_exit_s=0.4))
    keeper.wait_ready()
    first = keeper.pid
    assert first is not None
    with monkeypatch.context() as patch:
        patch.setattr("tournant.cluster.node_store.ask", fails("not a status"))
        until(lambda: caplog.text.count("does not answer: RuntimeError: not a status"))
    os.kill(first, signal.SIGKILL)
    until(lambda: keeper.num_starts >= 2)
    assert keeper.wait_ready().is_socket()


def test_a_keeper_whose_idle_callback_fails_has_ended_its_store(keep: Keep, caplog: pytest.LogCaptureFixture) -> None:
    keeper = keep(replace(PLAN, idle_exit_s=0.2), on_idle=fails("Ray is gone"))
    keeper.wait_ready()
    until(lambda: "Ray is gone" in caplog.text)
    until(lambda: not keeper.socket.exists())


def fails(why: str) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise RuntimeError(why)

    return fail


def test_stop_while_it_starts_leaves_nothing(keep: Keep) -> None:
    keeper = keep()
    keeper.stop()
    assert not keeper.socket.exists()
    with pytest.raises(StoreUnavailable, match="is ending"):
        keeper.wait_ready()


def test_differences_are_named() -> None:
    other = replace(PLAN, store=StoreConfig(8 << 20, chunk_bytes=1 << 20), nvme=NvmeConfig(order="fcfs"))
    assert PLAN.differences(PLAN) == []
    assert PLAN.differences(other) == [f"host_bytes {4 << 20}, not {8 << 20}", "order scan, not fcfs"]


@pytest.mark.parametrize("name", ["drain_s", "idle_exit_s"])
def test_times_have_limits(name: str) -> None:
    with pytest.raises(StoreConfigError, match=rf"{name} is -1\.0; it must be"):
        replace(PLAN, **{name: -1.0})
