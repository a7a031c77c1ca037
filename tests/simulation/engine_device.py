"""The devices of one replica's ranks in virtual time: contents of blocks, steps in flight, who touches which block.

KV of a token is a number that stands for everything it depends on: namespace, RoPE rows, and every token before it. A
step writes when its simulated kernel ends, and what it reads must be what the tokens of its row give (I2). A block that
a copy may still touch is known here, so that a step, or another copy, that touches it too is found at once (I5, I8).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tournant.kvstore.block import block_key
from tournant.workers.batch import UNKNOWN_TOKEN, Batch, RowState, StepResult
from tournant.workers.messages import TokenLogprobs

if TYPE_CHECKING:
    from tests.simulation.engine_world import EngineWorld

VOCAB = 997
UNWRITTEN = -1


def first_state(namespace: bytes) -> int:
    """KV before any token, under the digest of a namespace without its RoPE (that comes with each token)."""
    return int.from_bytes(namespace[:7], "little")


def next_state(state: int, token: int, rope_offset: int) -> int:
    """KV of a token after a prefix whose last KV is `state`, computed with these RoPE rows."""
    return (state * 6364136223846793005 + token * 1442695040888963407 + rope_offset * 977 + 1) % (1 << 61)


def sampled(state: int, seed: int, index: int) -> int:
    """The token that answer `index` of a request gets after this prefix."""
    return (state ^ (seed * 131 + index) * 7919) % VOCAB


def logprob_of(state: int, token: int) -> TokenLogprobs:
    """Log-probability of a prompt token after the prefix that gives `state`."""
    return TokenLogprobs(-float((state ^ token) % 1009), [])


@dataclass(slots=True)
class Row:
    """One rank's memory of a row: its block table and tokens, and the KV that these tokens give (`states`)."""

    seed: int
    index: int
    tokens: list[int]
    base: int = UNWRITTEN
    namespace: bytes = b""
    blocks: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    is_lost: bool = False  # what it needed below was lost: all it yields means nothing

    def extend(self, stop: int, rope_offset: int) -> None:
        """Work out the right KV of the first `stop` tokens."""
        states = self.states
        state = states[-1] if states else self.base
        for token in self.tokens[len(states) : stop]:
            state = next_state(state, token, rope_offset)
            states.append(state)


@dataclass(frozen=True, slots=True)
class Work:
    """A batch as plain values, as another rank would get it; `bases`: per entry, (first state, namespace)."""

    step: int
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    rope_offsets: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: tuple[int, ...]
    prompt_logprobs: tuple[tuple[int, int, int | None], ...]
    new_rows: tuple[RowState, ...]
    block_updates: tuple[tuple[int, int, tuple[int, ...]], ...]
    copies: tuple[tuple[int, int], ...]
    demotions: tuple[tuple[int, int], ...]
    bases: tuple[tuple[int, bytes], ...]

    @staticmethod
    def of(batch: Batch, bases: Iterable[tuple[int, bytes]]) -> Work:
        """A snapshot: what the engine does to the batch afterwards does not reach the ranks."""
        return Work(
            batch.step, tuple(batch.rows), tuple(batch.starts), tuple(batch.counts), tuple(batch.rope_offsets),
            tuple(batch.token_ids), tuple(batch.sampling), tuple(batch.prompt_logprobs), tuple(batch.new_rows),
            tuple((row, first, tuple(blocks)) for row, first, blocks in batch.block_updates), tuple(batch.copies),
            tuple(batch.demotions), tuple(bases),
        )  # fmt: skip


