"""Named mutants of the engine's side of the tiers, and of its ranks: each breaks a promise that an invariant watches.

A mutant is a set of replaced methods, as in mutants.py; `shape` makes its schedules ones that can show it. Table:
docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from tests.simulation.engine_device import SimDevice, Work
from tests.simulation.engine_link import Reading, SimLink
from tests.simulation.engine_search import fails
from tests.simulation.engine_users import Ask, Users
from tests.simulation.engine_world import FIRST_WRITER, EngineWorld, Setup
from tournant.kvstore.block import BlockRef, Version
from tournant.kvstore.write_group import WriteGroup
from tournant.workers.batch import Batch, StepResult
from tournant.workers.block_manager import BlockManager
from tournant.workers.engine import Engine
from tournant.workers.messages import EngineRequest
from tournant.workers.restores import Read, ReadState, Restores
from tournant.workers.scheduler import Scheduler
from tournant.workers.sequence import Sequence as Answer
from tournant.workers.stashes import Stashes
from tournant.workers.tiering import Tiering
from tournant.workers.transfer_messages import EndRead, Loaded, ReadEnded, Saved

Patch = tuple[Any, str, Any]
RESTORING = {"restore": "always", "caching": True, "credit": 16, "host_blocks": 64, "nvme_blocks": 128}
STORM = {"num_blocks": 8, "max_num_seqs": 8, "depth": 1, **RESTORING}


@dataclass(frozen=True)
class EngineMutant:
    """name: what is wrong; faults and shape: those that bring it out; patches: (object, attribute, replacement)."""

    name: str
    killed_by: tuple[str, ...]
    patches: tuple[Patch, ...]
    faults: tuple[str, ...] = ()
    shape: dict[str, Any] = field(default_factory=dict)

    def drawn(self, seed: int) -> Setup:
        """A schedule of the kind that it is looked for in."""
        return Setup.draw(seed)

    def setup(self, seed: int) -> Setup:
        """A schedule that may show it."""
        setup = self.drawn(seed)
        return replace(setup, faults=setup.faults.union(self.faults), **self.shape)

    def check_killed(self, num_seeds: int) -> None:
        """Some of so many schedules finds it, by an invariant that watches it, and finds nothing without it."""
        for seed in range(num_seeds):
            setup = self.setup(seed)
            with self.applied():
                violation = fails(setup)
            if violation is not None:
                assert violation.invariant in self.killed_by, str(violation)
                assert fails(setup) is None
                return
        raise AssertionError(f"{self.name}: no schedule of {num_seeds} found it")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The mutant in force."""
        with ExitStack() as stack:
            for target, attribute, replacement in self.patches:
                stack.enter_context(patch.object(target, attribute, replacement))
            yield


# ---- what comes back


def _give_back_at_end_read(restores: Restores, read: Read) -> None:
    _ABANDON(restores, read)
    restores._release(read)


_ABANDON = Restores._abandon


def _give_the_rest_back_early(restores: Restores, answer: Answer, now: float) -> list[int] | None:
    read = restores._of.get(answer)
    blocks = _LOADED(restores, answer, now)
    if blocks is not None and read is not None:
        restores._release(read)
    return blocks


_LOADED = Restores.loaded


def _use_before_the_end(restores: Restores, answer: Answer, now: float) -> list[int] | None:
    read = restores._of.get(answer)
    if read is not None and read.state is ReadState.LOADING and not read.over:
        read.good, read.deadline = len(read.blocks), now
    return _LOADED(restores, answer, now)


def _one_more_when_ended(restores: Restores, event: ReadEnded, now: float) -> None:
    read = restores._open.get(event.read)
    most = len(read.blocks) if read is not None else 0
    _ON_ENDED(restores, replace(event, count=max(event.count, min(event.count + 1, most))), now)


_ON_ENDED = Restores.on_ended


def _one_more_when_loaded(restores: Restores, event: Loaded) -> None:
    read = restores._open.get(event.read)
    if read is not None:
        _ON_LOADED(restores, replace(event, count=min(event.count + 1, len(read.blocks))))


_ON_LOADED = Restores.on_loaded


