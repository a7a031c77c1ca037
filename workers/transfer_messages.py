"""What passes between an engine and its link to the node store: orders down, events up. Plain values only.

Owns the words of that border; who decides is tiering.py's business, who carries out is store_link.py's. Orders are
numbered by the engine: a number is never used twice, also not after the store was lost.

Blocks are of one kind, or of two that differ in the bytes of their images: 0, the first ones of every chain, which stay
as they are, and 1, the later ones, which are coded. Credit is counted per kind: a slot fits one alone.

Guarantees of the link, whatever the store does:
 1. Every `Lookup` is answered by `Found` and ends with exactly one `ReadEnded`; after that the link touches no device
    block of it. `EndRead` makes that happen soon, whatever the read waits for.
 2. Every `Save` and `Stash` yields exactly one `Copied` (from then on the link does not read its device blocks any
    more) and then exactly one `Saved` or `Stashed`.
 3. When the store is lost, whatever is open ends as above, then `Detached` comes. A later `Attached` begins anew: what
    was saved before counts for nothing, and stashes are gone.
 4. Device blocks are only touched by copies of memory, which never wait for a store, a disk or a message.

In a group of ranks every rank has a link of its own, which keeps the same promises; group_merge.py makes one of them.
What only such links use: `Bring`, `Brought`, `Found.versions`, `Fetch.picks`, `Leave`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tournant.kvstore.block import Version

HOST, NVME, REMOTE = 1, 2, 3  # tiers in `Found`; REMOTE: only another node has it
NUM_KINDS = 2  # of blocks, at most
Shown = tuple[int, int, int]  # writer id, counter, tier


def writer_of(writer_id: int, kind: int) -> int:
    """Writer id of an engine's blocks of a kind: to the store each slot size of an engine is a writer of its own."""
    return writer_id ^ kind << 63


# ---- orders


@dataclass(frozen=True, slots=True)
class Lookup:
    """What lies below of this chain? The answer is pinned softly until the read ends (or the store's limit)."""

    read: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the first `count` found blocks into host slots, those of another node first into the store here; pins of
    the others end. Answered by `Fetched`.

    picks: in a group of ranks, the version of each of them that all ranks have and no other one is read; else empty.
    """

    read: int
    count: int
    picks: tuple[Version, ...] = ()


@dataclass(frozen=True, slots=True)
class Bring:
    """A rank gets what its store lacks of the first `count` found blocks from the other node that it has found them at,
    as far as that goes in time, and looks again. Answered by `Brought`. Before `Fetch`, once per read.
    """

    read: int
    count: int


@dataclass(frozen=True, slots=True)
class Load:
    """Copy found blocks number `skip`, `skip` + 1, ... into these device blocks. After `Fetch`; once per read.

    Ends the read, by `ReadEnded`; `Loaded` may tell of progress before.
    """

    read: int
    skip: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndRead:
    """Nothing more of a read is wanted. Unknown and ended reads are ignored."""

    read: int


@dataclass(frozen=True, slots=True)
class SaveEntry:
    """A sealed device block to be published. cost_us: to compute it again; depth: place in its chain."""

    block: int
    key: bytes
    version: Version
    cost_us: int
    depth: int


@dataclass(frozen=True, slots=True)
class Save:
    """Copy blocks of one kind into lent slots and report them as soon as they are copied; copiers: threads for that.

    There is credit of this kind for all entries; their versions are those of its writer (`writer_of`).
    """

    save: int
    entries: tuple[SaveEntry, ...]
    copiers: int = 1
    kind: int = 0


@dataclass(frozen=True, slots=True)
class Used:
    """A request with this chain has ended: its blocks, head first, count as used now."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Stash:
    """Copy a block that is still growing into a lent slot and keep it there, unreported. Takes one of the credit of
    kind 0.
    """

    stash: int
    block: int


@dataclass(frozen=True, slots=True)
class Unstash:
    """Copy a stash back into a device block. Answered by `Unstashed`; the stash is gone then."""

    stash: int
    block: int