class SimDevice:
    """One rank: what its blocks and the places below them hold, one number per token slot, and its rows."""

    def __init__(self, world: EngineWorld, rank: int, num_blocks: int, block_tokens: int, num_below: int) -> None:
        self.world = world
        self.rank = rank
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.contents = [[UNWRITTEN] * block_tokens for _ in range(num_blocks + num_below)]
        self.gone: set[int] = set()  # places whose content cannot be read
        self.rows: dict[int, Row] = {}
        self.last_end = 0.0  # when the newest step given so far ends here
        self.booked_end = 0.0  # the same of the newest step that the leader has booked
        self.hashes: dict[int, int] = {}

    def execute(self, work: Work) -> StepResult:
        """The kernels of a step end: read every prefix, write the new KV, sample."""
        for state in work.new_rows:
            self.rows[state.row] = Row(state.seed, state.index, list(state.token_ids))
        self.put_below(work)
        for source, target in work.copies:
            self.contents[target] = list(self.contents[source])
        self.apply_updates(work)
        tables = tuple((row, tuple(self.rows[row].blocks)) for row in work.rows)
        self.world.step_hash(self, work.step, hash((work.step, tables)))
        tokens: list[int] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        lost: dict[int, frozenset[int]] = {}
        at, wanted, sampling = 0, {index: following for index, _, following in work.prompt_logprobs}, set(work.sampling)
        for index, number in enumerate(work.rows):
            start, count, row = work.starts[index], work.counts[index], self.rows[number]
            if row.base == UNWRITTEN:
                row.base, row.namespace = work.bases[index]
            if found := self._lost_below(row, start):
                lost[index] = found
            if row.is_lost:
                at += count
                self._write_garbage(row, start, start + count)
                tokens += [0] * (index in sampling)
                if index in wanted:
                    prompt_logprobs[index] = [TokenLogprobs(1.0, [])] * (count - (wanted[index] is None))
                continue
            self._check_tokens(row, work.token_ids[at : at + count], start, work.step)
            at += count
            row.extend(start + count, work.rope_offsets[index])
            self._check_moved(row, number, work)
            self._check_read(row, start, work.step)
            self._write(row, start, start + count)
            if index in wanted:
                known = row.tokens[start + 1 : start + count]
                known += [] if wanted[index] is None else [wanted[index]]
                pairs = zip(row.states[start : start + count], known, strict=False)
                prompt_logprobs[index] = [logprob_of(state, token) for state, token in pairs]
            if index in sampling:
                token = sampled(row.states[start + count - 1], row.seed, row.index)
                row.tokens.append(token)
                tokens.append(token)
        return StepResult(tokens, prompt_logprobs=prompt_logprobs, lost=lost)

    def put_below(self, work: Work) -> None:
        """Copy blocks to places below (I18: whole ones)."""
        for source, target in work.demotions:
            if min(self.contents[source]) < 0:
                self.world.violated("I18", f"step {work.step} puts block {source} below, which is not whole")
            self.contents[target] = list(self.contents[source])
            self.gone.discard(target)

    def _lost_below(self, row: Row, stop: int) -> frozenset[int]:
        """Places that a row reads and cannot. A step after it need not read what this one does (sparse attention)."""
        below = [block for block in row.blocks[: -(-stop // self.block_tokens)] if block >= self.num_blocks]
        found = self.gone.intersection(below)
        if below and self.world.strikes("lost below", 40):
            found.add(self.world.rng.choice(below))
            self.gone |= found if self.world.rng.randrange(2) else set()
        row.is_lost |= bool(found)
        return frozenset(found)

    def _write_garbage(self, row: Row, start: int, stop: int) -> None:
        for position in range(start, stop):
            self.world.garbage += 1
            self.contents[row.blocks[position // self.block_tokens]][position % self.block_tokens] = (
                -1 - self.world.garbage
            )

    def _check_moved(self, row: Row, number: int, work: Work) -> None:
        """I18: what a row's table no longer has on the device is where it says."""
        if not work.demotions:
            return
        size, started = self.block_tokens, {state.row for state in work.new_rows}
        for other, first, blocks in work.block_updates:
            if other != number or other in started:
                continue
            for index, block in enumerate(blocks, first):
                if block >= self.num_blocks and self.contents[block] != row.states[index * size : (index + 1) * size]:
                    self.world.violated(
                        "I18", f"step {work.step}: entry {index} of row {number} went to {block}, and is not there"
                    )

    def apply_updates(self, work: Work) -> None:
        """Write what is new into the rows' block tables."""
        for number, first, blocks in work.block_updates:
            table = self.rows[number].blocks
            if first > len(table):
                self.world.violated("I12", f"step {work.step} leaves a gap in the block table of row {number}")
            table[first : first + len(blocks)] = blocks

    def _check_tokens(self, row: Row, tokens: Sequence[int], start: int, step: int) -> None:
        known = row.tokens[start : start + len(tokens)]
        same = len(known) == len(tokens) and all(a in (b, UNKNOWN_TOKEN) for a, b in zip(tokens, known, strict=True))
        if not same:
            self.world.violated("I14", f"step {step} computes tokens {tokens} at {start}; the row has {known}")

    def _check_read(self, row: Row, stop: int, step: int) -> None:
        size = self.block_tokens
        for index in range(-(-stop // size)):
            count = min(size, stop - index * size)
            block = row.blocks[index]
            want = row.states[index * size : index * size + count]
            if self.contents[block][:count] != want:
                got = self.contents[block][:count]
                place = next(i for i in range(count) if got[i] != want[i])
                kind = "KV that nobody wrote" if got[place] < 0 else "KV of something else"
                self.world.violated(
                    "I2", f"step {step} on rank {self.rank} reads {kind}: block {block}, entry {index}, token {place}"
                )

    def _write(self, row: Row, start: int, stop: int) -> None:
        size = self.block_tokens
        for position in range(start, stop):
            block, place = row.blocks[position // size], position % size
            self.contents[block][place] = row.states[position]
            if place == size - 1:
                self.world.know_key(row.states[position], self._key(row, position // size))

    def _key(self, row: Row, index: int) -> bytes:
        """Key of a full block, from the row's own tokens."""
        size = self.block_tokens
        while len(row.keys) <= index:
            place = len(row.keys) * size
            parent = row.keys[-1] if row.keys else row.namespace
            row.keys.append(self.world.key_of(parent, tuple(row.tokens[place : place + size])))
        return row.keys[index]

    def scramble(self, block: int) -> None:
        """A copy into this block has begun: it holds neither the old nor the new."""
        self.world.garbage += 1
        self.contents[block] = [-1 - self.world.garbage] * self.block_tokens


class Touched:
    """Which blocks are touched by steps not yet booked, and by copies of which the engine has not heard the end."""

    def __init__(self, world: EngineWorld) -> None:
        self.world = world
        self.steps: deque[tuple[int, set[int], set[int]]] = deque()  # (step, reads, writes)
        self.loads: dict[int, str] = {}  # block -> the order that may write it
        self.saves: dict[int, set[str]] = {}  # block -> orders that may read it

    def begin_step(self, step: int, reads: set[int], writes: set[int]) -> None:
        """A step is given to the devices."""
        for block in sorted((reads | writes).intersection(self.loads)):
            how = "writes" if block in writes else "reads"
            self.world.violated("I8", f"step {step} {how} block {block}, into which {self.loads[block]} copies")
        for block in sorted(writes.intersection(self.saves)):
            orders = sorted(self.saves[block])
            self.world.violated("I5", f"step {step} writes block {block}, which {orders} copy down")
        self.steps.append((step, reads, writes))

    def end_step(self, step: int) -> None:
        """The leader has booked it."""
        if not self.steps or self.steps[0][0] != step:
            self.world.violated("I12", f"step {step} is booked out of order")
        self.steps.popleft()

    def begin_load(self, name: str, blocks: Iterable[int]) -> None:
        """An order to copy into these blocks; the copy waits for the steps given so far."""
        for block in blocks:
            if block in self.loads:
                self.world.violated("I8", f"{self.loads[block]} and {name} both copy into block {block}")
            if block in self.saves:
                self.world.violated(
                    "I5", f"{name} copies into block {block}, which {sorted(self.saves[block])} copy down"
                )
            self.loads[block] = name

    def end_load(self, name: str, blocks: Iterable[int]) -> None:
        """The engine has heard that the copy does not touch these blocks any more."""
        for block in blocks:
            if self.loads.get(block) == name:
                del self.loads[block]

    def begin_save(self, name: str, blocks: Iterable[int]) -> None:
        """An order to copy these blocks down, which nobody may be writing."""
        for block in blocks:
            for step, _, writes in self.steps:
                if block in writes:
                    self.world.violated("I5", f"{name} copies block {block} down, which step {step} writes")
            if block in self.loads:
                self.world.violated("I8", f"{name} copies block {block} down, into which another copies")
            self.saves.setdefault(block, set()).add(name)

    def end_save(self, name: str, blocks: Iterable[int]) -> None:
        """The engine has heard that the copy does not read these blocks any more."""
        for block in blocks:
            self.saves[block].discard(name)
            if not self.saves[block]:
                del self.saves[block]


class SimStep:
    """A batch in flight; `result` lets virtual time pass until its kernels have ended on the leader's rank."""

    def __init__(self, runner: SimRunner, work: Work) -> None:
        self.runner = runner
        self.work = work
        self.outcome: StepResult | None = None
        self.fails = False

    def result(self) -> StepResult:
        """See `PendingStep`."""
        world = self.runner.world
        world.run_until(lambda: self.outcome is not None)
        if self.fails:
            raise RuntimeError("injected: the device failed")
        world.touched.end_step(self.work.step)
        world.places.end_step(self.work.step, {} if self.outcome is None else self.outcome.lost)
        for device, end in zip(world.devices, self.ends, strict=True):
            device.booked_end = end
        if self.outcome is None:
            raise RuntimeError("the step never ended")
        return self.outcome

    ends: tuple[float, ...] = ()


class SimRunner:
    """Gives each batch to every rank. The ranks end it one after another; a slow one ends before the next step does."""

    num_in_flight = 1

    def __init__(self, world: EngineWorld, num_steps: int) -> None:
        self.world = world
        self.num_steps = num_steps  # those of engines before included
        self.in_flight: list[SimStep] = []

    def run(self, batch: Batch) -> SimStep:
        """See `Runner`."""
        world, rng = self.world, self.world.rng
        self.num_steps += 1
        bases = [
            (first_state(world.salted(entry.sequence.request.cache_salt)), entry.sequence.namespace)
            for entry in batch.entries
        ]
        work = Work.of(batch, bases)
        reads, writes = self._touched(work)
        world.places.begin_step(work, world.tables, writes)
        world.touched.begin_step(work.step, reads, writes)
        step = SimStep(self, work)
        step.fails = world.strikes("failed step", 150)
        begin = max([world.now, *(device.last_end for device in world.devices)])
        end = (
            begin
            + rng.uniform(0.001, 0.004)
            + len(work.token_ids) * rng.uniform(0.5, 1.0) * world.setup.token_us * 1e-6
        )
        ends = []
        for device in world.devices:
            late = rng.uniform(0, 0.006) if device.rank and world.strikes("late rank", 3) else 0.0
            device.last_end = end + late
            ends.append(device.last_end)
            world.at(device.last_end, self._ending(step, device))
        step.ends = tuple(ends)
        self.in_flight.append(step)
        return step

    def _ending(self, step: SimStep, device: SimDevice) -> object:
        def end() -> None:
            if step not in self.in_flight:
                return
            outcome = device.execute(step.work)
            if device.rank == 0:
                step.outcome = outcome
            if device is max(self.world.devices, key=lambda d: (step.ends[d.rank], d.rank)):
                self.in_flight.remove(step)

        return end

    def give_up(self) -> None:
        """The engine gave up what is in flight after a failure: the devices do not carry it out any more."""
        self.in_flight.clear()
        self.world.touched.steps.clear()
        self.world.places.give_up()
        for device in self.world.devices:
            device.last_end = device.booked_end = self.world.now
            device.rows.clear()

    def _touched(self, work: Work) -> tuple[set[int], set[int]]:
        """(blocks read, blocks written) by a batch; keeps the leader's tables while it is at it."""
        size = self.world.setup.block_tokens
        reads = {source for source, _ in (*work.copies, *work.demotions)}
        writes = {target for _, target in work.copies}
        tables = self.world.tables
        for state in work.new_rows:
            tables[state.row] = []
        for number, first, blocks in work.block_updates:
            tables[number][first : first + len(blocks)] = blocks
        for number, start, count in zip(work.rows, work.starts, work.counts, strict=True):
            table = tables[number]
            if len(table) * size < start + count:
                self.world.violated("I12", f"step {work.step} computes {start + count} tokens in {len(table)} blocks")
            reads.update(table[: -(-start // size)])
            writes.update(table[start // size : -(-(start + count) // size)])
        return reads, writes


def key_after(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of the block with these tokens."""
    return block_key(parent, tokens)
