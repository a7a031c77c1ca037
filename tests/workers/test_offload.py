"""Token equality on M with real stores (I14): whatever the tiers do, the answers are those of an engine without any."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.workers.harness import Session, make_engine
from tests.workers.tiered_engine import Store, TieredSession, node_store, random_prompts, tiered
from tournant.kvstore.admin import Status, StatusQuery
from tournant.kvstore.client import ask
from tournant.kvstore.slots import SlotState
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError
from tournant.workers.offload_config import Faults, OffloadConfig

NUM_TOKENS = 12
PROMPTS = random_prompts(300, seed=1)
FEW = PROMPTS[:60]


@pytest.fixture(scope="module")
def right(tiny_model: Path) -> list[list[int]]:
    """REF: no store, one request at a time."""
    session = Session(make_engine(tiny_model, num_blocks=2000, enable_prefix_caching=False))
    return [session.ask([prompt], max_tokens=NUM_TOKENS)[0] for prompt in PROMPTS]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """TIERS of CASES.md."""
    with node_store(tmp_path) as running:
        yield running


def answers(session: TieredSession, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """32 at a time, all invariants checked after every step."""
    return session.ask_window(prompts, max_tokens=NUM_TOKENS)


def assert_store_at_rest(store: Store, sessions: int) -> None:
    """No pin, no copy; lent slots are the standing credit of the engines."""
    status = ask(store.socket, StatusQuery())
    assert isinstance(status, Status)
    pages = {SlotState(state): count for state, count in status.pages}
    assert pages[SlotState.DRAINING] == 0
    assert status.pinned_pages == 0
    credits = (16, 8)[:sessions]  # each half of what was left of a quarter of 128 slots, which have eight pages
    assert pages[SlotState.LENT] == sum(credits) * 8


def test_store_on_equals_store_off_and_what_returns_from_each_tier(
    tiny_model: Path, tmp_path: Path, right: list[list[int]]
) -> None:
    with node_store(tmp_path, nvme_bytes=256 << 20) as store:  # room for all prompts on NVMe, for few in RAM
        check_returns(tiny_model, store, right)


def check_returns(tiny_model: Path, store: Store, right: list[list[int]]) -> None:
    """The same engine again, another one, and both after a restart and a kill of the store."""
    first = tiered(tiny_model, store.socket)
    first.attach()
    assert answers(first) == right
    first.settle()
    assert answers(first) == right  # the pool is far too small: most of it comes from below
    tiers = first.engine.stats().tiers
    assert tiers.nvme_hit_tokens > 20_000
    assert tiers.host_hit_tokens + tiers.nvme_hit_tokens > 40_000

    second = tiered(tiny_model, store.socket)  # with another engine's blocks
    second.attach()
    assert answers(second) == right
    found = second.engine.stats().tiers
    assert found.host_hit_tokens + found.nvme_hit_tokens > 40_000
    for session in (first, second):
        session.settle()
    assert_store_at_rest(store, 2)

    for end in ("stop", "kill"):  # a restart of both, then one after kill -9
        second.close()
        store.process.stop() if end == "stop" else store.process.kill()
        store.start()
        second = tiered(tiny_model, store.socket)
        second.attach()
        assert answers(second) == right
        again = second.engine.stats().tiers
        assert again.nvme_hit_tokens > 30_000, end
        second.settle()
    second.close()
    first.close()


def test_every_prefix_from_host(tiny_model: Path, tmp_path: Path, right: list[list[int]]) -> None:
    with node_store(tmp_path, 4000, nvme=False) as store:
        session = tiered(tiny_model, store.socket, 400)
        session.attach()
        assert answers(session, FEW) == right[: len(FEW)]
        session.forget_device()
        assert answers(session, FEW) == right[: len(FEW)]
        full = sum((len(prompt) - 1) // 16 * 16 for prompt in FEW)
        assert session.engine.stats().tiers.host_hit_tokens == full
        session.close()


def test_a_preemption_storm_with_the_pool_at_its_limit(tiny_model: Path, store: Store, right: list[list[int]]) -> None:
    session = tiered(tiny_model, store.socket, 30)
    session.attach()
    long = {"max_tokens": 60}
    alone = Session(make_engine(tiny_model, num_blocks=400, enable_prefix_caching=False))
    wanted = [alone.ask([prompt], **long)[0] for prompt in FEW]
    assert session.ask_window(FEW, **long) == wanted
    stats = session.engine.stats()
    assert stats.num_preemptions > 10
    assert stats.tiers.swapped > 5
    assert stats.tiers.stashed > 5
    session.settle()
    session.close()


FAULTS = {
    "late kernels": Faults(kernel_delay_ms=5),
    "slow saves": Faults(save_delay_ms=2),
    "slow loads": Faults(load_delay_ms=2),
    "failing saves": Faults(fail_every_save=3),
    "failing loads": Faults(fail_every_load=5),
    "flipped saves": Faults(flip_every_save=4),
    "flipped loads": Faults(flip_every_load=4),
    "everything": Faults(1, 1, 1, 7, 7, 5, 5),
}


@pytest.mark.parametrize("name", FAULTS)
def test_with_each_fault_switched_on(tiny_model: Path, store: Store, right: list[list[int]], name: str) -> None:
    late = {"num_in_flight": 2} if FAULTS[name].kernel_delay_ms else {}
    session = tiered(tiny_model, store.socket, faults=FAULTS[name], engine=late)
    session.attach()
    for _ in range(2):
        assert answers(session, FEW) == right[: len(FEW)]
    tiers = session.engine.stats().tiers
    assert tiers.restores > 5
    if "flip" in name:
        assert tiers.corrupt_blocks + tiers.lost_blocks > 0
    session.settle()
    session.engine.validate()
    session.close()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_store_dies_or_stops_while_requests_run(
    tiny_model: Path, store: Store, right: list[list[int]], signal_number: int
) -> None:
    session = tiered(tiny_model, store.socket, lookup_ms=20, restore_ms=50)
    session.attach()
    answers(session, FEW)
    killer = threading.Timer(0.1, os.kill, (store.process.process.pid, signal_number))
    killer.start()
    for _ in range(3):
        assert answers(session, FEW) == right[: len(FEW)]
    killer.join()
    store.process.kill()
    store.start()
    session.attach()
    session.settle()
    losses = session.engine.stats().tiers.store_losses
    assert losses >= 1
    assert answers(session, FEW) == right[: len(FEW)]
    session.settle()
    session.close()


def test_two_engines_at_once_share_what_they_compute(tiny_model: Path, store: Store, right: list[list[int]]) -> None:
    sessions = [tiered(tiny_model, store.socket) for _ in range(2)]
    for session in sessions:
        session.attach()
    numbers = {session: [session.submit(prompt, max_tokens=NUM_TOKENS) for prompt in FEW] for session in sessions}
    while any(session.engine.has_work for session in sessions):
        for session in sessions:
            session.step()
    for session in sessions:
        assert [session.tokens(number) for number in numbers[session]] == right[: len(FEW)]
        session.settle()
    assert_store_at_rest(store, 2)
    for session in sessions:
        session.close()


def test_engines_of_other_numerics_share_nothing(tiny_model: Path, store: Store) -> None:
    plain, other = tiered(tiny_model, store.socket), tiered(tiny_model, store.socket, engine={"deterministic": False})
    plain.attach()
    other.attach()
    plain.ask_window(FEW[:5], max_tokens=4)
    plain.settle()
    other.ask_window(FEW[:5], max_tokens=4)
    assert other.engine.stats().prefix_hit_tokens == 0
    plain.close()
    other.close()


def test_load_or_recompute_counts_both_estimates(tiny_model: Path, store: Store, right: list[list[int]]) -> None:
    session = tiered(tiny_model, store.socket, restore="auto")
    session.attach()
    for _ in range(2):
        assert answers(session, FEW) == right[: len(FEW)]
    tiers = session.engine.stats().tiers
    assert tiers.chose_load + tiers.chose_recompute > 20
    assert tiers.estimated_recompute_seconds > 0
    assert tiers.prefill_tokens_per_second > 0
    never = tiered(tiny_model, store.socket, restore="never")
    never.attach()
    assert answers(never, FEW) == right[: len(FEW)]
    assert replace(never.engine.stats().tiers).restores == 0
    session.close()
    never.close()


def test_an_engine_goes_on_beside_a_store_that_refuses_it(
    tiny_model: Path, tmp_path: Path, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tournant.workers.store_link.LAST_REFUSAL_S", 0.05)
    store = Store(tmp_path, nvme=False)
    session = tiered(tiny_model, store.socket)
    session.attach()
    assert answers(session, FEW[:10]) == right[:10]
    store.process.kill()
    other = Store(tmp_path, host_blocks=3, nvme=False)  # one block is more than a quarter
    while session.engine.stats().tiers.store_refusals < 4:
        session.turn()
    assert answers(session, FEW[:10]) == right[:10]
    assert session.engine.stats().tiers.attached == 0
    other.process.kill()
    store.start()
    session.attach()
    assert answers(session, FEW[:10]) == right[:10]
    session.settle()
    session.close()
    store.process.kill()


def test_an_engine_does_not_start_beside_a_store_that_will_never_serve_it(tiny_model: Path, tmp_path: Path) -> None:
    with node_store(tmp_path, 3, nvme=False) as store:
        session = tiered(tiny_model, store.socket)
        woken = session._woken
        with pytest.raises(ConfigError, match=r"does not serve this engine: .* more host_bytes"):
            session.engine.attach(lambda seconds: woken.wait(seconds), 30.0)
        session.close()


def test_an_engine_without_its_store_serves(tiny_model: Path, tmp_path: Path, right: list[list[int]]) -> None:
    session = tiered(tiny_model, tmp_path / "nothing" / "here")
    assert answers(session, FEW[:10]) == right[:10]
    assert session.engine.stats().tiers.attached == 0
    session.close()


def test_an_engine_needs_both_its_link_and_its_configuration(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    with pytest.raises(ConfigError, match="OffloadConfig"):
        type(engine)(EngineConfig(), engine.runner, engine.info, offload=OffloadConfig("unused"))
