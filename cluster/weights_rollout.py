"""Who changes its weights when: the pure core of a weights update, and what replicas and the core say to each other.

Owns the target of an application, whose turn it is, what a failure leads to and what a status says. It knows no Ray,
no clock and no engine: `now_us` is passed in, messages are values, and each may be repeated, late or lost.

One update runs at a time; another one is refused meanwhile, not queued and not put in its place: so at most two sets of
weights are alive, a failure has one cause, and an update that is stuck ends by its deadlines. The target lives in the
replicas: every order carries the plan, every report gives the newest plan back, and a core that begins with nothing
(settling) takes the newest it hears of. With no replica left, the configured weights are epoch 0 again.

Invariants:
 1. One replica at a time has its turn, and keeps it while it is heard of. One that falls silent in its turn loses it;
    if it comes back while it still changes, nobody else gets a turn until that has ended.
 2. The target's epoch only grows. What is undone is a new epoch with the weights from before.
 3. "done" and "failed" are said only while no live replica is on, or starts with, other weights than the target's.
 4. A replica that joins gets weights that some replica has shown to load, where there are any.
 5. Every turn ends: by a report, by silence, or by its deadline, after which the replica is sent away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from tournant.kvstore.errors import InvariantViolation

MAX_LOST_TURNS = 2  # replicas that vanish while they change; one may be chance
MAX_REPLICAS = 4096
MAX_GONE = 512


class UpdateRunning(RuntimeError):  # noqa: N818 - names the fact
    """Another update is not over. epoch: the one that runs."""

    def __init__(self, epoch: int, message: str) -> None:
        super().__init__(epoch, message)
        self.epoch = epoch
        self.message = message

    def __str__(self) -> str:
        return self.message


class UpdateUnavailable(RuntimeError):  # noqa: N818 - names the fact
    """An update cannot be begun now; the message says when it can."""


class UpdateNameTaken(RuntimeError):  # noqa: N818 - names the fact
    """The name of an update is that of one to other weights."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One set of weights. epoch: its place among all targets; model: as in the configuration; tag: names what was asked
    for, the same for all epochs of it ("" = what is configured); weights_id: hex, "" = nobody has read them yet.
    """

    epoch: int
    model: str | None
    tag: str = ""
    weights_id: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all replicas are to run, and what is known of it. Plans of one epoch are joined, else the newer one holds.

    previous: what failure goes back to; proven: some replica has run the target; finished: every replica has; undoing:
    the target is the way back from `failed`, an epoch, for the reason `failure`; lost_turns: replicas that vanished
    while they changed.
    """

    target: Weights
    previous: Weights
    proven: bool = False
    finished: bool = False
    undoing: bool = False
    failed: int = 0
    failure: str = ""
    failed_tag: str = ""
    lost_turns: int = 0


class Phase(StrEnum):
    """What a replica does: asks what to start with, starts with it, serves, changes to other weights, ends."""

    JOINING = "joining"
    STARTING = "starting"
    SERVING = "serving"
    CHANGING = "changing"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says. number: grows by one with each report; weights: what it runs or starts with, None while it
    joins; changing_to: an epoch, in phase CHANGING; failed, failure: the epoch that it could not change to, and why;
    seen: the newest plan it heard of.
    """

    replica: str
    number: int
    phase: Phase
    weights: Weights | None = None
    changing_to: int = 0
    failed: int = 0
    failure: str = ""
    seen: Plan | None = None


class Action(StrEnum):
    """What a replica is to do: ask again, start with weights, call those it runs by a new epoch, change, end."""

    WAIT = "wait"
    START = "start"
    STAY = "stay"
    CHANGE = "change"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Order:
    """An answer to a report. weights: of START, STAY, CHANGE; left_us: how long a CHANGE may take; reason: of LEAVE."""

    action: Action
    plan: Plan
    weights: Weights | None = None
    left_us: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Times in microseconds. turn_us: for one replica to fetch, drain and change; silent_us: a replica not heard of for
    this long is gone, and so long a core that begins anew only listens.
    """

    turn_us: int = 1_800_000_000
    silent_us: int = 30_000_000


