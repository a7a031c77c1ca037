"""The roll-out: what users see of it, many schedules with faults, the mutation gate, and a machine that shrinks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.cluster.rollout_mutants import MUTANTS
from tests.cluster.rollout_world import FAULTS, Setup, run
from tests.simulation.mutants import Mutant
from tests.simulation.searching import on_all_cores, printed_under_hash_seeds, violation_of
from tests.simulation.world import Violation
from tournant.cluster.weights_follower import Follower
from tournant.cluster.weights_rollout import (
    Action,
    Order,
    Phase,
    Rollout,
    RolloutConfig,
    UpdateNameTaken,
    UpdateRunning,
    UpdateUnavailable,
    Weights,
)

S = 1_000_000
CONFIG = RolloutConfig(turn_us=100 * S, silent_us=30 * S)
SCHEDULES, SOAK_SCHEDULES, MUTANT_SEEDS = 60, 5_000, 60
MIN_COUNT = {"done": 10, "failed": 20, "died": 10, "refused": 20, "overdue": 5}


# schedules that found a bug once
EARLIER = (
    # a turn that was given before the update was undone was begun after that, while the status said "failed"
    Setup(20271, frozenset({"late message", "slow change", "replica leaves"}), replicas=2, updates=2),
)  # fmt: skip


class Service:
    """A core and its replicas, without a network."""

    def __init__(self, *names: str) -> None:
        self.now_us = 0
        self.core = Rollout("old", CONFIG, 0, settling=False)
        self.followers: dict[str, Follower] = {}
        for name in names:
            self.join(name)

    def join(self, name: str) -> Weights:
        follower = self.followers[name] = Follower(name)
        assert self.tell(name).action is Action.START
        weights = follower.weights
        assert weights is not None
        follower.started(f"id of {weights.model}")
        self.tell(name)
        return weights

    def tell(self, name: str, after_s: float = 0.1) -> Order:
        """Report, and take the answer."""
        self.now_us += int(after_s * S)
        follower = self.followers[name]
        report = follower.report()
        order = self.core.hear(self.now_us, report)
        follower.take(report.number, order)
        self.core.validate()
        return order

    def update(self, model: str, tag: str = "t") -> int:
        return self.core.update(self.now_us, model, tag)

    def change(self, name: str) -> None:
        """The replica's turn, from its begin to its end."""
        self.tell(name)
        self.tell(name)
        follower = self.followers[name]
        assert follower.target is not None
        follower.changed(f"id of {follower.target.model}")
        self.tell(name)

    @property
    def state(self) -> str:
        return self.core.status(self.now_us).state

    @property
    def models(self) -> list[str | None]:
        return [one.weights and one.weights.model for one in self.followers.values()]

    @property
    def epochs(self) -> list[int]:
        return [one.weights.epoch for one in self.followers.values() if one.weights]


def test_a_name_is_one_update_s() -> None:
    service = Service("a")
    assert service.update("new", "t") == service.update("new", "t") == 1
    with pytest.raises(UpdateNameTaken, match="the update named 't' is to 'new', not to 'other'; give this one a name"):
        service.update("other", "t")
    service.change("a")
    with pytest.raises(UpdateNameTaken):
        service.update("other", "t")
    assert (service.state, service.models, service.update("other", "u")) == ("done", ["new"], 2)


def test_replicas_change_one_after_the_other_and_the_last_one_makes_it_done() -> None:
    service = Service("a", "b")
    assert (service.state, service.epochs) == ("done", [0, 0])
    assert service.update("new") == 1
    assert service.state == "running"
    assert service.tell("b").action is Action.STAY
    service.tell("a")
    assert (service.followers["a"].phase, service.tell("b").action) == (Phase.CHANGING, Action.STAY)
    service.tell("a")
    service.followers["a"].changed("id of new")
    service.tell("a")
    assert (service.state, service.models) == ("running", ["new", "old"])
    service.change("b")
    assert (service.state, service.models, service.epochs) == ("done", ["new", "new"], [1, 1])
    assert service.core.status(service.now_us).target == Weights(1, "new", "t", "id of new")


def test_one_update_at_a_time_and_the_same_wish_is_the_same_update() -> None:
    service = Service("a")
    assert service.update("new", "first") == service.update("new", "first") == 1
    with pytest.raises(
        UpdateRunning, match=r"^the weights update with epoch 1 is not over; wait for it \(GET"
    ) as caught:
        service.update("newer", "second")
    assert caught.value.epoch == 1
    service.change("a")
    assert service.update("new", "first") == 1  # its answer was late
    assert service.update("newer", "second") == 2


