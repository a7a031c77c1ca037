"""Slots of the host pool: which are free, lent, loading, visible, draining or quarantined.

Owns the states and generations of slots and the cutting of the pool into chunks of one slot size each. Does not own
the bytes, and does not know what a block is: a slot's `user` is whatever its holder wants to find again.

Invariants:
 1. A slot is named by its first page in the pool; slots never overlap.
 2. The generation of a page only grows. It grows exactly when a slot of that page becomes FREE; whoever remembers an
    older one learns that the slot is no longer what it was.
 3. free + lent + loading + visible + draining + quarantined = all slots of all cut chunks (I6); `validate` recounts.
 4. A chunk goes back, to be cut anew, only while all its slots are FREE.
 5. No slot of a chunk that is being emptied, for a size that has none, is taken; no size loses its only chunk so.
"""

from __future__ import annotations

from enum import IntEnum

from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.errors import InvariantViolation


class SlotState(IntEnum):
    """STORE.md section 5."""

    FREE = 0
    LENT = 1
    LOADING = 2
    VISIBLE = 3
    DRAINING = 4
    QUARANTINED = 5


class Slot:
    """A place of one part. page: first page in the pool; pages: its size; user: client id while LENT, else the copy."""

    __slots__ = ("chunk", "generation", "page", "pages", "state", "user")

    def __init__(self, page: int, pages: int, generation: int, chunk: Chunk) -> None:
        self.page = page
        self.pages = pages
        self.generation = generation
        self.state = SlotState.FREE
        self.user: object = None
        self.chunk = chunk


class Chunk:
    """A stretch of the pool, cut into slots of one size. index: its place; free: slots of it that are FREE."""

    __slots__ = ("free", "index", "pages", "slots")

    def __init__(self, index: int, pages: int) -> None:
        self.index = index
        self.pages = pages
        self.slots: list[Slot] = []
        self.free = 0