@dataclass(frozen=True, slots=True)
class Status:
    """state: "learning" (the core began anew), "running", "undoing", "done" or "failed"; replicas: (name, phase, epoch,
    weights_id), in the order in which they came.
    """

    state: str
    target: Weights
    previous: Weights
    failed: int
    failure: str
    replicas: tuple[tuple[str, str, int, str], ...]

    def to_plain(self) -> dict[str, object]:
        """As it is shown to users."""
        target, previous = self.target, self.previous
        names = ("replica", "phase", "epoch", "weights_id")
        return {
            "state": self.state,
            "epoch": target.epoch,
            "model": target.model,
            "weights_id": target.weights_id or None,
            "previous": {"epoch": previous.epoch, "model": previous.model, "weights_id": previous.weights_id or None},
            "failed_epoch": self.failed or None,
            "error": self.failure or None,
            "replicas": [dict(zip(names, replica, strict=True)) for replica in self.replicas],
        }


@dataclass(slots=True)
class _Replica:
    """What is known of a live replica. deadline_us: of its turn, None = it has none; told: number of the report that
    was last answered by its turn, which it may have begun unless a later one says else; came_back: it was changing
    when this core heard of it first, or again.
    """

    name: str
    number: int
    heard_us: int
    phase: Phase = Phase.JOINING
    weights: Weights | None = None
    changing_to: int = 0
    deadline_us: int | None = None
    told: int = -1
    came_back: bool = False


