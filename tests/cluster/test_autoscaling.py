"""Autoscaling in virtual time: loads of many shapes on Serve's own state machine around the policy, wrong policies that
these tests must tell from the right one, and what holds of the policy whatever it is told.
"""

from __future__ import annotations

import copy
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.config import AutoscalingPolicy

from tests.cluster.autoscaling_world import POLICY, START_S, Load, World
from tournant.cluster.autoscaling import (
    LoadMeter,
    Need,
    Policy,
    PolicyConfig,
    ReplicaLoad,
    ServingPolicy,
    Snapshot,
)
from tournant.workers.errors import ConfigError
from tournant.workers.messages import EngineStats

ONE = 2560.0  # prompt tokens a second that keep one replica of the world at its target
DELAY_S = 120.0
EXACT = {"tokens_per_s": 4000.0}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Serve's log tells every scaling."""
    log = logging.getLogger("ray.serve")
    before, log.level = log.level, logging.ERROR
    yield
    log.level = before


# -------------------------------------------------------------------- loads

Scenario = Callable[[type[ServingPolicy] | None, dict[str, Any]], list[str]]


def faults(**found: bool) -> list[str]:
    return [name for name, is_one in found.items() if is_one]


def steady(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """A load that one replica carries, and then one for three."""
    world = World(lambda at: 0.6 * ONE if at < 900 else 2.7 * ONE, policy=policy, kwargs=EXACT | kwargs)
    world.run(900)
    first = world.targets()
    world.run(700)
    settled = world.targets(since=1400)
    return faults(
        not_what_is_needed=first != [1] or settled not in ([3], [4]),
        overloaded=world.longest_queue_s(1400) > 3,
        turned=world.turns() > 2,  # it may be too many before the queue of the change is gone
    )


def sawtooth(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """Teeth shorter than the delay, on what was a high load before: stay at the top of the teeth."""

    def load(at: float) -> float:
        return 6 * ONE if at < 400 else ONE * (0.2 + 4 * (at % 100) / 100)

    world = World(load, policy=policy, kwargs=EXACT | kwargs, look_back_period_s=15)
    world.run(2400)
    return faults(turned=world.turns(since=400) > 0, overloaded=world.longest_queue_s(400) > 6)


def slow_sawtooth(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """Teeth longer than the delay: up once and down once for each, and down in time."""
    period = 900
    world = World(lambda at: ONE * (0.3 + 4 * (at % period) / period), policy=policy, kwargs=EXACT | kwargs)
    world.run(3 * period)
    late = [one for one in world.history if 2 * DELAY_S < one.at % period < 2 * DELAY_S + 5 and one.at > period]
    return faults(
        turned=world.turns() > 5, overloaded=world.longest_queue_s(period) > 6, late=any(m.target > 2 for m in late)
    )


def burst(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """Ten times the load for 30 s."""
    base = 0.4 * ONE
    world = World(lambda at: 10 * base if 300 <= at < 330 else base, policy=policy, kwargs=EXACT | kwargs)
    world.run(1000)
    over = next(one.at for one in world.history if one.at > 330 and one.queued_s < 1)
    serving = 300 + 20 + START_S  # 20 s: a report, and the delay
    back = next((one.at for one in world.history if one.at > 340 and one.target == 1), math.inf)
    return faults(
        turned=world.turns() > 1,
        waits=max(one.shortest_s for one in world.history if one.at > serving + 4) > 1,
        late=back > over + 2 * DELAY_S,
        never_up=max(world.targets()) < 2,
    )


def tenfold(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """Ten times the load, for good: what is refused for lack of room ends."""
    world = World(lambda at: ONE * (0.6 if at < 300 else 6), policy=policy, kwargs=EXACT | kwargs, room=40, prompt=800)
    world.run(1300)
    settled = next(one for one in world.history if one.at >= 300 + 8 * START_S)
    return faults(
        refused=world.num_refused > settled.refused,
        overloaded=world.longest_queue_s(300 + 10 * START_S) > 4,
        turned=world.turns() > 1,
        not_what_is_needed=world.targets(since=1100) not in ([6], [7], [8]),
    )


def diurnal(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """A day and a morning of an hour, with waves on them."""

    def load(at: float) -> float:
        return ONE * (0.4 + 2.5 * (1 - math.cos(2 * math.pi * at / 3600)) + 0.3 * math.sin(at / 17))

    world = World(load, policy=policy, kwargs=EXACT | kwargs)
    world.run(4800)
    night = [one.target for one in world.history if 3500 < one.at < 3700]
    return faults(
        turned=world.turns() > 3, overloaded=world.longest_queue_s(0) > 4, high=max(world.targets()) > 8,
        awake=min(night) > 2,
    )  # fmt: skip


def at_an_edge(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """A load that goes back and forth over what two replicas carry, slowly."""
    load: Load = lambda at: 2 * ONE * (1 + 0.05 * math.sin(2 * math.pi * at / 700))  # noqa: E731
    world = World(load, policy=policy, kwargs=EXACT | kwargs, min_replicas=2)
    world.run(2100)
    return faults(turned=world.turns() > 0)


def silent(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """A replica that says nothing of its load, and later all of them."""
    world = World(lambda at: 2.7 * ONE, policy=policy, kwargs=EXACT | kwargs)
    world.run(900)
    before = world.target
    world.serving[0].silent = True
    world.run(400)
    after = world.target
    for one in world.serving:
        one.silent = True
    world.run(400)
    return faults(fell=min(world.targets(since=900)) < before, one=after < before)


def cut_off(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """The last that was heard of the replicas is that they have little to do."""
    world = World(lambda at: ONE * (3.5 if at < 600 else 0.2), policy=policy, kwargs=EXACT | kwargs)
    world.run(640)
    before = world.target
    for one in world.serving:
        one.mute = True
    world.run(400)
    fell = world.target < before
    for one in world.serving:
        one.mute = False
    world.run(2 * DELAY_S)
    return faults(fell=fell, stuck=world.target != 1)


def few_long_prompts(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """One request in ten seconds, and each takes longer."""
    world = World(lambda at: 6000, policy=policy, kwargs=EXACT | kwargs, prompt=60_000, output=20)
    world.run(1500)
    return faults(overloaded=world.longest_queue_s(900) > 45, few=world.target < 2)


def many_short_prompts(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """Thirty requests run at once and are nothing to a replica."""
    world = World(lambda at: 60, policy=policy, kwargs=EXACT | kwargs, prompt=20, output=100, pace=10)
    world.run(600)
    return faults(many=world.targets() != [1])


def long_contexts(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """KV of long prompts that are answered slowly; little to compute."""
    world = World(
        lambda at: 1600 * min(1.0, at / 1500), policy=policy, kwargs=EXACT | kwargs, prompt=8000, output=100, pace=1.0
    )
    world.run(2400)
    return faults(waited=world.longest_queue_s(0) > 5.5, few=world.target < 2)


def rising(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """A slow rise is followed before anything waits."""
    world = World(lambda at: ONE * (0.3 + 3 * min(1.0, at / 1500)), policy=policy, kwargs=EXACT | kwargs)
    world.run(2000)
    targets = world.targets()
    return faults(waited=world.longest_queue_s(0) > 1.5, few=targets[-1] < 4, many=max(targets) > 5)


def idle_model(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """Nothing runs until somebody asks, and not much longer after the last one."""
    world = World(
        lambda at: 0.5 * ONE if 200 <= at < 260 else 0.0, policy=policy, kwargs=EXACT | kwargs, min_replicas=0,
        downscale_to_zero_delay_s=60,
    )  # fmt: skip
    world.run(199)
    before = world.targets()
    world.run(61)
    asked = len(world.ended) + world.history[-1].open
    woken = next((one.at for one in world.history if one.target > 0), math.inf)
    world.run(400)
    over = next(one.at for one in world.history if one.at > 260 and not one.open)
    slept = next((one.at for one in world.history if one.at > over and one.target == 0), math.inf)
    return faults(
        awake=before != [0], slow=woken > 203, late=slept > over + 2 * DELAY_S, lost=len(world.ended) < asked,
        turned=world.turns() > 1,
    )  # fmt: skip


def one_stream(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
    """A single long answer keeps its replica."""
    world = World(
        lambda at: 300.0 if at < 1.5 else 0.0, policy=policy, kwargs=EXACT | kwargs, min_replicas=0, prompt=200,
        output=1000, pace=1.0,
    )  # fmt: skip
    world.run(900)
    return faults(stopped=world.target != 1)


def unknown_speed(guess: float) -> Scenario:
    """What a replica can do is found out, whatever was guessed."""

    def scenario(policy: type[ServingPolicy] | None, kwargs: dict[str, Any]) -> list[str]:
        world = World(lambda at: 2.7 * ONE, policy=policy, kwargs={**kwargs, "tokens_per_s": guess})
        world.run(2400)
        return faults(
            overloaded=world.longest_queue_s(1800) > 3, many=max(world.targets(since=2000)) > 4,
            turned=world.turns(since=600) > 1,
        )  # fmt: skip

    return scenario


SCENARIOS: dict[str, Scenario] = {
    one.__name__: one
    for one in (
        steady, sawtooth, slow_sawtooth, burst, tenfold, diurnal, at_an_edge, silent, cut_off, few_long_prompts,
        many_short_prompts, long_contexts, rising, idle_model, one_stream,
    )
} | {"guessed_low": unknown_speed(200.0), "guessed_high": unknown_speed(50_000.0)}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_loads_are_followed_without_flapping(name: str) -> None:
    assert SCENARIOS[name](None, {}) == []


# -------------------------------------------------------------------- wrong policies


class NoPeak(Policy):
    def _peak(self, now_s: float, enough: int, hold_s: float) -> int:
        return enough


class LastOfDelay(Policy):
    """Waits for all of the past delay, on top of Serve's own."""

    def decide(self, seen: Snapshot) -> int:
        wanted = super().decide(seen)
        return seen.target if wanted < seen.target <= self._peaks[0][1] else wanted

    def _peak(self, now_s: float, enough: int, hold_s: float) -> int:
        return super()._peak(now_s, enough, 4 * hold_s)


class UnknownIsIdle(Policy):
    def decide(self, seen: Snapshot) -> int:
        return super().decide(replace(seen, unknown=0))


class OnTop(Policy):
    """Asks for what is needed in addition to what there is."""

    def decide(self, seen: Snapshot) -> int:
        wanted = super().decide(seen)
        return seen.target + wanted if wanted > seen.target else wanted


class PerReplica(Policy):
    """Takes the mean replica for the sum of them."""

    def need(self, loads: Any) -> Need:
        found = super().need(loads)
        return Need(found.queue / len(loads), found.kv / len(loads), found.rate / len(loads)) if loads else found


class Requests(Policy):
    def need(self, loads: Any) -> Need:
        return Need(sum(load.open for load in loads) / 8, 0.0, 0.0)


class NoQueue(Policy):
    def need(self, loads: Any) -> Need:
        return replace(super().need(loads), queue=0.0)


class NoKV(Policy):
    def need(self, loads: Any) -> Need:
        return replace(super().need(loads), kv=0.0)


class NoRate(Policy):
    def need(self, loads: Any) -> Need:
        return replace(super().need(loads), rate=0.0)


class NeverLearns(Policy):
    def _learn(self, loads: Any, passed_s: float) -> None:
        pass


class LearnsFromIdle(Policy):
    def _learn(self, loads: Any, passed_s: float) -> None:
        super()._learn([replace(load, full=1.0) for load in loads], passed_s)


class SleepsUnasked(Policy):
    """Goes to nothing as soon as nothing waits."""

    def decide(self, seen: Snapshot) -> int:
        wanted = super().decide(seen)
        return 0 if wanted == 1 and not any(load.queued_tokens for load in seen.loads) else wanted


@dataclass(frozen=True)
class Mutant:
    """A wrong policy, and a load under which it shows."""

    scenario: str
    core: type[Policy] = Policy
    kwargs: tuple[tuple[str, float], ...] = ()

    @property
    def policy(self) -> type[ServingPolicy]:
        core = self.core

        class Wrong(ServingPolicy):
            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                self._policy = core(self._policy.config)

        return Wrong


MUTANTS = {
    "no slack": Mutant("at_an_edge", kwargs=(("slack", 0.0),)),
    "nothing goes stale": Mutant("cut_off", kwargs=(("stale_s", 1e9),)),
    "the last moment decides": Mutant("sawtooth", NoPeak),
    "the delay counts many times": Mutant("burst", LastOfDelay),
    "unknown is idle": Mutant("silent", UnknownIsIdle),
    "on top of what there is": Mutant("rising", OnTop),
    "the mean for the sum": Mutant("steady", PerReplica),
    "requests are counted, long": Mutant("few_long_prompts", Requests),
    "requests are counted, short": Mutant("many_short_prompts", Requests),
    "no queue": Mutant("tenfold", NoQueue),
    "no KV": Mutant("long_contexts", NoKV),
    "no rate": Mutant("rising", NoRate),
    "never learns, low": Mutant("guessed_low", NeverLearns),
    "never learns, high": Mutant("guessed_high", NeverLearns),
    "learns from idle replicas": Mutant("steady", LearnsFromIdle),
    "sleeps beside a running answer": Mutant("one_stream", SleepsUnasked),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_policy_shows(name: str) -> None:
    mutant = MUTANTS[name]
    assert SCENARIOS[mutant.scenario](mutant.policy, dict(mutant.kwargs)) != []


# -------------------------------------------------------------------- whatever it is told

shares = st.floats(0, 1)
LOADS = st.builds(
    ReplicaLoad,
    queued_tokens=st.floats(0, 1e6),
    kv_pressure=shares,
    prefill_tokens_per_s=st.floats(0, 1e5),
    decode_tokens_per_s=st.floats(0, 1e4),
    full=st.sampled_from([0.0, 0.5, 1.0]),
    open=st.sampled_from([0.0, 0.25, 3.0]),
)
SNAPSHOTS = st.builds(
    Snapshot,
    now_s=st.floats(0, 1000),
    target=st.integers(0, 9),
    loads=st.lists(LOADS, max_size=5).map(tuple),
    unknown=st.integers(0, 2),
    requests=st.sampled_from([0.0, 0.0, 2.0]),
    hold_s=st.sampled_from([0.0, 1.0, 50.0, 400.0]),
)


@given(st.lists(SNAPSHOTS, min_size=1, max_size=6))
def test_what_holds_of_every_decision(told: list[Snapshot]) -> None:
    policy = Policy(PolicyConfig())
    for seen in told:
        before = copy.deepcopy(policy)
        wanted = policy.decide(seen)
        assert wanted >= 0
        if seen.unknown:
            assert wanted >= seen.target, "of some replica nothing is known"
        if seen.requests or any(load.open for load in seen.loads):
            assert wanted >= 1
        if seen.loads:
            assert wanted >= sum(load.kv_pressure for load in seen.loads) - 1e-6, "what runs must fit"
            more = tuple(
                replace(load, queued_tokens=2 * load.queued_tokens + 1, kv_pressure=1.0) for load in seen.loads
            )
            assert before.decide(replace(seen, loads=more)) >= wanted, "never fewer for more"
        assert len(policy._peaks) <= len({one for _, one in policy._peaks}), "an entry for each number at most"
        assert [one for _, one in policy._peaks] == sorted({one for _, one in policy._peaks}, reverse=True)


def idle(**changes: float) -> ReplicaLoad:
    return ReplicaLoad(**dict.fromkeys((item.name for item in fields(ReplicaLoad)), 0.0) | changes)


def snapshot(*loads: ReplicaLoad, **changes: Any) -> Snapshot:
    return Snapshot(
        **{"now_s": 0.0, "target": len(loads), "unknown": 0, "requests": 0.0, "hold_s": 60.0} | changes, loads=loads
    )


def test_the_formula() -> None:
    policy = Policy(PolicyConfig(target_queue_s=2, target_kv_util=0.5, target_rate_util=0.8, tokens_per_s=1000))
    loads = [
        idle(queued_tokens=3000, kv_pressure=0.25, prefill_tokens_per_s=400, decode_tokens_per_s=50),
        idle(queued_tokens=1000, kv_pressure=0.5, prefill_tokens_per_s=200),
    ]
    assert policy.need(loads) == Need(queue=2.0, kv=1.5, rate=1.0)
    assert policy.decide(snapshot(*loads)) == 2
    assert policy.decide(snapshot(*loads, target=1)) == 2, "the most that any asks for"
    assert policy.decide(snapshot(*loads, idle(kv_pressure=0.1))) == 3, "2 would leave no slack"
    assert policy.decide(snapshot(idle(), idle(), now_s=100.0)) == 0
    assert policy.decide(snapshot(idle(), idle(open=0.5), now_s=200.0)) == 1


def test_without_replicas_a_request_is_what_wakes() -> None:
    policy = Policy(PolicyConfig())
    assert policy.decide(snapshot()) == 0
    assert policy.decide(snapshot(requests=0.1)) == 1
    assert policy.decide(snapshot(target=3)) == 3, "they are on their way"
    assert policy.decide(snapshot(target=3, unknown=1)) == 3


def test_a_clock_that_is_set_back_does_no_harm() -> None:
    policy = Policy(PolicyConfig())
    assert policy.decide(snapshot(*[idle(queued_tokens=3000)] * 4, now_s=1e9)) == 4
    assert policy.decide(snapshot(*[idle()] * 4, now_s=5.0)) == 3, "the peak is not forgotten"
    assert policy.decide(snapshot(*[idle()] * 4, now_s=1e9 + 61)) == 0


def test_options_are_checked() -> None:
    assert PolicyConfig.parse({"target_queue_s": 5, "slack": 0}) == PolicyConfig(target_queue_s=5, slack=0)
    for given_, message in (
        ({"target_kv": 1}, "has no 'target_kv'; there are target_queue_s, target_kv_util"),
        ({"target_queue_s": "much"}, "target_queue_s is 'much'; it must be a number"),
        ({"target_kv_util": 1.5}, "target_kv_util is 1.5; it must be more than 0 and at most 1"),
        ({"slack": -1}, "slack is -1; it must be at least 0 and at most 0.9"),
        ({"stale_s": math.nan}, "stale_s is nan"),
        ({"tokens_per_s": math.inf}, "tokens_per_s is inf"),
    ):
        with pytest.raises(ConfigError, match=message):
            PolicyConfig.parse(given_)


# -------------------------------------------------------------------- the replica's side, and Serve's


def test_a_replica_says_what_it_did_since_it_was_asked() -> None:
    meter = LoadMeter()
    first = EngineStats(num_steps=10, prompt_tokens=100, generation_tokens=50, num_waiting=1, kv_total=10)
    assert meter.measure(first, 5.0) == {}
    second = replace(
        first, num_steps=20, prompt_tokens=300, generation_tokens=90, num_running=2, num_waiting=3, num_restoring=1,
        queued_tokens=777, kv_used=4,
    )  # fmt: skip
    told = meter.measure(second, 7.0)
    known = ReplicaLoad(**{item.name: told[item.name] for item in fields(ReplicaLoad)})
    assert known == ReplicaLoad(777.0, 0.4, 100.0, 20.0, full=1.0, open=6.0)
    assert (told["running"], told["waiting"], told["preemptions_per_s"]) == (2.0, 3.0, 0.0)
    assert meter.measure(second, 7.0) == {}, "no time has passed"
    third = meter.measure(replace(second, num_preemptions=4, num_waiting=0), 9.0)
    assert (third["kv_pressure"], third["preemptions_per_s"], third["full"]) == (1.0, 2.0, 0.0)
    assert third["prefill_tokens_per_s"] == 0.0
    assert meter.measure(EngineStats(num_steps=1), 10.0) == {}, "another engine"
    assert all(isinstance(value, float) for value in meter.measure(EngineStats(num_steps=2), 11.0).values())


def test_serve_can_load_the_policy_where_torch_is_not(tmp_path: Path) -> None:
    """It is pickled by value into the controller."""
    made = AutoscalingPolicy(policy_function=POLICY, policy_kwargs=asdict(PolicyConfig()))
    file = tmp_path / "policy"
    file.write_bytes(made.get_serialized_policy_def() or b"")
    code = (
        "import sys; from ray import cloudpickle\n"
        "found = cloudpickle.loads(open(sys.argv[1], 'rb').read())\n"
        "assert 'tournant.cluster.autoscaling' not in sys.modules, 'by value'\n"
        "found(target_queue_s=3.0)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=120)