def _load_from_the_first(restores: Restores, answer: Answer, num_shared: int, *rest: Any) -> None:
    _LOAD(restores, answer, num_shared, *rest)
    restores._orders[-1] = replace(restores._orders[-1], skip=0)  # type: ignore[call-arg]


_LOAD = Restores.load


def _restorable_despite_a_gap(restores: Restores, answer: Answer, num_shared: int, *rest: Any) -> int | None:
    read = restores._of.get(answer)
    if read is not None and read.first > num_shared:
        num_shared = read.first
    return _RESTORABLE(restores, answer, num_shared, *rest)


_RESTORABLE = Restores.restorable


def _load_despite_a_gap(restores: Restores, answer: Answer, num_shared: int, *rest: Any) -> None:
    read = restores._of.get(answer)
    if read is not None and read.first > num_shared:
        num_shared = read.first
    _LOAD(restores, answer, num_shared, *rest)


def _has_any_read(restores: Restores, answer: Answer, now: float, *_: Any) -> bool:
    return _HAS_READ(restores, answer, now)


_HAS_READ = Restores.has_read


def _no_deadline(restores: Restores) -> Iterator[float]:
    for read in restores._of.values():
        if read.state is ReadState.LOOKING:
            read.deadline = float("inf")
    return iter(())


def _abandon_in_silence(restores: Restores, read: Read) -> None:
    _ABANDON(restores, read)
    restores._orders[:] = [order for order in restores._orders if order != EndRead(read.number)]


def _in_another_order(restores: Restores, answer: Answer, now: float) -> list[int] | None:
    blocks = _LOADED(restores, answer, now)
    return blocks and blocks[::-1]


def _seal_one_off(blocks: BlockManager, block: int, key: bytes, depth: int = 0, *, below: bool = False) -> None:
    if below and depth:
        others = [other for other, at in zip(blocks._key_of, blocks._depth_of, strict=True) if at == depth - 1]
        free = [other for other in others if other is not None and other != key]
        if free and free[0] in blocks._block_of:
            other = blocks._block_of[free[0]]
            _SEAL(blocks, block, key, depth, below=below)
            if blocks._key_of[block] == key:
                blocks._key_of[block], blocks._key_of[other] = free[0], key
                blocks._block_of[free[0]], blocks._block_of[key] = block, other
            return
    _SEAL(blocks, block, key, depth, below=below)


_SEAL = BlockManager.seal


# ---- what goes down


def _save_and_release(tiering: Tiering, chosen: Sequence[int], copiers: int) -> None:
    _SAVE(tiering, chosen, copiers)
    for saving in tiering._saving.values():
        tiering._release(saving)


_SAVE = Tiering._save


def _seal_what_is_scheduled(scheduler: Scheduler, sequence: Answer) -> None:
    _SCHEDULER_SEAL(scheduler, sequence)
    size = scheduler.blocks.block_tokens
    full = min(sequence.num_scheduled, len(sequence.token_ids)) // size
    if scheduler.blocks.enable_prefix_caching and full > sequence.num_sealed:
        sequence.extend_keys(full, size)
        for index in range(sequence.num_sealed, full):
            scheduler.blocks.seal(sequence.block_table[index], sequence.keys[index], index)


_SCHEDULER_SEAL = Scheduler._seal


def _mint_again(group: WriteGroup, keys: Sequence[bytes]) -> list[BlockRef]:
    return [
        BlockRef(ref.key, Version(ref.version.writer_id, (ref.version.counter - 1) % 64)) for ref in _MINT(group, keys)
    ]


_MINT = WriteGroup.mint


def _mint_without_credit(group: WriteGroup, keys: Sequence[bytes]) -> list[BlockRef]:
    refs = _MINT(group, keys)
    group.credits = [credit + len(refs) for credit in group.credits]
    return refs


def _credit_twice(tiering: Tiering, event: Saved, now: float) -> None:
    _ON_SAVED(tiering, event, now)
    tiering._group.replied(0, event.num_lent)


_ON_SAVED = Tiering._on_saved


def _always_saved(tiering: Tiering, event: Saved, now: float) -> None:
    _ON_SAVED(tiering, replace(event, ok=True), now)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _plan_saves_when_busy(tiering: Tiering, now: float, step_s: float, *, idle: bool) -> None:
    if not idle:
        _PLAN_SAVES(tiering, now, step_s, idle=False)


