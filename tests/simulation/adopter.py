"""A client that adopts, as the simulator sees it, and what the stores of other nodes hold.

It brings one part of each block: asks another node, compares what came with its checksum, copies it into a lent slot
and reports it under its writer's version. The functions that a mutant breaks are methods of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.memory import Memory, content
from tests.simulation.replica import CREDIT, RESEND_US, SLOT_BYTES
from tournant.kvstore.block import Part, Version
from tournant.kvstore.events import Attach, Attached, Refused, Reply, Report, Reported, ReportEntry

if TYPE_CHECKING:
    from tests.simulation.world import World

MAX_ELSEWHERE = 64  # blocks that other nodes hold


class Elsewhere:
    """What other nodes hold: blocks that their replicas wrote, and copies of what replicas here wrote. blocks: key and
    version -> context; every part of each.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.blocks: dict[tuple[bytes, Version], int] = {}
        self._counter = 0

    def written(self, key: bytes, context: int) -> None:
        """A replica of another node has written a block."""
        self._counter += 1
        self._add(key, Version(1 << 63 | self._counter % 3, self._counter), context)

    def copied(self, key: bytes, version: Version, context: int) -> None:
        """Another node has adopted a block that was accepted here."""
        self._add(key, version, context)

    def _add(self, key: bytes, version: Version, context: int) -> None:
        self.blocks[key, version] = context
        for part in range(len(self.world.parts)):
            value = content(context, (version.writer_id, version.counter), part)
            self.world.meant[value] = (context, version, part)
            self.world.written_somewhere(key, version, part)
        if len(self.blocks) > MAX_ELSEWHERE:
            del self.blocks[next(iter(self.blocks))]


class Adopter:
    """One process, for one part. client, lent, memory: as of a `Rank`."""

    def __init__(self, world: World, number: int, part: Part) -> None:
        self.world = world
        self.number = number
        self.part = part
        self.alive = True
        self.paused_until = 0
        self.client = 0
        self.memory: Memory | None = None
        self.lent: list[tuple[int, int]] = []
        self.num_coming = 0  # slots that a block is on its way to
        self.done: list[ReportEntry] = []
        self.seq = 0
        self.unanswered: Report | None = None
        self.attach()

    def attach(self) -> None:
        """Connect and attach, if the store is up; else later."""
        world = self.world
        if self.client:
            return
        if not world.store_up:
            world.later(20_000, self.attach)
            return
        self.client = world.connect(self)
        self.lent, self.done, self.seq, self.unanswered = [], [], 0, None
        self.num_coming = 0
        weights = bytes([world.replicas[0].weights]) * 32
        world.to_store(
            self,
            Attach(self.client, weights, "fp32", b"check", 0, self.part, (self.part,), SLOT_BYTES, CREDIT, adopts=True),
        )

    def lost_connection(self) -> None:
        """The store closed the connection, died, or no engine of these weights was there: attach again."""
        self.client, self.memory = 0, None
        self.world.later(self.world.rng.randrange(1000, 30_000), self.attach)

    def on_reply(self, reply: Reply) -> None:
        """A message of the store."""
        match reply:
            case Attached(_, lent):
                self.memory = self.world.memory
                self.lent += lent
            case Reported(seq, lent, refused) if self.unanswered is not None and seq == self.unanswered.seq:
                entries, self.unanswered = self.unanswered.entries, None
                self.lent += lent
                self.lent += [(entries[i].page, entries[i].generation) for i in refused]
                self.world.count("adopted" if len(refused) < len(entries) else "adopted nothing")
                if self.done:
                    self.flush()
            case Refused():
                self.world.count("adopter refused")
            case _:
                pass

    def bring(self) -> None:
        """Ask another node for a block; it comes after a while, whole or not."""
        blocks = list(self.world.elsewhere.blocks.items())
        self.flush()
        if not blocks or not self.lent or self.memory is None:
            return
        (key, version), context = self.world.rng.choice(blocks)
        page, generation = self.lent.pop(0)
        memory, client = self.memory, self.client
        if not self.world.may_write(self, memory, page, generation):
            return
        memory.scramble(page)
        self.num_coming += 1
        self.world.later(
            self.world.rng.randrange(10, 5000),
            lambda: self._came(key, version, context, (page, generation), memory, client),
            rank=self,
        )

    def _came(
        self, key: bytes, version: Version, context: int, place: tuple[int, int], memory: Memory, client: int
    ) -> None:
        if not self.world.may_write(self, memory, *place):
            return
        told = came = content(context, (version.writer_id, version.counter), self.number)
        if self.world.strikes("corrupt transfer", 4):
            came ^= 1 << 9
        memory.contents[place[0]] = came
        if client != self.client:
            return
        self.num_coming -= 1
        checksum = self.checked(told, came)
        if checksum is None:
            self.lent.append(place)
            return
        self.done.append(ReportEntry(key, self.version_of(version), *place, SLOT_BYTES, checksum))
        self.flush()

    def checked(self, told: int, came: int) -> int | None:
        """The checksum to report, None when the bytes that came do not have it."""
        return told if told == came else None

    def version_of(self, version: Version) -> Version:
        """The version to report: the writer's."""
        return version

    def flush(self) -> None:
        """One report at a time, the same one again until it is answered; also without a block while slots lack."""
        has_all = len(self.lent) + self.num_coming >= CREDIT
        if self.unanswered is None and self.client and self.memory is not None and (self.done or not has_all):
            self.seq += 1
            self.unanswered = Report(self.client, self.seq, tuple(self.done))
            self.done = []
            self._send(self.unanswered)

    def _send(self, report: Report) -> None:
        if self.unanswered is report and self.client == report.client:
            self.world.to_store(self, report)
            self.world.later(RESEND_US, lambda: self._send(report), rank=self)