def test_a_failure_is_undone_under_a_new_epoch_and_those_who_stayed_only_change_its_name() -> None:
    service = Service("a", "b", "c")
    service.update("new")
    service.change("a")
    service.tell("b")
    service.followers["b"].failed("config.json is no JSON")
    service.tell("b")
    status = service.core.status(service.now_us)
    assert (status.state, status.failed, status.failure) == ("undoing", 1, "replica b: config.json is no JSON")
    with pytest.raises(UpdateRunning, match="epoch 1 failed and is being undone"):
        service.update("newer", "another")
    assert service.tell("c").action is Action.STAY
    service.change("a")
    assert (service.state, service.models) == ("failed", ["old", "old", "old"])
    for name in "abc":
        assert service.tell(name).action is Action.STAY
    assert service.epochs == [2, 2, 2]
    assert service.update("new") == 1  # the same wish: it failed
    assert service.update("newer", "another") == 3


def test_who_joins_gets_weights_that_have_been_loaded() -> None:
    service = Service("a", "b")
    service.update("new")
    service.tell("a")
    assert service.join("c").model == "old"  # nobody has shown yet that the new ones can be loaded
    service.tell("a")
    service.followers["a"].changed("id of new")
    service.tell("a")
    assert service.join("d").model == "new"
    service.change("b")
    assert service.state == "running"
    service.change("c")
    assert (service.state, set(service.models)) == ("done", {"new"})


def test_one_who_vanishes_in_its_turn_may_be_chance_and_a_second_is_not() -> None:
    service = Service("a", "b", "c")
    service.update("new")
    for name in ("a", "b"):
        service.tell(name)
        service.tell(name)
        assert service.followers.pop(name).phase is Phase.CHANGING
        for other in [*service.followers] * 4:
            service.tell(other, after_s=9)
    assert service.state == "failed"
    assert "2 replicas vanished while they changed, b the last" in service.core.status(service.now_us).failure
    assert service.models == ["old"]


def test_a_turn_that_takes_too_long_ends_the_replica_and_the_update() -> None:
    service = Service("a", "b")
    service.update("new")
    for _ in range(13):
        service.tell("b", after_s=5)
        service.tell("a", after_s=5)
    assert service.followers["a"].phase is Phase.LEAVING
    assert service.followers["a"].reason == "replica a took longer than 100 s to change its weights"
    assert (service.state, service.models[1]) == ("failed", "old")


def test_a_core_that_begins_anew_takes_the_newest_plan_it_hears_of() -> None:
    service = Service("a", "b")
    service.update("new")
    service.change("a")
    service.tell("b")
    service.core = Rollout("old", CONFIG, service.now_us, settling=True)
    assert service.state == "learning"
    with pytest.raises(UpdateUnavailable, match=r"try again in 30 s$"):
        service.update("newest", "t2")
    service.tell("a")
    assert service.core.plan.target.epoch == 1
    assert service.core.hear(service.now_us, Follower("c").report()).action is Action.WAIT
    service.tell("a")
    for name in "abab":
        service.tell(name, after_s=10)
    service.tell("b")
    service.followers["b"].changed("id of new")
    service.tell("b")
    assert (service.state, service.models) == ("done", ["new", "new"])


def test_a_replica_that_reads_other_bytes_is_not_let_in_beside_the_others() -> None:
    service = Service("a")
    follower = service.followers["b"] = Follower("b")
    service.tell("b")
    follower.started("another id")
    assert service.tell("b").action is Action.LEAVE
    assert "found the weights another id in 'old'; the others run id of old" in follower.reason
    assert not follower.accepted
    del service.followers["a"], service.followers["b"]
    service.now_us += CONFIG.silent_us
    follower = service.followers["c"] = Follower("c")
    service.tell("c")
    follower.started("another id")  # nobody has the first ones any more
    service.tell("c")
    assert (service.state, service.epochs, follower.accepted) == ("done", [1], True)


def test_a_failure_is_reported_until_it_is_known() -> None:
    service = Service("a")
    service.update("new")
    service.tell("a")
    follower = service.followers["a"]
    follower.failed("no room")
    assert follower.report().failed == follower.report().failed == 1  # both get lost
    service.tell("a")
    assert service.state == "failed"
    assert follower.report().failed == 0


def test_an_update_without_replicas_is_refused() -> None:
    with pytest.raises(UpdateUnavailable, match="no replica is there"):
        Service().update("new")
    with pytest.raises(ValueError, match="must name the update"):
        Service("a").update("new", "")


# ------------------------------------------------------------ schedules with faults


def _schedule(seed: int) -> tuple[Violation | None, Counter[str]]:
    try:
        return None, run(Setup.draw(seed)).counts
    except Violation as violation:
        return violation, Counter()


