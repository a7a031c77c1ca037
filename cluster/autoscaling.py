"""How many replicas a deployment is to have: what a replica says of its load, a pure policy on it, and Serve's way in.

Owns the formula, its hysteresis and its memory. Serve owns when it is asked, the means over `look_back_period_s`, the
delays, the bounds, and which replica goes. Serve pickles `ServingPolicy` by value into its controller.

Invariants:
 1. The core knows neither Ray nor a clock: load and time are arguments.
 2. A replica of which nothing, or nothing new, is known never makes the number fall.
 3. 0 is wanted only when nothing runs, waits, or is on its way in; and never fewer than hold the KV of what runs.
 4. Before Serve stops replicas, all load of the last `downscale_delay_s` would have fitted into those that stay.
 5. Bounded memory: an entry for each running replica, and one at most for each number of replicas.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from tournant.workers.errors import ConfigError
from tournant.workers.messages import EngineStats

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

LEARN_S = 300.0  # of a full replica, after which its rate counts for two thirds of what is believed
FULL = 0.99  # share of the time in which requests must wait for a replica's rate to be all that it can do
EPSILON = 1e-9
logger = logging.getLogger("ray.serve")  # what Serve's controller, where the policy runs, writes to its log


# -------------------------------------------------------------------- in the replica


class LoadMeter:
    """What a replica says of its load, from the counters of its engine between two calls."""

    def __init__(self) -> None:
        self._seen: EngineStats | None = None
        self._seen_at = 0.0

    def measure(self, stats: EngineStats, now_s: float) -> dict[str, float]:
        """The fields of `ReplicaLoad`, and for whoever reads them preemptions_per_s, running and waiting sequences.
        Nothing before the second call, and for one after another engine has begun. now_s: of a monotonic clock.
        """
        seen, passed = self._seen, now_s - self._seen_at
        if seen is not None and passed <= 0:
            return {}
        self._seen, self._seen_at = stats, now_s
        if seen is None:
            return {}
        steps, preempted, prefilled, decoded = (
            getattr(stats, name) - getattr(seen, name)
            for name in ("num_steps", "num_preemptions", "prompt_tokens", "generation_tokens")
        )
        if min(steps, preempted, prefilled, decoded) < 0:
            return {}
        pressure = stats.kv_used / stats.kv_total if stats.kv_total else 0.0
        return {
            "queued_tokens": float(stats.queued_tokens),
            "kv_pressure": 1.0 if preempted else pressure,
            "prefill_tokens_per_s": prefilled / passed,
            "decode_tokens_per_s": decoded / passed,
            "full": float(stats.num_waiting > 0 and seen.num_waiting > 0),
            "open": float(stats.num_running + stats.num_waiting + stats.num_restoring),
            "preemptions_per_s": preempted / passed,
            "running": float(stats.num_running),
            "waiting": float(stats.num_waiting),
        }


# -------------------------------------------------------------------- the policy


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Of one replica, each a mean over Serve's look-back.

    queued_tokens: tokens that no step computes yet; kv_pressure: share of the device's blocks that sequences hold, 1
    while it preempted; full: share of the time in which sequences waited; open: sequences that wait, run or restore.
    """

    queued_tokens: float
    kv_pressure: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    full: float
    open: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known when the policy is asked.

    target: replicas that are to be there now; loads: of running replicas; unknown: running ones of which nothing is
    known; requests: that are open anywhere, in proxies and handles too; hold_s: over how much of the past a smaller
    number must have been enough.
    """

    now_s: float
    target: int
    loads: tuple[ReplicaLoad, ...]
    unknown: int
    requests: float
    hold_s: float


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """`policy_kwargs` of a Serve file, all optional.

    target_queue_s: seconds of work that may wait at a replica; target_kv_util: share of its KV blocks that sequences
    may hold; target_rate_util: share of the rate at which it is full that it may work at; tokens_per_s: that rate, in
    prompt tokens a second, until one has been measured; decode_cost: prompt tokens that take as long as one generated
    token of a batch; slack: share of all targets that must stay free when replicas are stopped; stale_s: seconds
    without a report after which nothing is known of a replica.
    """

    target_queue_s: float = 2.0
    target_kv_util: float = 0.8
    target_rate_util: float = 0.8
    tokens_per_s: float = 2000.0
    decode_cost: float = 4.0
    slack: float = 0.2
    stale_s: float = 30.0

    def __post_init__(self) -> None:
        most = dict.fromkeys(("target_kv_util", "target_rate_util"), 1.0) | {"slack": 0.9}
        for item in fields(self):
            value, limit = getattr(self, item.name), most.get(item.name, math.inf)
            least = 0.0 if item.name in ("slack", "decode_cost") else EPSILON
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"policy_kwargs.{item.name} is {value!r}; it must be a number")
            if not least <= value <= limit or math.isinf(value):
                above = "at least 0" if not least else "more than 0"
                bound = "" if math.isinf(limit) else f" and at most {limit:g}"
                raise ConfigError(f"policy_kwargs.{item.name} is {value}; it must be {above}{bound}")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> PolicyConfig:
        """Raises ConfigError."""
        known = [item.name for item in fields(cls)]
        if unknown := sorted(given.keys() - set(known)):
            raise ConfigError(f"policy_kwargs has no {unknown[0]!r}; there are {', '.join(known)}")
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas that each measure asks for, in fractions."""

    queue: float
    kv: float
    rate: float

    @property
    def most(self) -> float:
        """What is asked for."""
        return max(self.queue, self.kv, self.rate)


