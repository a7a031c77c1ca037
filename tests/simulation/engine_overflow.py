"""Places below the device for sequences larger than it, in the engine's simulator: who may read and write them, when.

`Places` is the leader's record, kept when steps are given to the devices, in their order. What lies where on each rank
is the devices' (engine_device.py). Ids as of workers/overflow_blocks.py: num_blocks + place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.engine_device import Work
    from tests.simulation.engine_world import EngineWorld


class Places:
    """I16: a step reads a place below only while it holds what was put there for the table that names it, and a table
    gets no place that was said to be lost. I17: a step writes no place, and no block of another table. I18: a block
    leaves a table for a place only when no step in flight writes it; devices check that it is whole and arrives.
    """

    def __init__(self, world: EngineWorld, num_blocks: int) -> None:
        self.world = world
        self.num_blocks = num_blocks
        self.puts: dict[int, int] = {}  # how often something was put to each id; no entry: nothing that counts
        self.told_lost: set[int] = set()
        self._tables: dict[int, list[int]] = {}  # by row, the number of the put that an entry means; 0 on the device
        self._numbers = 0
        self._begun: dict[int, int] = {}  # by step in flight, the number of puts until then

    def begin_step(self, work: Work, tables: dict[int, list[int]], writes: set[int]) -> None:
        """A step is given to the devices. tables: as it sees them, by row."""
        self._put(work, writes)
        started = {state.row for state in work.new_rows}
        for row in started:
            self._tables[row] = []
        for row, first, blocks in work.block_updates:
            known = self._tables[row]
            known[first : first + len(blocks)] = [self._named(work, row, block) for block in blocks]
            self._count(work, blocks, is_start=row in started and not first)
        size = self.world.setup.block_tokens
        for row, start in zip(work.rows, work.starts, strict=True):
            below = 0
            for index, block in enumerate(tables[row][: -(-start // size)]):
                if block >= self.num_blocks:
                    below += 1
                    self._read(work, row, index, block)
            self.world.count("steps below", int(below > 0))
        self._begun[work.step] = self._numbers
        self._check_writes(work, writes)

    def _put(self, work: Work, written: set[int]) -> None:
        for source, target in work.demotions:
            if source >= self.num_blocks or target < self.num_blocks:
                self.world.violated("I17", f"step {work.step} puts block {source} to {target}: not from above to below")
            for step, _, writes in self.world.touched.steps:
                if source in writes:
                    self.world.violated("I18", f"step {work.step} puts block {source} below, which step {step} writes")
            self._numbers += 1
            self.puts[target] = self._numbers
            self.told_lost.discard(target)
            self.world.count("written anew" if source in written else "beyond the window")
        for pair in work.copies:
            if max(pair) >= self.num_blocks:
                self.world.violated("I17", f"step {work.step} copies {pair}, which is not all on the device")

    def _count(self, work: Work, blocks: tuple[int, ...], *, is_start: bool) -> None:
        """For I15: how places come into tables."""
        below = [block for block in blocks if block >= self.num_blocks]
        self.world.count("began with places", int(is_start and bool(below)))
        fresh = {target for _, target in work.demotions}
        self.world.count("was there already", sum(not is_start and block not in fresh for block in below))

    def _named(self, work: Work, row: int, block: int) -> int:
        """What a table entry means from now on."""
        if block < self.num_blocks:
            return 0
        if block not in self.puts:
            self.world.violated("I16", f"step {work.step} names place {block} in row {row}, where nothing was put")
        if block in self.told_lost and not self._others_with(block, row):
            self.world.violated("I16", f"step {work.step} names place {block} in row {row}, which was said to be lost")
        return self.puts[block]

    def _read(self, work: Work, row: int, index: int, block: int) -> None:
        if self.puts.get(block) != self._tables[row][index]:
            self.world.violated(
                "I16", f"step {work.step} reads place {block}, entry {index} of row {row}, which is another's by now"
            )

    def _others_with(self, block: int, row: int) -> list[int]:
        """Rows of other sequences whose tables list a block."""
        scheduler = self.world.engine.scheduler
        holding = [*scheduler.running, *scheduler.restoring, *scheduler._draining]
        return [one.row for one in holding if one.row != row and block in one.block_table]

    def _check_writes(self, work: Work, writes: set[int]) -> None:
        size = self.world.setup.block_tokens
        for block in writes:
            if block >= self.num_blocks:
                self.world.violated("I17", f"step {work.step} writes place {block}")
        for row, start, count in zip(work.rows, work.starts, work.counts, strict=True):
            table = self.world.tables[row]
            for block in table[start // size : -(-(start + count) // size)]:
                if others := self._others_with(block, row):
                    self.world.violated(
                        "I17", f"step {work.step} writes block {block} of row {row}, which rows {others} list as well"
                    )

    def end_step(self, step: int, lost: dict[int, frozenset[int]]) -> None:
        """The leader books a step that could not read these ids; some may have been given to others since."""
        begun = self._begun.pop(step)
        for ids in lost.values():
            self.told_lost.update(block for block in ids if self.puts[block] <= begun)

    def give_up(self) -> None:
        """What steps in flight were to put below may not be there."""
        self.puts.clear()
        self.told_lost.clear()
        self._begun.clear()
