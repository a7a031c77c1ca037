"""Named mutants of the roll-out and of its followers: each breaks a promise that an invariant of rollout_world.py
watches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.mutants import Mutant
from tournant.cluster import weights_rollout as rollout_module
from tournant.cluster.weights_follower import Follower
from tournant.cluster.weights_rollout import Action, Order, Phase, Plan, Report, Rollout

_ADVANCE, _INIT, _HEAR, _LEARN, _ORDER = Rollout._advance, Rollout.__init__, Rollout.hear, Rollout._learn, Rollout.order
_IS_CURRENT, _NOTE_SERVING, _TAKE = Rollout._is_current, Rollout._note_serving, Follower.take


def _turns_for_all(rollout: Rollout, now_us: int) -> None:
    _ADVANCE(rollout, now_us)
    for one in rollout._replicas.values():
        if one.phase is Phase.SERVING and not rollout._is_current(one) and now_us >= rollout._settled_us:
            one.deadline_us = one.deadline_us or now_us + rollout.config.turn_us


def _never_settling(rollout: Rollout, *args: Any, settling: bool) -> None:
    del settling
    _INIT(rollout, *args, settling=False)


def _any_number(rollout: Rollout, now_us: int, report: Report) -> Order:
    known = rollout._replicas.get(report.replica)
    if known is not None:
        known.number = 0
    return _HEAR(rollout, now_us, report)


def _silence_is_golden(rollout: Rollout, now_us: int) -> None:
    _ADVANCE(rollout, now_us)


def _silent_keep_their_turn(rollout: Rollout, now_us: int) -> None:
    for one in list(rollout._replicas.values()):
        if now_us - one.heard_us >= rollout.config.silent_us and one.deadline_us is None:
            del rollout._replicas[one.name]
            rollout.num_changes += 1
    _ADVANCE(rollout, now_us)


def _undo_under_the_old_epoch(rollout: Rollout, name: str, why: str) -> None:
    del name
    plan = rollout.plan
    if not plan.finished and not plan.undoing:
        rollout._set(replace(plan, target=plan.previous, undoing=True, failed=plan.target.epoch, failure=why))


def _send_away_who_fails(rollout: Rollout, name: str, why: str) -> None:
    rollout._dismiss(name, why)


def _join_the_target(rollout: Rollout, now_us: int, name: str) -> Order:
    order = _ORDER(rollout, now_us, name)
    return replace(order, weights=rollout.plan.target) if order.action is Action.START else order


def _forget_what_is_on_its_way(rollout: Rollout, now_us: int, name: str) -> Order:
    order = _ORDER(rollout, now_us, name)
    if order.action is Action.CHANGE:
        rollout._replicas[name].told = -1
    return order


def _learn_nothing(rollout: Rollout, seen: Plan) -> None:
    del rollout, seen


def _forget_lost(rollout: Rollout, one: Any) -> None:
    del rollout, one


def _the_tag_says_it_all(rollout: Rollout, one: Any) -> None:
    if one.weights is not None:
        one.weights = replace(one.weights, weights_id=rollout.plan.target.weights_id or one.weights.weights_id)
    _NOTE_SERVING(rollout, one)


def _starting_is_enough(rollout: Rollout, one: Any) -> bool:
    return one.phase is Phase.CHANGING or _IS_CURRENT(rollout, one)


def _done_when_proven(rollout: Rollout, now_us: int) -> str:
    del now_us
    plan = rollout.plan
    if plan.undoing:
        return "failed"
    return "done" if plan.proven or plan.finished else "running"


def _turn_never_ends(rollout: Rollout, one: Any) -> None:
    del rollout, one


def _take_any_answer(follower: Follower, number: int, order: Order) -> Action:
    del number
    return _TAKE(follower, follower._number, order)


def _keep_the_old_epoch(follower: Follower, weights: Any) -> None:
    del follower, weights


def _changed_by_itself(follower: Follower, number: int, order: Order) -> Action:
    if follower.phase is Phase.SERVING and order.plan.target.tag != getattr(follower.weights, "tag", ""):
        order = replace(order, action=Action.CHANGE, weights=order.plan.target, left_us=1 << 30)
    return _TAKE(follower, number, order)


NETWORK = ("dropped message", "late message", "repeated message")

MUTANTS = (
    Mutant("everybody has a turn", ("W1", "W7"), (), ((Rollout, "_advance", _turns_for_all),)),
    Mutant("a core that begins anew listens to nobody", ("W1", "W3", "W4", "W5"), ("core killed", "replica joins"),
           ((Rollout, "__init__", _never_settling),)),
    Mutant("late reports count", ("W1", "W3", "W5", "W7"), NETWORK, ((Rollout, "hear", _any_number),)),
    Mutant("the dead live on", ("W5",), ("replica killed",), ((Rollout, "_expire", _silence_is_golden),)),
    Mutant("a dead replica keeps its turn", ("W5",), ("replica killed",),
           ((Rollout, "_expire", _silent_keep_their_turn),)),
    Mutant("what is undone has the old epoch", ("W2", "W5", "W7"), (),
           ((Rollout, "_fail", _undo_under_the_old_epoch),)),
    Mutant("a failure ends replicas, not the update", ("W5", "W6"), (), ((Rollout, "_fail", _send_away_who_fails),)),
    Mutant("who joins tries out the target", ("W4",), ("replica joins", "replica killed"),
           ((Rollout, "order", _join_the_target),)),
    Mutant("a core that begins anew believes nobody", ("W2", "W3", "W4", "W5"), ("core killed",),
           ((Rollout, "_learn", _learn_nothing),)),
    Mutant("deaths in a turn are chance", ("W5", "W6"), (), ((Rollout, "_note_lost", _forget_lost),)),
    Mutant("two bytes ways under one name", ("W3", "W5"), (), ((Rollout, "_note_serving", _the_tag_says_it_all),)),
    Mutant("who changes has changed", ("W1", "W3", "W5", "W7"), (), ((Rollout, "_is_current", _starting_is_enough),)),
    Mutant("done when the first one is", ("W3", "W5"), (), ((Rollout, "_state", _done_when_proven),)),
    Mutant("a turn never ends", ("W3", "W5"), (), ((Rollout, "_end_turn", _turn_never_ends),)),
    Mutant("one lost turn is one too many", ("W5",), (), ((rollout_module, "MAX_LOST_TURNS", 1 << 30),)),
    Mutant("an order on its way is forgotten", ("W1", "W3", "W7"), (),
           ((Rollout, "order", _forget_what_is_on_its_way),)),
    Mutant("a follower takes old answers", ("W1", "W3"), (*NETWORK, "replica cut off"),
           ((Follower, "take", _take_any_answer),)),
    Mutant("a follower keeps the old epoch", ("W5",), (), ((Follower, "_call_by_new_epoch", _keep_the_old_epoch),)),
    Mutant("a follower waits for no turn", ("W1", "W7"), (), ((Follower, "take", _changed_by_itself),)),
)  # fmt: skip
