"""A replica's side of a weights update, pure: what it reports to the roll-out and what an order makes of it.

Owns the replica's phase, the weights it runs and the newest plan it heard of. Who carries reports and orders, and what
starts and changes engines, is elsewhere (weights_actor.py, deploy/).

Invariants:
 1. Only the answer to the latest report is taken: an order is never older than one call may take.
 2. A change begins only while it serves, to a newer epoch, and ends by `changed` or `failed`; epochs only grow.
 3. A failure is reported until the plan has moved on.
"""

from __future__ import annotations

from dataclasses import replace

from tournant.cluster.weights_rollout import Action, Order, Phase, Plan, Report, Weights
from tournant.kvstore.errors import InvariantViolation


class Follower:
    """See the module. replica: a name that no other replica of the application ever has."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.phase = Phase.JOINING
        self.weights: Weights | None = None  # what it serves or starts with
        self.target: Weights | None = None  # what it changes to
        self.plan: Plan | None = None
        self.accepted = False  # the roll-out knows which bytes it serves and lets it
        self.reason = ""  # why it must end
        self._number = 0
        self._failed, self._failure = 0, ""

    def report(self) -> Report:
        """The next report; the answers to earlier ones count for nothing from now on."""
        self._number += 1
        changing_to = self.target.epoch if self.target is not None else 0
        return Report(
            self.replica,
            self._number,
            self.phase,
            self.weights,
            changing_to,
            self._failed,
            self._failure,
            self.plan,
        )

    def take(self, number: int, order: Order) -> Action:
        """Take the answer to a report. Returns what is to be done now: START (with `weights`), CHANGE (to `target`),
        LEAVE (for `reason`), else WAIT.
        """
        if number != self._number or self.phase is Phase.LEAVING:
            return Action.WAIT
        if self.plan is None or order.plan.target.epoch >= self.plan.target.epoch:
            self.plan = order.plan
            if self.plan.target.epoch > self._failed:
                self._failed, self._failure = 0, ""
        self.accepted |= self.phase is Phase.SERVING and order.action in (Action.STAY, Action.CHANGE)
        match order.action:
            case Action.START if self.phase is Phase.JOINING:
                self.phase, self.weights = Phase.STARTING, order.weights
                return Action.START
            case Action.CHANGE if self.phase is Phase.SERVING and self._is_newer(order.weights):
                self.phase, self.target = Phase.CHANGING, order.weights
                return Action.CHANGE
            case Action.STAY if self.phase is Phase.SERVING and self._is_newer(order.weights):
                self._call_by_new_epoch(order.weights)
            case Action.LEAVE:
                self.leave(order.reason)
                return Action.LEAVE
        return Action.WAIT

    def started(self, weights_id: str) -> None:
        """It serves what it was told to start with; weights_id: hex, of the bytes it found."""
        if self.phase is not Phase.STARTING or self.weights is None:
            raise InvariantViolation(f"replica {self.replica} started in phase {self.phase}")
        self.phase, self.weights = Phase.SERVING, replace(self.weights, weights_id=weights_id)

    def changed(self, weights_id: str) -> None:
        """It serves what it was told to change to; weights_id: hex, of the bytes it found."""
        self.weights = replace(self._end_change(), weights_id=weights_id)

    def failed(self, why: str) -> None:
        """It could not change and serves, once more, what it served before."""
        self._failed, self._failure = self._end_change().epoch, why

    def leave(self, reason: str) -> None:
        """It ends. A change that was under way has failed for that reason."""
        if self.target is not None:
            self._failed, self._failure, self.target = self.target.epoch, reason, None
        self.phase, self.reason = Phase.LEAVING, reason

    def _end_change(self) -> Weights:
        target = self.target
        if self.phase is not Phase.CHANGING or target is None:
            raise InvariantViolation(f"replica {self.replica} ended a change in phase {self.phase}")
        self.phase, self.target = Phase.SERVING, None
        return target

    def _is_newer(self, weights: Weights | None) -> bool:
        return weights is not None and self.weights is not None and weights.epoch > self.weights.epoch

    def _call_by_new_epoch(self, weights: Weights | None) -> None:
        if weights is not None and self.weights is not None and weights.tag == self.weights.tag:
            self.weights = replace(self.weights, epoch=weights.epoch)
