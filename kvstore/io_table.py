"""Instructions to the disk that are in flight: their numbers, what they hold, and which are late.

Invariants:
 1. A number names one instruction and is never used again by this store.
 2. A late I/O stays in the table until it has ended: what it reads or writes is held that long.
"""

from __future__ import annotations

from tournant.kvstore.disk_events import DiskInstruction
from tournant.kvstore.events import Verify
from tournant.kvstore.groups import Copy, Place
from tournant.kvstore.slots import Slot


class Io:
    """kind: class of the instruction; copies, slots, places: what it reads or writes; segment, offset, reserved: of a
    write, bytes; late: past its deadline.
    """

    __slots__ = ("copies", "deadline_us", "kind", "late", "offset", "places", "reserved", "segment", "slots")

    def __init__(self, kind: type, deadline_us: int, segment: int = 0, copies: list[Copy] | None = None) -> None:
        self.kind = kind
        self.deadline_us = deadline_us
        self.segment = segment
        self.copies = copies or []
        self.offset = 0
        self.reserved = 0
        self.late = False
        self.places: list[Place] = []
        self.slots: list[Slot] = []


class IoTable:
    """All of them, oldest first. out, checks: instructions that the shell has not got yet."""

    def __init__(self, io_us: int) -> None:
        self._io_us = io_us
        self._next = 1
        self.flying: dict[int, Io] = {}
        self.num_late = 0
        self.out: list[DiskInstruction] = []
        self.checks: list[Verify] = []

    @property
    def stalled(self) -> bool:
        """An I/O is past its deadline: nothing new is asked of the disk."""
        return self.num_late > 0

    def start(self, kind: type, now_us: int, segment: int = 0, copies: list[Copy] | None = None) -> tuple[int, Io]:
        """A number and an entry for a new instruction."""
        number = self._next
        self._next += 1
        io = self.flying[number] = Io(kind, now_us + self._io_us, segment, copies)
        return number, io

    def end(self, number: int) -> Io:
        """The instruction has ended, well or not."""
        io = self.flying.pop(number)
        self.num_late -= io.late
        return io

    def newly_late(self, now_us: int) -> list[Io]:
        """Those whose deadline has passed since the last call."""
        late = []
        for io in self.flying.values():
            if io.deadline_us > now_us:
                break  # they are in order of their deadlines
            if not io.late:
                io.late = True
                self.num_late += 1
                late.append(io)
        return late