_PLAN_SAVES = Tiering.plan_saves


# ---- stashes


def _swap_stashes(stashes: Stashes, answer: Answer, block: int) -> None:
    kept = stashes._of[answer]
    for other in stashes._of.values():
        if other is not kept and other.number not in stashes._copies:
            kept.number, other.number = other.number, kept.number
            break
    _BRING_BACK(stashes, answer, block)


_BRING_BACK = Stashes.bring_back


def _stash_while_written(tiering: Tiering, answer: Answer, now: float) -> None:
    in_flight, answer.num_in_flight = answer.num_in_flight, 0
    _PREEMPTED(tiering, answer, now)
    answer.num_in_flight = in_flight


_PREEMPTED = Tiering.preempted


def _stash_for_any_prefix(tiering: Tiering, *rest: Any, **more: Any) -> int | None:
    with patch.object(Stashes, "drop", _nothing):
        return _TIERING_RESTORABLE(tiering, *rest, **more)


_TIERING_RESTORABLE = Tiering.restorable


def _take_what_failed(stashes: Stashes, answer: Answer) -> int | None:
    kept = stashes._of.get(answer)
    if kept is not None and kept.back is False:
        kept.back = True
    return _TAKE(stashes, answer)


_TAKE = Stashes.take


def _stash_free_at_once(stashes: Stashes, answer: Answer, block: int, tokens: int) -> None:
    _KEEP(stashes, answer, block, tokens)
    stashes.on_copied(stashes._of[answer].number)


_KEEP = Stashes.keep


# ---- sequences


def _forget_pending(scheduler: Scheduler, batch: Batch, result: StepResult, now: float) -> Any:
    sampled = [batch.entries[index] for index in batch.sampling]
    late = [entry.sequence for entry in sampled if entry.epoch != entry.sequence.epoch]
    lengths = [len(sequence.token_ids) for sequence in late]
    outputs = _POSTPROCESS(scheduler, batch, result, now)
    for sequence, length in zip(late, lengths, strict=True):
        if sequence.finish_reason is None:
            del sequence.token_ids[length:]
    return outputs


_POSTPROCESS = Scheduler.postprocess


def _report_again(scheduler: Scheduler, batch: Batch, result: StepResult, now: float) -> Any:
    outputs = _POSTPROCESS(scheduler, batch, result, now)
    again = {entry.sequence.request.request_id for entry in batch.entries if entry.sequence.num_preemptions}
    return [item for out in outputs for item in ([out] if out.request_id not in again else [out, replace(out)])]


def _same_namespace(engine: Engine, request: EngineRequest) -> EngineRequest:
    salt = request.cache_salt
    own = _WITH_OWN_KEYS(engine, replace(request, cache_salt=None, keys=[]))
    return replace(own, cache_salt=salt)


def _trust_keys(engine: Engine, request: EngineRequest) -> EngineRequest:
    own = _WITH_OWN_KEYS(engine, request)
    return replace(own, keys=request.keys) if request.keys else own


_WITH_OWN_KEYS = Engine._with_own_keys


def _keep_keys(sequence: Answer) -> None:
    keys, namespace = sequence.keys, sequence.namespace
    _SWITCH_ROPE(sequence)
    sequence.keys, sequence.namespace = keys, namespace


_SWITCH_ROPE = Answer.switch_rope


def _run_without_table(scheduler: Scheduler, sequence: Answer, batch: Batch, now: float) -> None:
    num_updates = len(batch.block_updates)
    _RUN(scheduler, sequence, batch, now)
    del batch.block_updates[num_updates:]


_RUN = Scheduler._run


def _false(*_: Any) -> bool:
    return False


# ---- ranks


def _rank_misses_restored(device: SimDevice, work: Work) -> None:
    if device.rank and work.step % 5 == 0:
        work = replace(work, block_updates=work.block_updates[:-1])
    _APPLY(device, work)


_APPLY = SimDevice.apply_updates


def _leaders_own_count(link: SimLink, reading: Reading) -> int:
    return reading.progress[0]