def _schedules(first: int, count: int) -> Counter[str]:
    total: Counter[str] = Counter()
    broken = []
    for violation, counts in on_all_cores(_schedule, range(first, first + count), chunksize=10):
        total += counts
        if violation is not None:
            broken.append(str(violation))
    if broken:
        pytest.fail("\n".join(broken[:5]), pytrace=False)
    return total


def test_no_schedule_breaks_an_invariant_and_the_schedules_are_not_vacuous() -> None:
    counts = _schedules(0, SCHEDULES)
    rare = {name: counts[name] for name in {*FAULTS, *MIN_COUNT} if counts[name] < MIN_COUNT.get(name, 10)}
    assert not rare


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant) -> None:
    for setup in (*EARLIER, *map(Setup.draw, range(MUTANT_SEEDS))):
        with mutant.applied():
            violation = violation_of(run, replace(setup, faults=setup.faults.union(mutant.faults)))
        if violation is not None:
            assert violation.invariant in mutant.killed_by, str(violation)
            return
    pytest.fail(f"{mutant.name}: no schedule of {MUTANT_SEEDS} found it")


@pytest.mark.parametrize("setup", EARLIER, ids=lambda setup: f"seed{setup.seed}")
def test_earlier_find(setup: Setup) -> None:
    run(setup)


TRACE = """
from tests.cluster.rollout_world import Setup, run
print([run(Setup.draw(seed)).trace for seed in range(3)])
"""


def test_the_same_seed_is_the_same_schedule() -> None:
    traces = printed_under_hash_seeds(TRACE, ("0", "1"))
    assert len(traces) == 1
    assert len(set(traces.pop().split(","))) == 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_more_schedules() -> None:
    _schedules(1_000_000, SOAK_SCHEDULES)


# ------------------------------------------------------------ every order of steps, small


class RolloutMachine(RuleBasedStateMachine):
    """Steps of up to four replicas in any order, without a network: what fails is made small."""

    def __init__(self) -> None:
        super().__init__()
        self.service = Service()
        self.num_updates = self.num_joined = 0
        self.epoch = 0
        self.live: list[str] = []

    @precondition(lambda self: len(self.live) < 4)
    @rule()
    def join(self) -> None:
        self.num_joined += 1
        name = f"r{self.num_joined}"
        self.live.append(name)
        self.service.join(name)

    @precondition(lambda self: self.live)
    @rule()
    def update(self) -> None:
        self.num_updates += 1
        try:
            self.service.update(f"m{self.num_updates}", f"t{self.num_updates}")
        except UpdateRunning:
            assert self.service.state in ("running", "undoing")

    def _some(self, place: int) -> str | None:
        return self.live[place % len(self.live)] if self.live else None

    @rule(place=st.integers(0, 3), after_s=st.sampled_from((0.1, 5.0, 40.0)))
    def tell(self, place: int, after_s: float) -> None:
        if (name := self._some(place)) is not None:
            self.service.tell(name, after_s)
            if self.service.followers[name].phase is Phase.LEAVING:
                self._drop(name)

    @rule(place=st.integers(0, 3), good=st.booleans())
    def end_change(self, place: int, good: bool) -> None:
        follower = self.service.followers.get(self._some(place) or "")
        if follower is not None and follower.target is not None:
            if good:
                follower.changed(f"id of {follower.target.model}")
            else:
                follower.failed("no")

    @rule(place=st.integers(0, 3))
    def vanish(self, place: int) -> None:
        if (name := self._some(place)) is not None:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self.live.remove(name)
        del self.service.followers[name]

    @invariant()
    def what_is_said_holds(self) -> None:
        status = self.service.core.status(self.service.now_us)
        self.service.core.validate()
        assert status.target.epoch >= self.epoch
        self.epoch = status.target.epoch
        known = {name for name, *_ in status.replicas}
        followers = [one for name, one in self.service.followers.items() if name in known]
        if status.state in ("done", "failed"):
            assert {one.weights.tag for one in followers if one.weights} <= {status.target.tag}
            assert all(one.target is None for one in followers)

    def teardown(self) -> None:
        """Left alone, they all end on one set of weights."""
        for _ in range(16):
            for name in list(self.live):
                place = self.live.index(name)
                self.tell(place, 3.0)
                if name in self.live:
                    self.end_change(place, True)
        names = {(one.weights.epoch, one.weights.tag) for one in self.service.followers.values() if one.weights}
        assert len(names) <= 1
        assert self.service.state in ("done", "failed") or not self.live


RolloutMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRolloutMachine = RolloutMachine.TestCase
