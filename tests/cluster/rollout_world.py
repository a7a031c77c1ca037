"""Replicas that follow a roll-out over a bad network, with replicas, the core and updates that fail, in virtual time.

What must hold (`Violation.invariant`):

W1 of the replicas that the core has heard of lately at most one has its engine down for a change.
W2 the epochs of a core and of a replica never fall; a wish asked again is the same update.
W3 while the status says "done" or "failed", no replica heard of lately serves other weights than the target's.
W4 a replica that joins is given weights that have been loaded before.
W5 after a quiet tail everybody serves one set of weights and the update is over; without faults none fails for nothing.
W6 weights that kill whoever loads them kill at most two replicas.
W7 the core's own recount.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.world import Violation
from tournant.cluster.weights_follower import Follower
from tournant.cluster.weights_rollout import (
    Action,
    Order,
    Phase,
    Report,
    Rollout,
    RolloutConfig,
    UpdateRunning,
    UpdateUnavailable,
    Weights,
)
from tournant.kvstore.errors import InvariantViolation

FAULTS = (
    "dropped message", "repeated message", "late message", "core killed", "replica killed", "replica cut off",
    "replica joins", "replica leaves", "slow change",
)  # fmt: skip
MODELS = ("good", "good", "good", "bad", "deadly", "uneven", "in place")
S = 1_000_000
CONFIG = RolloutConfig(turn_us=120 * S, silent_us=30 * S)
CALL_US, HOLD_US, BEAT_US = 15 * S, 10 * S, 4 * S
BUSY_US, QUIET_US = 700 * S, 600 * S


@dataclass(frozen=True)
class Setup:
    """What a schedule is made of, next to its seed."""

    seed: int
    faults: frozenset[str]
    replicas: int
    updates: int

    @staticmethod
    def draw(seed: int) -> Setup:
        """A random setup: each fault is on in one of three."""
        rng = random.Random(seed * 2 + 1)
        faults = frozenset(fault for fault in FAULTS if rng.randrange(3) == 0)
        return Setup(seed, faults, rng.choice((1, 2, 3, 5)), rng.choice((1, 2, 4)))


@dataclass
class Process:
    """One replica: the follower, what its engine truly holds, and the call that is under way."""

    follower: Follower
    node: int
    serves: str = ""  # id of the weights in its engine, "" while that is down
    alive: bool = True
    heard_us: int = -CONFIG.silent_us  # when a core last took in a report
    cut_off_until_us: int = 0
    number: int = 0
    epoch: int = 0
    lost: bool = False  # silent for too long while it changed

    @property
    def changes(self) -> bool:
        """Whether its engine is down for a change."""
        return self.alive and self.follower.phase is Phase.CHANGING


@dataclass
class World:
    """See the module."""

    setup: Setup
    now_us: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.setup.seed)
        self.heap: list[tuple[int, int, Callable[[], None]]] = []
        self.order = 0
        self.digest = hashlib.sha256()
        self.quiet = False
        self.core = Rollout("good-0", CONFIG, 0, settling=False)
        self.core_epoch = 0
        self.core_life = 0
        self.processes: list[Process] = []
        self.loaded: set[str] = set()
        self.num_in_place = 0
        self.asked: dict[str, int] = {}  # tag -> epoch
        self.killed_by: Counter[str] = Counter()
        self.held: dict[str, tuple[Process, int]] = {}  # polls that the core has not answered yet

    # ------------------------------------------------------------ time and chance

    def after(self, delay_us: int, what: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.heap, (self.now_us + delay_us, self.order, what))

    def chance(self, fault: str, one_in: int) -> bool:
        if self.quiet or fault not in self.setup.faults or self.rng.randrange(one_in):
            return False
        self.counts[fault] += 1
        return True

    def run_until(self, end_us: int) -> None:
        while self.heap and self.heap[0][0] <= end_us:
            self.now_us, _, what = heapq.heappop(self.heap)
            what()
            self.check()
        self.now_us = end_us

    def run(self) -> World:
        for _ in range(self.setup.replicas):
            self.join()
        for number in range(self.setup.updates):
            self.after(self.rng.randrange(60, 500) * S, functools.partial(self.ask, number, self.rng.choice(MODELS)))
        for _ in range(8):
            self.after(self.rng.randrange(BUSY_US), self.trouble)
        self.run_until(BUSY_US)
        self.quiet = True
        crowd = max(0, sum(process.alive for process in self.processes) - 6)
        self.run_until(BUSY_US + QUIET_US + 100 * S * crowd)
        self.check_end()
        return self

    def broken(self, invariant: str, message: str) -> Violation:
        return Violation(invariant, f"{self.setup}: {message}")

    @property
    def trace(self) -> str:
        return self.digest.hexdigest()[:16]

    def note(self, what: str) -> None:
        self.counts[what.split(" ")[0]] += 1
        self.digest.update(f"{self.now_us} {what};".encode())

    # ------------------------------------------------------------ what goes wrong

    def trouble(self) -> None:
        """Each fault that is on may strike."""
        alive = [process for process in self.processes if process.alive]
        if self.chance("core killed", 2):
            self.core_life += 1
            self.core = Rollout("good-0", CONFIG, self.now_us, settling=True)
            self.core_epoch = 0
            self.held.clear()
        if self.chance("replica joins", 2):
            self.join()
        if alive and self.chance("replica killed", 2):
            self.kill(self.rng.choice(alive))
        if alive and self.chance("replica cut off", 2):
            self.rng.choice(alive).cut_off_until_us = self.now_us + self.rng.choice((20, 60, 200)) * S
        if len(alive) > 1 and self.chance("replica leaves", 2):
            leaving = self.rng.choice(alive)
            leaving.follower.leave("scaled down")
            self.send(leaving)
            leaving.alive = False

    def kill(self, process: Process) -> None:
        """A replica dies; another one, with another name, takes its place."""
        process.alive = False
        self.after(self.rng.randrange(2, 40) * S, self.join)

    def ask(self, number: int, kind: str, again: bool = False) -> None:
        """A user wants other weights; an impatient one asks twice."""
        model, tag = f"{kind}-{number + 1 if kind != 'in place' else 0}", f"tag{number}"
        try:
            epoch = self.core.update(self.now_us, model, tag)
        except (UpdateRunning, UpdateUnavailable) as error:
            self.note(f"refused {error}")
            self.after(60 * S, functools.partial(self.ask, number, kind))
            return
        self.note(f"update {model} {epoch}")
        self.num_in_place += kind == "in place" and not again
        if again and self.asked[tag] != epoch and "core killed" not in self.setup.faults:
            raise self.broken("W2", f"{tag} was epoch {self.asked[tag]} and is {epoch}")
        self.asked[tag] = epoch
        self.release()
        if not again and self.rng.randrange(2):
            self.after(1, functools.partial(self.ask, number, kind, True))

    # ------------------------------------------------------------ replicas

    def join(self) -> None:
        process = Process(Follower(f"r{len(self.processes)}"), self.rng.randrange(2))
        self.processes.append(process)
        self.send(process)

    def send(self, process: Process) -> None:
        """One report, and the next one when the call has had its time."""
        if not process.alive:
            return
        report = process.follower.report()
        process.number = report.number
        self.after(CALL_US, functools.partial(self.give_up, process, report.number))
        copies = 2 if self.chance("repeated message", 8) else 1
        for _ in range(copies):
            if self.now_us < process.cut_off_until_us or self.chance("dropped message", 6):
                continue
            delay_us = self.rng.randrange(1, S) if not self.chance("late message", 8) else self.rng.randrange(90 * S)
            self.after(delay_us, functools.partial(self.arrive, process, report, self.core_life))

    def give_up(self, process: Process, number: int) -> None:
        if process.number == number:
            self.send(process)

    def arrive(self, process: Process, report: Report, core_life: int) -> None:
        """The core takes in a report; an answer that says nothing new is held back for a while."""
        if core_life != self.core_life:
            return
        order = self.core.hear(self.now_us, report)
        process.heard_us = max(process.heard_us, self.now_us if report.number == process.number else 0)
        self.note(f"{report.phase} {report.replica} {order.action}")
        if order.action in (Action.WAIT, Action.STAY) and report.phase is not Phase.CHANGING:
            self.held[report.replica] = (process, report.number)
            self.after(HOLD_US, functools.partial(self.answer, process, report.number))
        else:
            self.reply(process, report.number, order)
        self.release()

    def release(self) -> None:
        """Answer whoever waits and is to do something else now."""
        for name, (process, number) in list(self.held.items()):
            order = self.core.order(self.now_us, name)
            if order.action not in (Action.WAIT, Action.STAY):
                del self.held[name]
                self.reply(process, number, order)

    def answer(self, process: Process, number: int) -> None:
        if self.held.get(process.follower.replica) == (process, number):
            del self.held[process.follower.replica]
            self.reply(process, number, self.core.order(self.now_us, process.follower.replica))

    def reply(self, process: Process, number: int, order: Order) -> None:
        if order.action is Action.CHANGE and self.chance("replica cut off", 4):  # with the answer on its way
            process.cut_off_until_us = self.now_us + 60 * S
            self.after(self.rng.randrange(30, 70) * S, functools.partial(self.take, process, number, order))
        elif self.now_us >= process.cut_off_until_us and not self.chance("dropped message", 6):
            delay_us = self.rng.randrange(1, S) if not self.chance("late message", 8) else self.rng.randrange(90 * S)
            self.after(delay_us, functools.partial(self.take, process, number, order))

    def take(self, process: Process, number: int, order: Order) -> None:
        if not process.alive:
            return
        match process.follower.take(number, order):
            case Action.START:
                self.check_start(process.follower.weights)
                self.after(self.rng.randrange(2, 20) * S, functools.partial(self.started, process))
            case Action.CHANGE:
                if not self._is_known(process):
                    raise self.broken("W1", f"{process.follower.replica} changes after its turn may have been given on")
                process.serves = ""
                limit_us = min(order.left_us, CONFIG.turn_us)
                took_us = self.rng.randrange(1, 30) * S if not self.chance("slow change", 3) else 2 * CONFIG.turn_us
                self.after(min(took_us, limit_us), functools.partial(self.changed, process, took_us >= limit_us))
            case Action.LEAVE:
                self.note("sent away")
                self.kill(process)
                return
        if process.number == number and process.follower.phase is Phase.CHANGING:
            self.send(process)
        else:
            self.after(self.rng.randrange(1, BEAT_US), functools.partial(self.give_up, process, number))

    def bytes_of(self, process: Process, model: str | None) -> str:
        """The id of the weights that this replica reads; those of "in place" are written anew for each update."""
        kind, _, number = str(model).partition("-")
        if kind == "in place":
            number = str(self.num_in_place)
        return f"{kind}{number}" + (f"/{process.node}" if kind == "uneven" else "")

    def started(self, process: Process) -> None:
        weights = process.follower.weights
        if not process.alive or weights is None:
            return
        process.serves = self.bytes_of(process, weights.model)
        process.follower.started(process.serves)
        self.loaded.add(weights.tag)
        self.send(process)

    def changed(self, process: Process, too_slow: bool) -> None:
        target, old = process.follower.target, process.follower.weights
        if not process.alive or target is None or old is None:
            return
        kind = str(target.model).partition("-")[0]
        if too_slow:
            process.follower.leave("it took too long")
            self.note("overdue")
            self.send(process)
            self.kill(process)
        elif kind == "deadly":
            self.killed_by[target.tag] += 1
            self.note("died")
            self.kill(process)
        elif kind == "bad":
            process.serves = self.bytes_of(process, old.model)
            process.follower.failed("its config.json is no JSON")
            self.note("failed")
            self.send(process)
        else:
            process.serves = self.bytes_of(process, target.model)
            process.follower.changed(process.serves)
            self.loaded.add(target.tag)
            self.send(process)

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        try:
            self.core.validate()
        except InvariantViolation as error:
            raise self.broken("W7", str(error)) from error
        epoch = self.core.plan.target.epoch
        if epoch < self.core_epoch:
            raise self.broken("W2", f"the core's epoch fell from {self.core_epoch} to {epoch}")
        self.core_epoch = epoch
        known = [process for process in self.processes if process.alive and self._is_known(process)]
        for process in self.processes:
            process.lost = process.changes and (process.lost or process not in known)
        changing = [process.follower.replica for process in known if process.changes and not process.lost]
        if len(changing) > 1:
            raise self.broken("W1", f"{changing} change at once")
        for process in known:
            weights = process.follower.weights
            if weights is not None and weights.epoch < process.epoch:
                raise self.broken("W2", f"{process.follower.replica} fell back to epoch {weights.epoch}")
            process.epoch = weights.epoch if weights is not None else 0
        status = self.core.status(self.now_us)
        if status.state in ("done", "failed"):
            serving = {process.serves for process in known if process.serves and process.follower.accepted}
            wrong = serving - {status.target.weights_id}
            if wrong and status.target.weights_id:
                raise self.broken("W3", f"{status.state}, but {sorted(wrong)} are served too")
        limit = 2 if self.setup.faults.isdisjoint(FAULTS[:6]) else 1000
        if any(number > limit for number in self.killed_by.values()):
            raise self.broken("W6", f"{dict(self.killed_by)} replicas died of an update")

    def _is_known(self, process: Process) -> bool:
        """Whether the core has heard of it lately and has not sent it away."""
        heard = self.now_us - process.heard_us < CONFIG.silent_us
        return heard and process.follower.replica not in self.core._gone

    def check_start(self, weights: Weights | None) -> None:
        if weights is None or (weights.tag not in self.loaded and weights.epoch):
            raise self.broken("W4", f"a replica joins with {weights}, which nobody has loaded")

    def check_end(self) -> None:
        status = self.core.status(self.now_us)
        alive = [process for process in self.processes if process.alive]
        serves = sorted({process.serves for process in alive})
        phases = {process.follower.phase for process in alive}
        if status.failure and self.num_in_place:
            return  # there may be no way back to what was overwritten
        if status.state not in ("done", "failed") or len(serves) != 1 or phases != {Phase.SERVING}:
            raise self.broken("W5", f"{status.state}: {serves} are served in phases {sorted(phases)}")
        if {(p.follower.weights.epoch, p.follower.weights.tag) for p in alive if p.follower.weights} != {
            (status.target.epoch, status.target.tag)
        }:
            raise self.broken("W5", "not all replicas call their weights by the target's epoch")
        good = all(kind not in status.failure for kind in ("JSON", "found", "vanished"))
        if status.state == "failed" and good and not self.setup.faults:
            raise self.broken("W5", f"an update failed for nothing: {status.failure}")
        self.counts[status.state] += 1


def run(setup: Setup) -> World:
    """The world at its end. Raises Violation."""
    return World(setup).run()