LOSSES = ("lost block", "corrupt block")

# ---- other weights, late ranks


def _start_with_what_was_said(world: EngineWorld) -> None:
    said = world.link.events if world.engines else []
    _START_ENGINE(world)
    world.link.events += said


_START_ENGINE = EngineWorld._start_engine


def _forget_the_withdrawn(users: Users) -> list[Ask]:
    _WITHDRAW(users)
    return []


_WITHDRAW = Users.withdraw


def _copy_down_at_once(link: SimLink, order: Any, blocks: tuple[int, ...]) -> None:
    booked = [device.booked_end for device in link.world.devices]
    for device in link.world.devices:
        device.booked_end = 0.0
    _BEGIN_DOWN(link, order, blocks)
    for device, end in zip(link.world.devices, booked, strict=True):
        device.booked_end = end


_BEGIN_DOWN = SimLink._begin_down


def _copy_up_at_once(link: SimLink, reading: Reading, device: SimDevice, after: float) -> None:
    del after
    _NEXT_PIECE(link, reading, device, link.world.devices[0].last_end)


_NEXT_PIECE = SimLink._next_piece


ENGINE_MUTANTS = (
    EngineMutant("a block is given back before it is copied down", ("I5",),
                 ((Tiering, "_save", _save_and_release),), ("slow copy",), STORM),
    EngineMutant("blocks of a load are given back at EndRead, not at ReadEnded", ("I8",),
                 ((Restores, "_abandon", _give_back_at_end_read),), ("slow copy", "cancel"), RESTORING),
    EngineMutant("blocks that a deadline cut off are given back at once", ("I8",),
                 ((Restores, "loaded", _give_the_rest_back_early),), ("slow copy",), {**RESTORING, "restore_ms": 5}),
    EngineMutant("restored blocks are used before they are there", ("I8", "I2"),
                 ((Restores, "loaded", _use_before_the_end),), (), RESTORING),
    EngineMutant("more is taken than ReadEnded counts", ("I2",),
                 ((Restores, "on_ended", _one_more_when_ended),), LOSSES, RESTORING),
    EngineMutant("more is taken than Loaded counts", ("I8",),
                 ((Restores, "on_loaded", _one_more_when_loaded),), ("slow copy",), {**RESTORING, "restore_ms": 5}),
    EngineMutant("skip is ignored", ("I2",), ((Restores, "load", _load_from_the_first),), ("slow disk",), RESTORING),
    EngineMutant("a read is used although the device's prefix has shrunk", ("I2",),
                 ((Restores, "restorable", _restorable_despite_a_gap), (Restores, "load", _load_despite_a_gap),
                  (Restores, "has_read", _has_any_read)),
                 ("slow disk",), STORM),
    EngineMutant("a lookup has no deadline", ("I11",),
                 ((Restores, "deadlines", _no_deadline),), ("lookup never answered",), RESTORING),
    EngineMutant("a read that nobody wants is not ended", ("I11",),
                 ((Restores, "_abandon", _abandon_in_silence),), ("cancel",), RESTORING),
    EngineMutant("restored blocks join in another order", ("I2",),
                 ((Restores, "loaded", _in_another_order),), (), RESTORING),
    EngineMutant("restored blocks are sealed under the wrong key", ("I2", "I13"),
                 ((BlockManager, "seal", _seal_one_off),), (), RESTORING),
    EngineMutant("a block is published by the step that still fills it", ("I2", "I5"),
                 ((Scheduler, "_seal", _seal_what_is_scheduled),), (), {"depth": 2, **RESTORING}),
    EngineMutant("a version is used again", ("I3",), ((WriteGroup, "mint", _mint_again),), (), RESTORING),
    EngineMutant("saves take no credit", ("I8",),
                 ((WriteGroup, "mint", _mint_without_credit),), ("no credit",), {**RESTORING, "credit": 3}),
    EngineMutant("credit comes back twice", ("I8",),
                 ((Tiering, "_on_saved", _credit_twice),), (), {**RESTORING, "credit": 3}),
    EngineMutant("blocks count as copied down although the save failed", ("I13",),
                 ((Tiering, "_on_saved", _always_saved),), ("failed copy",), RESTORING),
    EngineMutant("blocks count as copied down although the store was lost", ("I13",),
                 ((BlockManager, "nothing_is_below", _nothing),), ("store lost",), RESTORING),
    EngineMutant("an idle engine copies nothing down", ("I11",),
                 ((Tiering, "plan_saves", _plan_saves_when_busy),), (), RESTORING),
    EngineMutant("a stash comes back into another sequence", ("I2",),
                 ((Stashes, "bring_back", _swap_stashes),), (), STORM),
    EngineMutant("a block is put away while a step writes it", ("I5",),
                 ((Tiering, "preempted", _stash_while_written),), (), {**STORM, "depth": 2}),
    EngineMutant("a stash is put behind any prefix", ("I2", "I7"),
                 ((Tiering, "restorable", _stash_for_any_prefix),), ("evictions", "lost block"), STORM),
    EngineMutant("a stash that was lost is used", ("I2",),
                 ((Stashes, "take", _take_what_failed),), ("stash lost",), STORM),
    EngineMutant("a stash's block is given back before it is copied", ("I5",),
                 ((Stashes, "keep", _stash_free_at_once),), ("slow copy",), STORM),
    EngineMutant("a token sampled for a preempted sequence is forgotten", ("I14",),
                 ((Scheduler, "postprocess", _forget_pending),), (), {**STORM, "depth": 2}),
    EngineMutant("an output after a preemption is given twice", ("I14",),
                 ((Scheduler, "postprocess", _report_again),), (), STORM),
    EngineMutant("the salt is left out of the key", ("I2",),
                 ((Engine, "_with_own_keys", _same_namespace),), (), RESTORING),
    EngineMutant("a frontend's keys are taken whatever their namespace", ("I2",),
                 ((Engine, "_with_own_keys", _trust_keys),), (), RESTORING),
    EngineMutant("the RoPE is left out of the key", ("I2",),
                 ((Answer, "switch_rope", _keep_keys),), (), {**RESTORING, "num_blocks": 12, "rope_switch": 40}),
    EngineMutant("shared blocks are written in place", ("I2", "I5", "I7", "I17"),
                 ((BlockManager, "must_copy", _false),)),
    EngineMutant("block tables of started sequences are not sent", ("I12",),
                 ((Scheduler, "_run", _run_without_table),), (), RESTORING),
    EngineMutant("a rank misses an update of block tables", ("I12",),
                 ((SimDevice, "apply_updates", _rank_misses_restored),), (), {"ranks": 2}),
    EngineMutant("the leader counts only the blocks of its own rank", ("I2",),
                 ((SimLink, "good_count", _leaders_own_count),), LOSSES, {**RESTORING, "ranks": 3}),
    EngineMutant("an engine on other weights makes its keys with the weights_id from before", ("I2",),
                 ((EngineWorld, "weights_told", lambda world: 0),), ("weights update",), RESTORING),
    EngineMutant("an engine on other weights keeps its writer id", ("I3",),
                 ((EngineWorld, "writer_id", lambda world: FIRST_WRITER),), ("weights update",), RESTORING),
    EngineMutant("the link of the engine before is not closed", ("I11",),
                 ((Engine, "close", _nothing),), ("weights update",), RESTORING),
    EngineMutant("what the link of the engine before said is heard by the new one", ("I4",),
                 ((EngineWorld, "_start_engine", _start_with_what_was_said),), ("weights update",), RESTORING),
    EngineMutant("an answer that was begun on other weights goes on", ("I14",),
                 ((Users, "has_delivered", _false),), ("weights update",), RESTORING),
    EngineMutant("a request that had no answer yet ends with the engine", ("I11",),
                 ((Users, "withdraw", _forget_the_withdrawn),), ("weights update",), RESTORING),
    EngineMutant("a late rank copies down before its step has ended", ("I2",),
                 ((SimLink, "_begin_down", _copy_down_at_once),), ("late rank",), {**RESTORING, "ranks": 3}),
    EngineMutant("a late rank copies up before its step has ended", ("I2",),
                 ((SimLink, "_next_piece", _copy_up_at_once),), ("late rank",), {**RESTORING, "ranks": 3}),
)  # fmt: skip
