"""Replicas under load in virtual time, with Serve's own autoscaling state around the policy: its means, factors,
delays, bounds, and the order in which it stops replicas. Nothing here reads a clock or sleeps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import ray.serve._private.autoscaling_state as serve_state
import ray.serve.autoscaling_policy as serve_policy
from ray.serve._private.common import (
    RUNNING_REQUESTS_KEY,
    DeploymentHandleSource,
    DeploymentID,
    HandleMetricReport,
    ReplicaID,
    ReplicaMetricReport,
    TimeStampedValue,
)
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from tournant.cluster.autoscaling import LoadMeter, ServingPolicy
from tournant.workers.messages import EngineStats

DEPLOYMENT = DeploymentID("Replica", "app")
POLICY = "tournant.cluster.autoscaling:ServingPolicy"
BLOCK = 16
STEP_S = 1.0
DECIDE_S = 2.0  # Serve asks ten times a second, which only takes longer here
START_S = 30.0  # until a new replica serves


@dataclass
class Request:
    """prompt tokens are computed first, then `output` ones, `pace` a second."""

    prompt: float
    output: float
    at: float
    pace: float = 20.0
    left: float = 0.0
    made: float = 0.0

    @property
    def held(self) -> float:
        """Tokens whose KV it holds."""
        return self.prompt - self.left + self.made


@dataclass
class FakeReplica:
    """An engine that computes `speed` prompt tokens a second, of which a generated token takes four."""

    name: str
    ready_at: float
    speed: float = 4000.0
    pool: float = 100_000.0
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    silent: bool = False  # it says nothing of its load
    mute: bool = False  # nothing of it arrives any more
    meter: LoadMeter = field(default_factory=LoadMeter)
    series: dict[str, list[TimeStampedValue]] = field(default_factory=dict)

    @property
    def id(self) -> ReplicaID:
        return ReplicaID(self.name, DEPLOYMENT)

    @property
    def work(self) -> float:
        """Tokens that wait."""
        return sum(one.prompt for one in self.waiting) + sum(one.left for one in self.running)

    def step(self, now: float) -> list[Request]:
        """One second of it; what has ended."""
        budget, prefilled, decoded = self.speed * STEP_S, 0.0, 0.0
        for one in self.running:
            if not one.left and budget > 0:
                made = min(one.pace * STEP_S, one.output - one.made, budget / 4)
                one.made += made
                decoded += made
                budget -= 4 * made
        while self.waiting and sum(one.held + one.left for one in self.running) + self.waiting[0].prompt <= self.pool:
            one = self.waiting.popleft()
            one.left = one.prompt
            self.running.append(one)
        for one in self.running:
            took = min(one.left, budget)
            one.left -= took
            prefilled += took
            budget -= took
        ended = [one for one in self.running if one.made >= one.output - 1e-6]
        self.running = [one for one in self.running if one.made < one.output - 1e-6]
        self.stats = replace(
            self.stats,
            num_running=len(self.running),
            num_waiting=len(self.waiting) + sum(one.left > 0 for one in self.running),
            queued_tokens=int(self.work),
            kv_used=int(sum(one.held for one in self.running) / BLOCK),
            kv_total=int(self.pool / BLOCK),
            prompt_tokens=self.stats.prompt_tokens + int(prefilled),
            generation_tokens=self.stats.generation_tokens + int(decoded),
            num_steps=self.stats.num_steps + 1,
        )
        return ended


@dataclass
class Moment:
    """What was at one second."""

    at: float
    target: int
    serving: int
    queued_s: float  # the longest queue of a replica, in seconds of its work
    shortest_s: float  # and the shortest, where what comes next is put
    open: int
    refused: int


Load = Callable[[float], float]  # seconds -> prompt tokens that arrive in a second


class World:
    """A deployment. policy: what Serve is given; settings: of its AutoscalingConfig."""

    def __init__(
        self,
        load: Load,
        *,
        policy: type[ServingPolicy] | None = None,
        kwargs: dict[str, Any] | None = None,
        prompt: float = 800.0,
        output: float = 50.0,
        pool: float = 100_000.0,
        pace: float = 20.0,
        room: int = 10_000,
        **settings: Any,
    ) -> None:
        self.load, self.prompt, self.output, self.pool, self.pace = load, prompt, output, pool, pace
        self.room = room  # requests that may wait at a replica
        self.num_refused = 0
        self.settings: dict[str, Any] = {
            "min_replicas": 1, "max_replicas": 12, "look_back_period_s": 30, "upscale_delay_s": 10,
            "downscale_delay_s": 120, **settings,
        }  # fmt: skip
        self.now = 1000.0
        self.random = random.Random(7)
        self.config = AutoscalingConfig(
            policy=AutoscalingPolicy(policy_function=POLICY, policy_kwargs=kwargs or {}), **self.settings
        )
        if policy is not None:
            self.config.policy._cached_policy = policy
        self.state = serve_state.DeploymentAutoscalingState(DEPLOYMENT)
        self.replicas: list[FakeReplica] = []
        self.leaving: list[FakeReplica] = []
        self.at_handle: deque[Request] = deque()
        self.handle: list[TimeStampedValue] = []
        self.history: list[Moment] = []
        self.ended: list[Request] = []
        self.count = 0
        self.target = 0
        self.owed = 0.0

    @property
    def serving(self) -> list[FakeReplica]:
        return [one for one in self.replicas if one.ready_at <= self.now]

    def start(self) -> None:
        """The first replicas serve at once."""
        deployment = SimpleNamespace(autoscaling_config=self.config, gang_scheduling_config=None)
        info: Any = SimpleNamespace(deployment_config=deployment, target_capacity=None, target_capacity_direction=None)
        self.set_target(self.state.register(info, self.settings["min_replicas"]))
        for one in self.replicas:
            one.ready_at = self.now

    def set_target(self, target: int) -> None:
        """As Serve does: what does not serve yet is stopped first, then the newest; those finish what they have."""
        self.target = target
        while len(self.replicas) < target:
            self.count += 1
            self.replicas.append(FakeReplica(str(self.count), self.now + START_S, pool=self.pool))
        while len(self.replicas) > target:
            last = self.replicas.pop()
            self.state.on_replica_stopped(last.id)
            self.leaving.append(last)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        with self.virtual_time():
            if not self.history:
                self.start()
            end = self.now + seconds
            while self.now < end:
                self.now += STEP_S
                self.arrive()
                for one in [*self.serving, *self.leaving]:
                    self.ended += one.step(self.now)
                self.leaving = [one for one in self.leaving if one.waiting or one.running]
                self.report()
                if self.now % DECIDE_S < STEP_S:
                    self.decide()
                self.note()

    @contextmanager
    def virtual_time(self) -> Iterator[None]:
        clock = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve_state, "time", clock)
            patch.setattr(serve_policy, "time", clock)
            yield

    def arrive(self) -> None:
        self.owed += self.load(self.now - 1000.0) * STEP_S
        while self.owed >= self.prompt:
            size = self.prompt * self.random.uniform(0.5, 1.5)
            self.owed -= size
            self.at_handle.append(Request(size, self.output, self.now, self.pace))
        while self.at_handle and self.serving:
            least = min(self.serving, key=lambda one: one.work)
            one = self.at_handle.popleft()
            if len(least.waiting) < self.room:
                least.waiting.append(one)
            else:
                self.num_refused += 1

    def report(self) -> None:
        """Record five times in a look-back, push every metrics_interval_s; at once when there is no replica."""
        every = int(min(self.config.look_back_period_s / 5, self.config.metrics_interval_s))
        oldest = self.now - self.config.look_back_period_s
        push = self.now % self.config.metrics_interval_s < STEP_S
        if self.now % every < STEP_S:
            for one in self.serving:
                for name, value in ({} if one.silent else one.meter.measure(one.stats, self.now)).items():
                    one.series.setdefault(name, []).append(TimeStampedValue(self.now, value))
            self.handle.append(TimeStampedValue(self.now, float(len(self.at_handle))))
        if push:
            for one in self.serving:
                if one.mute:
                    continue
                one.series = {name: [p for p in points if p.timestamp > oldest] for name, points in one.series.items()}
                one.series = {name: points for name, points in one.series.items() if points}
                metrics = {name: list(points) for name, points in one.series.items()}
                self.state.record_request_metrics_for_replica(ReplicaMetricReport(one.id, metrics, self.now))
        if push or (self.at_handle and not self.serving):
            self.push_handle(oldest)

    def push_handle(self, oldest: float) -> None:
        self.handle = [point for point in self.handle if point.timestamp > oldest]
        running = {
            one.id.to_full_id_str(): [TimeStampedValue(self.now, float(len(one.running) + len(one.waiting)))]
            for one in self.serving
        }
        queued = [*self.handle, TimeStampedValue(self.now, float(len(self.at_handle)))]
        self.state.record_request_metrics_for_handle(
            HandleMetricReport(
                DEPLOYMENT,
                "proxy",
                "actor",
                DeploymentHandleSource.PROXY,
                queued,
                {RUNNING_REQUESTS_KEY: running},
                self.now,
            )
        )

    def decide(self) -> None:
        self.state.update_running_replica_ids([one.id for one in self.serving])
        target = self.state.get_decision_num_replicas(self.target)
        if target != self.target:
            self.set_target(target)

    def note(self) -> None:
        queues = [one.work / one.speed for one in self.serving] or [0.0]
        count = sum(len(one.running) + len(one.waiting) for one in [*self.replicas, *self.leaving])
        count += len(self.at_handle)
        self.history.append(
            Moment(self.now - 1000.0, self.target, len(self.serving), max(queues), min(queues), count, self.num_refused)
        )

    # ---------------------------------------------------------------- what came of it

    def targets(self, since: float = 0.0) -> list[int]:
        """Each number of replicas that was wanted, once per change."""
        found: list[int] = []
        for moment in self.history:
            if moment.at >= since and (not found or found[-1] != moment.target):
                found.append(moment.target)
        return found

    def turns(self, since: float = 0.0) -> int:
        """How often it went up after down, or down after up."""
        targets = self.targets(since)
        ways = [after > before for before, after in pairwise(targets)]
        return sum(one != other for one, other in pairwise(ways))

    def longest_queue_s(self, since: float, until: float = float("inf")) -> float:
        return max(one.queued_s for one in self.history if since <= one.at <= until)