class Policy:
    """See the module. One per deployment."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.tokens_per_s = config.tokens_per_s
        self._measured = False
        self._now_s = -math.inf
        self._peaks: deque[tuple[float, int]] = deque()  # (when, replicas that were enough then), fewer and later

    def decide(self, seen: Snapshot) -> int:
        """Replicas that are wanted; the bounds are Serve's."""
        now_s = max(seen.now_s, self._now_s)  # a wall clock may be set back
        self._learn(seen.loads, 0.0 if math.isinf(self._now_s) else now_s - self._now_s)
        self._now_s = now_s
        if not seen.loads and not seen.unknown:  # the first replica is on its way, or nobody asked for one
            return max(seen.target, int(seen.requests > 0))
        need = self.need(seen.loads).most
        least = int(seen.requests > 0 or any(load.open > 0 for load in seen.loads))
        enough = max(least, _ceil(need / (1 - self.config.slack)))
        peak = self._peak(now_s, enough, seen.hold_s)
        if (wanted := max(least, _ceil(need))) > seen.target:
            return wanted
        if enough >= seen.target or seen.unknown:
            return seen.target
        return min(seen.target - 1, peak)  # less than the target lets Serve count its delay

    def need(self, loads: Iterable[ReplicaLoad]) -> Need:
        """What each measure asks for, over all replicas."""
        config, queue, kv, rate = self.config, 0.0, 0.0, 0.0
        for load in loads:
            queue += load.queued_tokens
            kv += load.kv_pressure
            rate += self._rate(load)
        return Need(
            queue / (self.tokens_per_s * config.target_queue_s),
            kv / config.target_kv_util,
            rate / (self.tokens_per_s * config.target_rate_util),
        )

    def _rate(self, load: ReplicaLoad) -> float:
        """What a replica computes, in prompt tokens a second."""
        return load.prefill_tokens_per_s + self.config.decode_cost * load.decode_tokens_per_s

    def _learn(self, loads: Iterable[ReplicaLoad], passed_s: float) -> None:
        """Learn what a replica can do: what any has done is possible, and a full one cannot do more."""
        for load in loads:
            rate = self._rate(load)
            full = load.full >= FULL and rate > 0
            if rate > self.tokens_per_s or (full and not self._measured):
                self.tokens_per_s = rate
            elif full:
                self.tokens_per_s += (rate - self.tokens_per_s) * -math.expm1(-passed_s / LEARN_S)
            self._measured |= full

    def _peak(self, now_s: float, enough: int, hold_s: float) -> int:
        """The most that was needed in the last hold_s."""
        while self._peaks and self._peaks[0][0] <= now_s - hold_s:
            self._peaks.popleft()
        while self._peaks and self._peaks[-1][1] <= enough:
            self._peaks.pop()
        self._peaks.append((now_s, enough))
        return self._peaks[0][1]


def _ceil(replicas: float) -> int:
    return math.ceil(replicas - EPSILON)


# -------------------------------------------------------------------- in Serve's controller

_MEASURES = tuple(item.name for item in fields(ReplicaLoad))


class ServingPolicy:
    """`policy_function: tournant.cluster.autoscaling:ServingPolicy` of a Serve file; `policy_kwargs` are the fields of
    `PolicyConfig`.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Called by Serve when the deployment is. Raises ConfigError."""
        self._policy = Policy(PolicyConfig.parse(kwargs))
        self._heard: dict[Any, tuple[float, float]] = {}  # replica -> (time of its last report there, and here)
        self._way = 0  # 1 while more replicas are wanted, -1 while fewer are

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Called by Serve many times a second: replicas that are wanted, and what asks for them."""
        now_s = float(ctx.current_time or 0.0)
        loads = self._loads(ctx, now_s)
        seen = Snapshot(
            now_s,
            ctx.target_num_replicas,
            loads,
            len(ctx.running_replicas) - len(loads),
            ctx.total_num_requests,
            self._hold_s(ctx.config),
        )
        wanted, need = self._policy.decide(seen), self._policy.need(loads)
        allowed = max(ctx.capacity_adjusted_min_replicas, min(wanted, ctx.capacity_adjusted_max_replicas))
        way = (allowed > seen.target) - (allowed < seen.target)
        if way != self._way:
            self._way = way
            logger.info(
                "%s: %d replicas wanted, %d are to be there; queue asks for %.2f, KV for %.2f, rate for %.2f; a "
                "replica does %.0f tokens/s; nothing known of %d replicas",
                *(ctx.deployment_name, wanted, seen.target, need.queue, need.kv, need.rate),
                *(self._policy.tokens_per_s, seen.unknown),
            )
        return wanted, {"queue": need.queue, "kv": need.kv, "rate": need.rate, "unknown": seen.unknown}

    def _loads(self, ctx: AutoscalingContext, now_s: float) -> tuple[ReplicaLoad, ...]:
        """Of those running replicas that have told all there is to tell, not too long ago. Their clocks are not
        compared with the one here.
        """
        means, series = ctx.aggregated_metrics or {}, (ctx.raw_metrics or {}).get(_MEASURES[0], {})
        heard: dict[Any, tuple[float, float]] = {}
        loads: list[ReplicaLoad] = []
        for replica in ctx.running_replicas:
            points = series.get(replica)
            if not points or any(replica not in means.get(name, {}) for name in _MEASURES):
                continue
            told_at, heard_at = self._heard.get(replica, (math.nan, now_s))
            if points[-1].timestamp != told_at:
                told_at, heard_at = points[-1].timestamp, now_s
            heard[replica] = told_at, heard_at
            if now_s - heard_at <= self._policy.config.stale_s:
                loads.append(ReplicaLoad(*(means[name][replica] for name in _MEASURES)))
        self._heard = heard
        return tuple(loads)

    @staticmethod
    def _hold_s(config: Any) -> float:
        """What means over the look-back that are this old say reaches back over all of the delay."""
        delay_s = float(config.downscale_delay_s)
        return max(delay_s - float(config.look_back_period_s), delay_s / 2)
