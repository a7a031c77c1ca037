"""An engine and its tiers, with a link that answers at once or when the test says so."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from tests.workers.fake_link import FakeLink, FakeStore
from tests.workers.fake_runner import FakeRunner, expected_tokens, make_engine
from tests.workers.test_engine import ask
from tournant.workers.engine import Engine
from tournant.workers.messages import EngineRequest, RequestOutput
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.sampling_params import SamplingParams
from tournant.workers.sequence import SequenceState
from tournant.workers.transfer_messages import (
    Event,
    Fetch,
    Fetched,
    Found,
    Link,
    Load,
    Loaded,
    Lookup,
    ReadEnded,
    Save,
    Stash,
    Unstash,
)


class Tiered:
    """An engine with a fake store below, which always restores: what the fake device computes costs nothing."""

    def __init__(
        self,
        store: FakeStore,
        num_blocks: int = 16,
        credit: int | tuple[int, ...] = 16,
        link: type[FakeLink] = FakeLink,
        **offload: object,
    ) -> None:
        self.store = store
        self.links: list[FakeLink] = []

        def tiers(runner: FakeRunner) -> tuple[Link, OffloadConfig]:
            self.links.append(link(runner, store, credit if isinstance(credit, tuple) else (credit,)))
            return self.links[-1], OffloadConfig("unused", **{"restore": "always"} | offload)  # type: ignore[arg-type]

        self.engine = make_engine(num_blocks, tiers=tiers)
        self.link = self.links[0]
        self.outputs: dict[int, list[int]] = {}
        self.first: dict[int, RequestOutput] = {}

    def submit(self, number: int, prompt: list[int], **params: object) -> None:
        """Queue one greedy request."""
        fields = {"max_tokens": 4, "seed": 0, "ignore_eos": True} | params
        self.book(self.engine.add_request(EngineRequest(number, prompt, SamplingParams(**fields))))  # type: ignore[arg-type]

    def book(self, outputs: list[RequestOutput]) -> None:
        """Sort outputs by request."""
        for output in outputs:
            self.first.setdefault(output.request_id, output)
            self.outputs.setdefault(output.request_id, []).extend(output.token_ids)

    def step(self) -> None:
        """One turn, checked."""
        self.book(self.engine.step())
        self.engine.validate()

    def rest(self) -> None:
        """Run until nothing is left to compute and nothing to copy down."""
        for _ in range(5000):
            self.step()
            if not self.engine.has_work and self.engine.stats().tiers.dirty_blocks == 0:
                return
        raise AssertionError("the engine does not come to rest")

    def ask(self, number: int, prompt: list[int], **params: object) -> RequestOutput:
        """One request, alone; its first output."""
        self.submit(number, prompt, **params)
        self.rest()
        return self.first[number]


def prompt_of(number: int, length: int = 41) -> list[int]:
    return [number * 100 + token for token in range(length)]


def test_what_left_the_device_comes_back_with_the_same_tokens() -> None:
    tiered = Tiered(FakeStore())
    for number in range(1, 6):
        assert tiered.ask(number, prompt_of(number)).cached_by_tier == (0, 0, 0)
    again = tiered.ask(11, prompt_of(1))
    assert again.cached_tokens == 40
    assert again.cached_by_tier == (0, 40, 0)
    assert tiered.outputs[11] == tiered.outputs[1] == expected_tokens(prompt_of(1), 4)
    assert tiered.engine.stats().tiers.host_hit_tokens == 40


def test_hits_are_split_by_tier() -> None:
    tiered = Tiered(FakeStore())
    tiered.ask(1, prompt_of(1))
    keys = list(tiered.store.images)
    tiered.store.on_nvme = set(keys[3:])
    tiered.engine.reset_prefix_cache()
    assert tiered.ask(2, prompt_of(1)).cached_by_tier == (0, 24, 16)
    tiered.ask(3, prompt_of(3, 100))  # pushes the tail out
    partly = tiered.ask(4, prompt_of(1)).cached_by_tier
    assert partly is not None
    assert sum(partly) == 40
    assert tiered.outputs[4] == tiered.outputs[1]


def test_another_engine_and_a_restarted_one_restore_what_the_first_computed() -> None:
    store = FakeStore()
    first = Tiered(store)
    first.ask(1, prompt_of(1))
    second = Tiered(store)
    assert second.ask(1, prompt_of(1)).cached_by_tier == (0, 40, 0)
    assert second.outputs[1] == first.outputs[1]
    assert not [order for order in second.link.orders if isinstance(order, Save)]  # it lies below already


def test_others_run_while_a_request_restores() -> None:
    tiered = Tiered(FakeStore(), num_blocks=32)
    tiered.ask(1, prompt_of(1))
    tiered.engine.reset_prefix_cache()
    tiered.link.hold = (Load,)
    tiered.submit(2, prompt_of(1))
    tiered.step()
    tiered.submit(3, prompt_of(3))
    while 3 not in tiered.outputs or len(tiered.outputs[3]) < 4:
        tiered.step()
    assert 2 not in tiered.outputs
    assert tiered.engine.stats().num_restoring == 1
    tiered.link.hold = ()
    tiered.link.let_go()
    tiered.rest()
    assert tiered.outputs[2] == tiered.outputs[1]
    assert tiered.first[2].cached_by_tier == (0, 40, 0)


def test_blocks_of_another_node_are_restored_and_lie_here_then() -> None:
    store = FakeStore()
    first = Tiered(store)
    first.ask(1, prompt_of(1))
    store.elsewhere = set(list(store.images)[-3:])
    second = Tiered(store)
    assert second.ask(1, prompt_of(1)).cached_by_tier == (0, 40, 0), "they came out of RAM here"
    assert second.outputs[1] == first.outputs[1]
    assert not [order for order in second.link.orders if isinstance(order, Save)]
    tiers = second.engine.stats().tiers
    assert (tiers.remote_blocks, tiers.remote_bytes, tiers.remote_failures) == (3, 3000, 0)
    assert tiers.bytes_per_second_remote > 0


def test_what_only_another_node_has_is_saved_here_when_it_was_computed() -> None:
    store = FakeStore()
    Tiered(store).ask(1, prompt_of(1))
    store.elsewhere = set(store.images)
    store.versions.clear()  # the next engine has the same writer id in these tests
    tiered = Tiered(store, restore_ms=1)
    tiered.link.hold = (Fetch,)
    tiered.submit(1, prompt_of(1))
    tiered.rest()
    assert tiered.first[1].cached_tokens == 0
    saved = {entry.key for order in tiered.link.orders if isinstance(order, Save) for entry in order.entries}
    assert saved >= store.elsewhere


class Boasting(FakeLink):
    """Claims more than it was asked for."""

    def take_events(self) -> list[Event]:
        """See `Link`."""
        found: list[Event] = []
        for event in super().take_events():
            match event:
                case Found(read, tiers, seconds) if tiers:
                    event = Found(read, tiers * 40, seconds)
                case Fetched(read, count, num_bytes, seconds):
                    event = Fetched(read, count + 99, num_bytes, seconds)
                case ReadEnded(read, count, num_bytes, seconds) if count:
                    found.append(Loaded(read, count + 99))
                    event = ReadEnded(read, count + 99, num_bytes, seconds)
            found.append(event)
        return found


def test_answers_beyond_the_question_are_cut() -> None:
    tiered = Tiered(FakeStore(), link=Boasting)
    tiered.ask(1, prompt_of(1))
    tiered.engine.reset_prefix_cache()
    assert tiered.ask(2, prompt_of(1)).cached_by_tier == (0, 40, 0)
    assert tiered.outputs[2] == tiered.outputs[1]


@pytest.mark.parametrize("kind", [Lookup, Fetch, Load])
def test_a_deadline_ends_the_wait_and_blocks_stay_held_until_the_copy_has_ended(kind: type) -> None:
    tiered = Tiered(FakeStore(), lookup_ms=1, restore_ms=1)
    tiered.ask(1, prompt_of(1))
    tiered.engine.reset_prefix_cache()
    tiered.link.hold = (kind,)
    tiered.submit(2, prompt_of(1))
    tiered.rest()
    assert tiered.outputs[2] == tiered.outputs[1]
    assert tiered.first[2].cached_tokens == 0
    stats = tiered.engine.stats()
    assert stats.tiers.late_lookups == (kind is Lookup)
    assert stats.tiers.cut_restores == (kind is not Lookup)
    assert stats.kv_used == (5 if kind is Load else 0)
    tiered.link.let_go()
    tiered.step()
    assert tiered.engine.stats().kv_used == 0


def test_a_lookup_is_waited_for_while_the_batches_before_it_are_in_flight() -> None:
    """However long these take: ranks of later stages hear of it behind them."""
    tiered = Tiered(FakeStore(), lookup_ms=1)
    tiered.ask(1, prompt_of(1))
    tiered.engine.reset_prefix_cache()
    tiered.engine._tiers.restores.least_turns = 3  # type: ignore[union-attr]
    clock = itertools.count(time.monotonic())
    tiered.engine._clock = lambda: next(clock)  # a second passes whenever it is read
    tiered.link.hold = (Lookup,)
    tiered.submit(2, prompt_of(1))
    for _ in range(3):  # the first one asks
        tiered.step()
        assert tiered.engine.stats().num_waiting == 1
    assert tiered.engine.stats().tiers.late_lookups == 0
    tiered.link.hold = ()
    tiered.link.let_go()
    tiered.rest()
    assert tiered.first[2].cached_by_tier == (0, 40, 0)


@pytest.mark.parametrize("kind", [Lookup, Fetch, Load])
def test_a_request_that_is_cancelled_while_it_restores_leaves_nothing(kind: type) -> None:
    tiered = Tiered(FakeStore())
    tiered.ask(1, prompt_of(1))
    tiered.engine.reset_prefix_cache()
    tiered.link.hold = (kind,)
    tiered.submit(2, prompt_of(1))
    for _ in range(3):
        tiered.step()
    tiered.engine.abort(2)
    tiered.engine.validate()
    tiered.link.hold = ()
    tiered.link.let_go()
    tiered.rest()
    assert tiered.engine.stats().kv_used == 0
    assert tiered.engine.wait_s() is None


def test_nothing_is_saved_twice_or_beyond_the_credit() -> None:
    tiered = Tiered(FakeStore(), credit=2)
    tiered.ask(1, prompt_of(1))
    tiered.ask(2, prompt_of(1))
    saves = [order for order in tiered.link.orders if isinstance(order, Save)]
    assert all(len(save.entries) <= 2 for save in saves)
    keys = [entry.key for save in saves for entry in save.entries]
    assert len(keys) == len(set(keys)) == 5


def test_a_lost_store_costs_only_time() -> None:
    tiered = Tiered(FakeStore())
    tiered.ask(1, prompt_of(1))
    tiered.link.lose()
    tiered.rest()
    assert len(tiered.store.images) == 5  # what the device still has went down again
    assert tiered.engine.stats().tiers.store_losses == 1
    tiered.step()  # the copies have ended
    assert tiered.engine.reset_prefix_cache()
    assert tiered.ask(2, prompt_of(1)).cached_by_tier == (0, 40, 0)


def test_failed_saves_are_tried_again_later() -> None:
    tiered = Tiered(FakeStore())
    tiered.link.fail_saves = True
    tiered.submit(1, prompt_of(1))
    while tiered.engine.has_work:
        tiered.step()
    tiered.step()
    tiered.step()
    wait = tiered.engine.wait_s()
    assert tiered.engine.stats().tiers.dirty_blocks == 5
    assert wait is not None
    assert wait > 0
    tiered.link.fail_saves = False
    tiered.rest()
    assert len(tiered.store.images) == 5


def test_a_chain_counts_as_used_once_its_last_block_is_below() -> None:
    tiered = Tiered(FakeStore())
    tiered.link.hold = (Save,)
    tiered.submit(1, prompt_of(1))
    while tiered.engine.has_work:
        tiered.step()
    assert tiered.store.used == []
    tiered.link.hold = ()
    tiered.link.let_go()
    tiered.rest()
    (used,) = tiered.store.used
    assert set(used) == set(tiered.store.images)
    assert len(used) == 5


def test_a_preempted_sequence_goes_on_from_below_with_its_growing_block() -> None:
    tiered = Tiered(FakeStore(), num_blocks=10)
    prompts = {number: prompt_of(number, 12) for number in range(1, 5)}
    for number, prompt in prompts.items():
        tiered.submit(number, prompt, max_tokens=40)
    tiered.rest()
    for number, prompt in prompts.items():
        assert tiered.outputs[number] == expected_tokens(prompt, 40)
    stats = tiered.engine.stats()
    assert stats.num_preemptions
    assert stats.tiers.swapped
    assert stats.tiers.stashed
    kinds = {type(order) for order in tiered.link.orders}
    assert {Stash, Unstash} <= kinds
    assert tiered.engine.stats().kv_used == 0


def test_prompt_logprobs_and_forks_restore_nothing_but_answer_the_same() -> None:
    tiered = Tiered(FakeStore(), num_blocks=32)
    tiered.ask(1, prompt_of(1))
    tiered.engine.reset_prefix_cache()
    tiered.submit(2, prompt_of(1), n=3)
    tiered.rest()
    restoring = [order for order in tiered.link.orders if isinstance(order, Load)]
    assert len(restoring) == 1  # the first answer; the others share its blocks


def test_random_work_at_a_full_pool_equals_the_reference() -> None:
    rng = random.Random(3)
    store = FakeStore()
    tiered = Tiered(store, num_blocks=14, credit=5)
    wanted: dict[int, list[int]] = {}
    for number in range(1, 200):
        length = rng.randrange(1, 60)
        prompt = prompt_of(rng.randrange(6), length)
        count = rng.randrange(1, 40)
        wanted[number] = expected_tokens(prompt, count)
        tiered.submit(number, prompt, max_tokens=count)
        for _ in range(rng.randrange(6)):
            tiered.step()
        if rng.random() < 0.03:
            tiered.link.lose()
        if rng.random() < 0.1 and store.images:
            store.images.pop(rng.choice(list(store.images)))
    tiered.rest()
    assert tiered.outputs == wanted
    assert tiered.engine.stats().tiers.host_hit_tokens > 500


def test_an_engine_without_tiers_saves_nothing_and_says_so() -> None:
    engine: Engine = make_engine(num_blocks=16)
    assert ask(engine, 1, prompt_of(1))[0].cached_by_tier == (0, 0, 0)
    stats = engine.stats().tiers
    assert stats.attached == 0
    assert stats.dirty_blocks == 0
    assert SequenceState.RESTORING.value == "restoring"


def test_a_request_cancelled_after_its_load_has_ended_leaves_nothing() -> None:
    tiered = Tiered(FakeStore())
    tiered.ask(1, prompt_of(1))
    tiered.engine.reset_prefix_cache()
    tiered.link.hold = (Load,)
    tiered.submit(2, prompt_of(1))
    while not tiered.link.held:
        tiered.step()
    tiered.link.let_go()
    tiers = tiered.engine.scheduler.tiers
    assert tiers is not None
    for event in tiered.link.take_events():
        tiers.on_event(event, 0.0)
    tiered.engine.abort(2)
    tiered.engine.validate()
    assert tiered.engine.stats().kv_used == 0


# ---- blocks of two kinds

CODED = {"lower_kv_dtype": "fp8_e4m3", "lower_kv_dtype_from": 10}  # from the third block of 8 on


def saves_of(tiered: Tiered) -> list[Save]:
    return [order for order in tiered.link.orders if isinstance(order, Save)]


def test_blocks_of_two_kinds_go_down_in_saves_of_one() -> None:
    """The link checks credit and writer of each kind."""
    tiered = Tiered(FakeStore(), num_blocks=32, credit=(1, 2), **CODED)
    for number in (1, 2, 3):
        tiered.ask(number, prompt_of(number))
    depths = {
        kind: [e.depth for save in saves_of(tiered) if save.kind == kind for e in save.entries] for kind in (0, 1)
    }
    assert {kind: sorted(found) for kind, found in depths.items()} == {
        0: sorted([0, 1] * 3),
        1: sorted([2, 3, 4] * 3),
    }
    assert max(len(save.entries) for save in saves_of(tiered)) == 2
    tiered.engine.reset_prefix_cache()
    assert tiered.ask(4, prompt_of(1)).cached_by_tier == (0, 40, 0)
    assert tiered.outputs[4] == tiered.outputs[1]


def test_with_one_kind_in_the_store_all_blocks_are_of_that() -> None:
    tiered = Tiered(FakeStore(), credit=16, **CODED)
    tiered.ask(1, prompt_of(1))
    assert {save.kind for save in saves_of(tiered)} == {0}
    assert sum(len(save.entries) for save in saves_of(tiered)) == 5


def test_a_kind_without_credit_does_not_hold_up_the_other_and_costs_no_steps() -> None:
    tiered = Tiered(FakeStore(), num_blocks=32, credit=(16, 1), **CODED)
    tiered.link.hold = (Save,)
    for number in (1, 2):
        tiered.submit(number, prompt_of(number))
    while tiered.engine.has_work:
        tiered.step()
    for _ in range(3):
        tiered.step()
    saved = {kind: sum(len(save.entries) for save in saves_of(tiered) if save.kind == kind) for kind in (0, 1)}
    assert saved == {0: 4, 1: 1}
    assert tiered.engine.stats().tiers.dirty_blocks == 5
    assert tiered.engine.stats().tiers.skipped_saves > 0
    assert tiered.engine.wait_s() is None, "nothing can be done before credit comes"
    tiered.link.hold = ()
    tiered.link.let_go()
    tiered.rest()
    assert len(tiered.store.images) == 10


def test_a_preempted_sequence_of_two_kinds_goes_down_whole_or_not_at_all() -> None:
    prompts = {number: prompt_of(number, 12) for number in range(1, 5)}
    for credit in ((16, 16), (16, 0)):
        tiered = Tiered(FakeStore(), num_blocks=10, credit=credit, copy_start=1.0, copy_parallel=1.0, **CODED)
        for number, prompt in prompts.items():
            tiered.submit(number, prompt, max_tokens=40)
        while tiered.engine.has_work:
            tiered.step()
        for number, prompt in prompts.items():
            assert tiered.outputs[number] == expected_tokens(prompt, 40)
        stats = tiered.engine.stats()
        assert stats.num_preemptions
        assert (stats.tiers.swapped == stats.num_preemptions) == bool(credit[1])
        assert {save.kind for save in saves_of(tiered)} == ({0, 1} if credit[1] else {0})
        assert stats.tiers.stashed == 0, "a growing block would be rounded"


def test_random_work_with_two_kinds_equals_the_reference() -> None:
    rng = random.Random(5)
    store = FakeStore()
    tiered = Tiered(store, num_blocks=14, credit=(2, 3), **CODED)
    wanted: dict[int, list[int]] = {}
    for number in range(1, 200):
        prompt, count = prompt_of(rng.randrange(6), rng.randrange(1, 60)), rng.randrange(1, 40)
        wanted[number] = expected_tokens(prompt, count)
        tiered.submit(number, prompt, max_tokens=count)
        for _ in range(rng.randrange(6)):
            tiered.step()
        if rng.random() < 0.03:
            tiered.link.lose()
        if rng.random() < 0.1 and store.images:
            store.images.pop(rng.choice(list(store.images)))
    tiered.rest()
    tiered.step()
    assert tiered.outputs == wanted
    assert tiered.engine.stats().tiers.host_hit_tokens > 500
    assert tiered.link.free == [2, 3]