@dataclass(frozen=True, slots=True)
class DropStash:
    """A stash is not wanted any more; its slot goes back. Unknown ones are ignored."""

    stash: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A rank has lost its store: whatever is open with this one's ends as if it were lost, too; then the link attaches
    anew. Nothing while none is attached.
    """


Order = Lookup | Bring | Fetch | Load | EndRead | Save | Used | Stash | Unstash | DropStash | Leave

# ---- events


@dataclass(frozen=True, slots=True)
class Attached:
    """The store serves. credit: lent slots of each kind that there is; slot_bytes: of the largest image; host_bytes: of
    the whole pool.
    """

    incarnation: int
    credit: tuple[int, ...]
    slot_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Detached:
    """The store is lost; the link tries to attach again by itself."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A store is there, but does not serve this engine, in its own words; the link tries again by itself, ever less
    often. lasting: it has said so twice, with no client attached, so that waiting changes nothing.
    """

    reason: str
    lasting: bool


@dataclass(frozen=True, slots=True)
class Found:
    """tiers: one byte, HOST or NVME, per leading key that the store has, and REMOTE for each key behind them that
    another node is known to have; seconds: since the order; versions: in a group of ranks, what this one has of each of
    the former keys, the newest first, as (writer id, counter, tier).
    """

    read: int
    tiers: bytes
    seconds: float
    versions: tuple[tuple[Shown, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Brought:
    """As far as a rank was to get blocks, it has; versions: what it has now of each key, as in `Found`."""

    read: int
    versions: tuple[tuple[Shown, ...], ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The first `count` found blocks are in host slots, pinned; fewer than asked for when some were lost or late.

    num_bytes: read from NVMe; seconds: since the order, queue included; remote_blocks, remote_bytes: that came from
    another node before; remote_seconds: of `seconds`, what that took; remote_failed: it gave less than it was to.
    """

    read: int
    count: int
    num_bytes: int
    seconds: float
    remote_blocks: int = 0
    remote_bytes: int = 0
    remote_seconds: float = 0.0
    remote_failed: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first `count` blocks of the load are copied and verified: computing may read them."""

    read: int
    count: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The first `count` blocks of the load are good, 0 without one. num_bytes, seconds: of the copies, queue included;
    corrupt: blocks whose bytes were wrong.
    """

    read: int
    count: int
    num_bytes: int = 0
    seconds: float = 0.0
    corrupt: int = 0


@dataclass(frozen=True, slots=True)
class Copied:
    """The device blocks of a save or stash are not read any more. seconds: in the copies, queue included."""

    number: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    """The store answered a save. refused: indexes of entries it did not take, or that could not be copied; num_lent:
    slots of its kind lent anew, theirs included. `ok` is False when the store was lost: nothing of it counts as saved.
    """

    save: int
    ok: bool
    refused: tuple[int, ...]
    num_lent: int


@dataclass(frozen=True, slots=True)
class Stashed:
    """Whether a stash is kept; num_lent: slots lent anew."""

    stash: int
    ok: bool
    num_lent: int = 0


@dataclass(frozen=True, slots=True)
class Unstashed:
    """Whether the device block holds the stashed bytes now; num_lent: slots lent anew."""

    stash: int
    ok: bool
    num_lent: int = 0


@dataclass(frozen=True, slots=True)
class Lent:
    """Slots lent anew beside the answers above (a dropped stash)."""

    num_lent: int
    kind: int = 0


Event = (
    Attached | Detached | Refused | Found | Brought | Fetched | Loaded | ReadEnded
    | Copied | Saved | Stashed | Unstashed | Lent
)  # fmt: skip


class Link(Protocol):
    """The way to the node store, in a thread of its own; see the module for what it guarantees."""

    def submit(self, orders: Sequence[Order]) -> None:
        """Hand orders over, in order. Never waits, never raises for what the store does."""

    def take_events(self) -> list[Event]:
        """What has happened since the last call, in order. Never waits."""

    def close(self, flush_s: float) -> None:
        """Carry out what was submitted for at most that long, then end; afterwards no device block is touched, unless
        by a copy that hangs, which is not waited for.
        """


class BlockImages(Protocol):
    """Bytes of device blocks in the form in which they lie in slots. Both directions may go on at once, and several
    threads may save at once; one loads.

    slot_bytes: of the largest image.
    """

    @property
    def slot_bytes(self) -> int: ...

    def image_bytes(self, depth: int) -> int:
        """Bytes of the image of a block at a place of its chain: the same for all, or fewer from some place on."""

    def save(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        """Write the images of device blocks into slots, complete when it returns; the length of a slot names its form.

        Raises RuntimeError when the device failed.
        """

    def load(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        """Inverse of `save`, after all computing given to the device so far."""