class Rollout:
    """See the module. model: the configured one; settling: the core begins anew and replicas may know more than it."""

    def __init__(self, model: str | None, config: RolloutConfig, now_us: int, *, settling: bool) -> None:
        configured = Weights(0, model)
        self.config = config
        self.plan = Plan(configured, configured, finished=True)
        self.num_changes = 0  # grows whenever an order to some replica may have become another one
        self._settled_us = now_us + config.silent_us if settling else now_us
        self._replicas: dict[str, _Replica] = {}
        self._gone: dict[str, str] = {}  # replica -> why it must end

    @property
    def num_live(self) -> int:
        """Replicas heard of lately."""
        return len(self._replicas)

    # ------------------------------------------------------------ updates

    def update(self, now_us: int, model: str | None, tag: str) -> int:
        """Begin an update and return its epoch. tag: not empty, names this wish: asked again, it is the same update.

        Raises UpdateNameTaken when the target with this tag is another model, UpdateRunning while another one runs or
        is undone, UpdateUnavailable without replicas or while settling.
        """
        if not tag:
            raise ValueError("the tag of an update is empty; it must name the update")
        self._expire(now_us)
        plan = self.plan
        if tag == plan.target.tag and not plan.undoing:
            if model != plan.target.model:
                raise UpdateNameTaken(
                    f"the update named {tag!r} is to {plan.target.model!r}, not to {model!r}; "
                    "give this one a name of its own"
                )
            return plan.target.epoch
        if tag == plan.failed_tag:
            return plan.failed
        if now_us < self._settled_us:
            wait_s = -(-(self._settled_us - now_us) // 1_000_000)
            raise UpdateUnavailable(f"the update service has begun anew and asks the replicas; try again in {wait_s} s")
        state = self._state(now_us)
        if state not in ("done", "failed"):
            epoch = plan.failed if plan.undoing else plan.target.epoch
            what = "failed and is being undone" if plan.undoing else "is not over"
            raise UpdateRunning(
                epoch, f"the weights update with epoch {epoch} {what}; wait for it (GET /admin/weights)"
            )
        if not self._replicas:
            raise UpdateUnavailable("no replica is there that could change its weights; try again when one is")
        self._set(Plan(Weights(plan.target.epoch + 1, model, tag), plan.target))
        self._advance(now_us)
        return self.plan.target.epoch

    def status(self, now_us: int) -> Status:
        """What everybody does now."""
        self._expire(now_us)
        plan = self.plan
        replicas = tuple(
            (one.name, str(one.phase), one.weights.epoch, one.weights.weights_id)
            if one.weights is not None
            else (one.name, str(one.phase), -1, "")
            for one in self._replicas.values()
        )
        return Status(self._state(now_us), plan.target, plan.previous, plan.failed, plan.failure, replicas)

    # ------------------------------------------------------------ replicas

    def hear(self, now_us: int, report: Report) -> Order:
        """Take in a report and answer it. Late ones change nothing."""
        known = self._replicas.get(report.replica)
        if known is not None and report.number >= known.number:
            known.heard_us = now_us  # before it is found silent: nobody has its turn yet
        self._expire(now_us)
        if report.seen is not None:
            self._learn(report.seen)
        known = self._replicas.get(report.replica)
        if report.replica not in self._gone and (known is None or report.number >= known.number):
            self._record(now_us, known, report)
        self._advance(now_us)
        return self.order(now_us, report.replica)

    def order(self, now_us: int, name: str) -> Order:
        """What a replica is to do now, by its latest report."""
        self._expire(now_us)
        one = self._replicas.get(name)
        plan = self.plan
        if one is None:
            return (
                Order(Action.LEAVE, plan, reason=self._gone[name]) if name in self._gone else Order(Action.WAIT, plan)
            )
        if one.phase is Phase.JOINING:
            if now_us < self._settled_us:
                return Order(Action.WAIT, plan)
            one.weights = plan.target if plan.proven or plan.finished else plan.previous
            return Order(Action.START, plan, one.weights)
        if one.phase is Phase.SERVING and one.deadline_us is not None:
            one.told = one.number
            return Order(Action.CHANGE, plan, plan.target, one.deadline_us - now_us)
        return Order(Action.STAY, plan, plan.target if self._is_current(one) else one.weights)

    def _record(self, now_us: int, known: _Replica | None, report: Report) -> None:
        if report.phase is Phase.LEAVING:
            self._dismiss(report.replica, "it said that it ends")
        else:
            if known is None:
                if len(self._replicas) >= MAX_REPLICAS:
                    raise UpdateUnavailable(f"there are {MAX_REPLICAS} replicas already; no more can take part")
                known = self._replicas[report.replica] = _Replica(report.replica, report.number, now_us)
            if known.phase is Phase.CHANGING and report.phase is Phase.SERVING:
                self._end_turn(known)
            known.number, known.heard_us, known.phase = report.number, now_us, report.phase
            known.weights, known.changing_to = report.weights, report.changing_to
            if report.phase is Phase.CHANGING and known.deadline_us is None:
                known.deadline_us, known.came_back = now_us + self.config.turn_us, True
        if report.failed == self.plan.target.epoch and report.failed:
            self._fail(report.replica, f"replica {report.replica}: {report.failure}")
        elif known is not None and report.phase is Phase.SERVING:
            self._note_serving(known)

    def _end_turn(self, one: _Replica) -> None:
        one.deadline_us, one.came_back = None, False
        self.num_changes += 1

    def _note_serving(self, one: _Replica) -> None:
        """Weights that a replica serves can be loaded; the first one says which bytes they are."""
        plan, weights = self.plan, one.weights
        if weights is None:
            raise ValueError(f"replica {one.name} serves, but reports no weights")
        if weights.tag != plan.target.tag:
            return
        if plan.target.weights_id in ("", weights.weights_id):
            if not plan.proven or not plan.target.weights_id:
                target = replace(plan.target, weights_id=weights.weights_id)
                self._set(replace(plan, target=target, proven=True))
            return
        self._note_other_bytes(one, weights)

    def _note_other_bytes(self, one: _Replica, weights: Weights) -> None:
        """The target's model has other bytes where this replica reads it. They hold only if nobody has the first."""
        plan = self.plan
        why = (
            f"replica {one.name} found the weights {weights.weights_id[:12]} in {plan.target.model!r}; the others run "
            f"{plan.target.weights_id[:12]}: give every node the same files, then update again"
        )
        others = [other for other in self._replicas.values() if other is not one]
        if not plan.finished and not plan.undoing:
            self._fail(one.name, why)
        elif any(other.weights and other.weights.weights_id == plan.target.weights_id for other in others):
            self._dismiss(one.name, why)
        else:
            target = replace(plan.target, epoch=plan.target.epoch + 1, weights_id=weights.weights_id)
            self._set(replace(plan, target=target, previous=target))

    # ------------------------------------------------------------ what leads on

    def _expire(self, now_us: int) -> None:
        """Forget who is silent; send away who has taken too long."""
        for one in list(self._replicas.values()):
            if now_us - one.heard_us >= self.config.silent_us:
                del self._replicas[one.name]
                self.num_changes += 1
                self._note_lost(one)
            elif one.deadline_us is not None and now_us >= one.deadline_us + self.config.silent_us:
                why = f"replica {one.name} took longer than {self.config.turn_us / 1e6:g} s to change its weights"
                epoch = one.changing_to or self.plan.target.epoch
                self._dismiss(one.name, why)
                if epoch == self.plan.target.epoch:
                    self._fail(one.name, why)
        self._advance(now_us)

    def _note_lost(self, one: _Replica) -> None:
        """Weights that end whoever loads them must not end all replicas, one by one."""
        plan = self.plan
        if plan.finished or plan.undoing or one.phase is not Phase.CHANGING:
            return
        if one.changing_to == plan.target.epoch:
            self._set(replace(plan, lost_turns=plan.lost_turns + 1))
            if self.plan.lost_turns >= MAX_LOST_TURNS:
                self._fail(
                    one.name, f"{self.plan.lost_turns} replicas vanished while they changed, {one.name} the last"
                )

    def _fail(self, name: str, why: str) -> None:
        """A replica cannot have the target: the update is undone, or else the replica must end."""
        plan = self.plan
        if plan.finished or plan.undoing:
            self._dismiss(name, why)
            return
        target = replace(plan.previous, epoch=plan.target.epoch + 1)
        failed = plan.target
        self._set(Plan(target, target, True, undoing=True, failed=failed.epoch, failure=why, failed_tag=failed.tag))

    def _dismiss(self, name: str, why: str) -> None:
        self._replicas.pop(name, None)
        self._gone[name] = why
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        self.num_changes += 1

    def _learn(self, seen: Plan) -> None:
        """Join what a replica has heard of: the newer epoch holds, facts of one epoch add up."""
        plan = self.plan
        mine, theirs = plan.target, seen.target
        if theirs.epoch > mine.epoch:
            self._set(seen)
        elif theirs.epoch == mine.epoch and theirs.tag == mine.tag:
            target = mine if mine.weights_id else replace(mine, weights_id=theirs.weights_id)
            joined = replace(
                plan,
                target=target,
                proven=plan.proven or seen.proven,
                finished=plan.finished or seen.finished,
                lost_turns=max(plan.lost_turns, seen.lost_turns),
            )
            if joined != plan:
                self._set(joined)
        elif theirs.epoch == mine.epoch:  # begun by a core that died before anyone else knew of it
            self._set(replace(plan, target=replace(mine, epoch=mine.epoch + 1)))

    def _set(self, plan: Plan) -> None:
        self.plan = plan
        self.num_changes += 1

    def _advance(self, now_us: int) -> None:
        """Give the next turn, or note that there is none left to give."""
        if now_us < self._settled_us:
            return
        plan, others = self.plan, []
        for one in self._replicas.values():
            if not self._is_current(one):
                others.append(one)
            elif one.deadline_us is not None:
                self._end_turn(one)
        if not others:
            if plan.proven and not plan.finished:
                self._set(replace(plan, finished=True))
            return
        if any(one.deadline_us is not None for one in self._replicas.values()):
            return
        for one in others:
            if one.phase is Phase.SERVING:
                one.deadline_us = now_us + self.config.turn_us
                self.num_changes += 1
                return

    def _is_current(self, one: _Replica) -> bool:
        """Whether a replica runs, or starts with, the target, by whatever epoch it calls it, and will not change."""
        weights, target = one.weights, self.plan.target
        may_have_begun = one.deadline_us is not None and one.number <= one.told
        if weights is None or may_have_begun or one.phase is Phase.CHANGING:
            return False
        return weights.tag == target.tag and (not target.weights_id or weights.weights_id in ("", target.weights_id))

    def _state(self, now_us: int) -> str:
        plan = self.plan
        if now_us < self._settled_us:
            return "learning"
        everybody = all(self._is_current(one) for one in self._replicas.values())
        if plan.undoing:
            return "failed" if everybody else "undoing"
        return "done" if everybody and (plan.proven or plan.finished) else "running"

    def validate(self) -> None:
        """Recount. Raises InvariantViolation."""
        turns = [one.name for one in self._replicas.values() if one.deadline_us is not None and not one.came_back]
        if len(turns) > 1:
            raise InvariantViolation(f"it is the turn of {turns} at once")
        if any(one.phase is Phase.CHANGING and one.deadline_us is None for one in self._replicas.values()):
            raise InvariantViolation("a replica changes without a deadline")
        if self._replicas.keys() & self._gone.keys():
            raise InvariantViolation("a replica that was sent away is known as live")
        if self.plan.previous.epoch > self.plan.target.epoch or self.plan.failed > self.plan.target.epoch:
            raise InvariantViolation(f"epochs do not grow: {self.plan}")