class SlotPool:
    """All slots of one pool of `host_bytes`. Pure bookkeeping; `bumped` collects generations that readers must see.

    The last chunk is shorter than the others when `host_bytes` is no multiple of `chunk_bytes`.
    """

    def __init__(self, host_bytes: int, chunk_bytes: int) -> None:
        self.chunk_pages = min(chunk_bytes, host_bytes) // PAGE_BYTES
        self.num_pages = host_bytes // PAGE_BYTES
        starts = range(0, self.num_pages, self.chunk_pages)
        self._sizes = [min(self.chunk_pages, self.num_pages - start) for start in starts]
        self._uncut = [Chunk(index, size) for index, size in reversed(list(enumerate(self._sizes)))]
        self._cut: dict[int, list[Chunk]] = {}  # slot size in pages -> chunks cut to it
        self._free: dict[int, list[Slot]] = {}  # slot size in pages -> free slots, the last is taken first
        self._by_page: dict[int, Slot] = {}
        self._generations: dict[int, int] = {}  # of pages of slots that are no longer cut
        self._ordered: list[Slot] = []
        self._emptying: Chunk | None = None
        self._emptied_for = 0  # pages
        self.pages = [0] * len(SlotState)  # pages per state
        self.bumped: list[tuple[int, int]] = []

    def slots_for(self, pages: int) -> int:
        """How many slots of this size the whole pool would hold."""
        return sum(size // pages for size in self._sizes)

    def chunks_for(self, pages: int) -> int:
        """How many chunks are large enough for a slot of this size."""
        return sum(size >= pages for size in self._sizes)

    def has_way_to(self, pages: int) -> bool:
        """Whether a chunk has slots of this size, or can have them while all slots that are lent stay lent."""
        if self._cut.get(pages) or self._can_cut_new(pages):
            return True
        others = self.chunks_of_other_sizes(pages)
        return any(all(slot.state is not SlotState.LENT for slot in chunk.slots) for chunk in others)

    def find(self, page: int, generation: int) -> Slot | None:
        """The slot of this name, or None when it is another generation by now."""
        slot = self._by_page.get(page)
        return slot if slot is not None and slot.generation == generation else None

    def take(self, pages: int, state: SlotState, user: object) -> Slot | None:
        """A FREE slot in its new state, or None when there is none of this size and no chunk to cut."""
        free = self._free.get(pages)
        if not free:
            if pages > self.chunk_pages or not self._cut_chunk(pages):
                return None
            free = self._free[pages]
        slot = free.pop()
        slot.chunk.free -= 1
        slot.user = user
        self.pages[SlotState.FREE] -= pages
        self.pages[state] += pages
        slot.state = state
        return slot

    def move(self, slot: Slot, state: SlotState, user: object) -> None:
        """A new state other than FREE; the generation stays."""
        self.pages[slot.state] -= slot.pages
        self.pages[state] += slot.pages
        slot.state = state
        slot.user = user

    def free(self, slot: Slot) -> None:
        """The slot is FREE under the next generation, which goes to `bumped`."""
        if slot.state is SlotState.FREE:
            raise InvariantViolation(f"slot {slot.page} is freed twice")
        slot.generation += 1
        self.bumped.append((slot.page, slot.generation))
        self.pages[slot.state] -= slot.pages
        self.pages[SlotState.FREE] += slot.pages
        slot.state = SlotState.FREE
        slot.user = None
        slot.chunk.free += 1
        if slot.chunk is not self._emptying:
            self._free[slot.pages].append(slot)

    # ---- chunks for another size

    def empty_a_chunk_for(self, pages: int) -> None:
        """Let no more slots of some chunk be taken, so that this size, which has no chunk, gets it when all that is in
        it has left. The one with the fewest lent slots is chosen.
        """
        if self._emptying is not None or self._cut.get(pages):
            return
        spare = [c for c in self.chunks_of_other_sizes(pages) if len(self._cut[c.slots[0].pages]) > 1]
        if spare:
            chunk = min(spare, key=lambda c: (sum(slot.state is SlotState.LENT for slot in c.slots), c.index))
            self._emptying, self._emptied_for = chunk, pages
            self._drop_free_slots(chunk)

    def is_emptying(self, chunk: Chunk) -> bool:
        """Whether no slot of it is taken."""
        return chunk is self._emptying

    def empty_no_chunk_for(self, pages: int) -> None:
        """Nobody needs slots of this size any more: a chunk that was being emptied for them stays what it is."""
        chunk = self._emptying
        if chunk is not None and pages == self._emptied_for:
            self._emptying = None
            self._free[chunk.slots[0].pages] += [slot for slot in chunk.slots if slot.state is SlotState.FREE]

    def _drop_free_slots(self, chunk: Chunk) -> None:
        size = chunk.slots[0].pages
        self._free[size] = [slot for slot in self._free[size] if slot.chunk is not chunk]

    def chunks_of_other_sizes(self, pages: int) -> list[Chunk]:
        """Chunks that are cut to another size and large enough for this one, those with the most free slots first."""
        chunks = [c for size, cut in self._cut.items() if size != pages for c in cut if c.pages >= pages]
        return sorted(chunks, key=lambda chunk: (-chunk.free * chunk.slots[0].pages, chunk.index))

    def _cut_chunk(self, pages: int) -> bool:
        new = self._can_cut_new(pages)
        if not new and len(self._cut) == (pages in self._cut):  # usual: one slot size, all chunks in use
            return False
        chunk = self._uncut.pop() if new else self._returned(pages)
        if chunk is None:
            return False
        first = chunk.index * self.chunk_pages
        for page in range(first, first + chunk.pages // pages * pages, pages):
            slot = Slot(page, pages, self._generations.pop(page, 1), chunk)
            chunk.slots.append(slot)
            self._by_page[page] = slot
        self._ordered = []
        chunk.free = len(chunk.slots)
        self._cut.setdefault(pages, []).append(chunk)
        self._free.setdefault(pages, []).extend(reversed(chunk.slots))
        self.pages[SlotState.FREE] += pages * len(chunk.slots)
        self.empty_no_chunk_for(pages)
        return True

    def _can_cut_new(self, pages: int) -> bool:
        return bool(self._uncut) and self._uncut[-1].pages >= pages  # the short one is the last to be taken

    def _returned(self, pages: int) -> Chunk | None:
        """A chunk of another size whose slots are all FREE, taken apart."""
        chunk = next((c for c in self.chunks_of_other_sizes(pages) if c.free == len(c.slots)), None)
        if chunk is None:
            return None
        size = chunk.slots[0].pages
        self._drop_free_slots(chunk)
        self._cut[size].remove(chunk)
        if chunk is self._emptying:
            self._emptying = None
        for slot in chunk.slots:
            del self._by_page[slot.page]
            self._generations[slot.page] = slot.generation + 1  # nobody may take a new slot for an old one
            self.bumped.append((slot.page, slot.generation + 1))
        self.pages[SlotState.FREE] -= size * len(chunk.slots)
        chunk.slots = []
        chunk.free = 0
        return chunk

    def all_slots(self) -> list[Slot]:
        """Every cut slot, in order of pages."""
        if len(self._ordered) != len(self._by_page):
            self._ordered = [self._by_page[page] for page in sorted(self._by_page)]
        return self._ordered

    def validate(self) -> None:
        """Recount from scratch. Raises InvariantViolation."""
        pages = [0] * len(SlotState)
        end = 0
        for slot in self.all_slots():
            if slot.page < end:
                raise InvariantViolation(f"I6: slot {slot.page} begins inside the slot before it, which ends at {end}")
            end = slot.page + slot.pages
            pages[slot.state] += slot.pages
        if end > self.num_pages:
            raise InvariantViolation(f"I6: a slot ends at page {end} of {self.num_pages}")
        if pages != self.pages:
            raise InvariantViolation(f"I6: pages per state are {self.pages}; a recount gives {pages}")
        for size, free in self._free.items():
            listed = {slot.page for slot in free if slot.state is SlotState.FREE and slot.chunk is not self._emptying}
            count = 0
            for chunk in self._cut.get(size, ()):
                of_chunk = len([slot for slot in chunk.slots if slot.state is SlotState.FREE])
                if chunk.free != of_chunk:
                    raise InvariantViolation(f"I6: chunk {chunk.index} counts {chunk.free} free slots of {of_chunk}")
                count += of_chunk if chunk is not self._emptying else 0
            if len(free) != count or len(listed) != count:
                raise InvariantViolation(f"I6: the free list of {size} pages is not the set of free slots")
