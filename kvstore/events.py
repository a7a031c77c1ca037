"""What goes into the node store core and what comes out: messages of clients, replies, instructions.

All are plain frozen values of ints, bytes and tuples. `client` is a number that the shell gives each connection and
never uses again. Lists are runs of blocks, never one message per block. Disk instructions and events: disk_events.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from tournant.kvstore.block import Part, Version

# ---- from clients


@dataclass(frozen=True, slots=True)
class Attach:
    """A rank or reader wants service.

    weights_id: digest of its weights; kv_form: numeric form of its KV, one for all clients of the same weights;
    tenant_check: HMAC of a check word under the tenant secret; writer_id: of its group of ranks, new at every forming;
    part: what it stores of each block, None for a reader; local_parts: the parts that ranks of its group on this node
    store, its own among them; slot_bytes: size of one part; credit: slots it wants lent at any time; adopts: it writes
    nothing of its own, but copies of what other nodes hold, and reports them under the versions of their writers, after
    it has compared their bytes with their checksums.
    """

    client: int
    weights_id: bytes
    kv_form: str
    tenant_check: bytes
    writer_id: int
    part: Part | None
    local_parts: tuple[Part, ...]
    slot_bytes: int
    credit: int
    adopts: bool = False


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """One part that a rank has copied, whole, into a slot lent to it.

    length: bytes; checksum: XXH3-64 of them; cost_us: time to compute the block again; kind: see policies; depth: place
    in its chain, the first block is 0.
    """

    key: bytes
    version: Version
    page: int
    generation: int
    length: int
    checksum: int
    cost_us: int = 0
    kind: int = 0
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """The one message of a rank per step. seq: 1, 2, 3, ...; the same seq again gets the same reply again.

    released: lent (page, generation) that the rank gives back unused.
    """

    client: int
    seq: int
    entries: tuple[ReportEntry, ...]
    released: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Open:
    """What is there of a chain? Pins it softly. read: counter of the client, every read a higher one; the same again
    gets the same reply again.
    """

    client: int
    read: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """The leader's choice for the first keys of an open read: one version each. Other pins end; what lies on NVMe is
    brought into host slots; the reply comes when all is there, something failed or the deadline has passed.
    """

    client: int
    read: int
    picks: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Used:
    """A request with this chain has ended, or gets no further: its blocks, head first, count as used now.

    Blocks are reported one step after another; without this the head of a chain, reported first, would leave first.
    """

    client: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CloseRead:
    """The read is over, all its copies have ended."""

    client: int
    read: int


@dataclass(frozen=True, slots=True)
class Bad:
    """The bytes under a handle are not what its checksum says."""

    client: int
    key: bytes
    version: Version
    page: int
    generation: int


@dataclass(frozen=True, slots=True)
class Forget:
    """A leader found this version incomplete across nodes."""

    client: int
    key: bytes
    version: Version


@dataclass(frozen=True, slots=True)
class HardPin:
    """Kernels of this rank will read the host slots of these blocks in place, until HardUnpin or exit. All or none.

    request: number that the reply repeats; the same number again gets the same answer again.
    """

    client: int
    request: int
    refs: tuple[tuple[bytes, Version], ...]


@dataclass(frozen=True, slots=True)
class HardUnpin:
    """The kernels that read in place under this HardPin have ended."""

    client: int
    request: int


@dataclass(frozen=True, slots=True)
class Detach:
    """The last message of a client: its process has unmapped the pool. To the core this is a `ClientExited`."""

    client: int


@dataclass(frozen=True, slots=True)
class ClientClosed:
    """The connection ended or broke the protocol: no more service. Lent slots and hard pins stay until the exit."""

    client: int


@dataclass(frozen=True, slots=True)
class ClientExited:
    """Its pidfd says that the process is gone, or it said `Detach`: nothing of it can write or read any more."""

    client: int


@dataclass(frozen=True, slots=True)
class AdoptEntry:
    """A part whose bytes the shell has, whole and verified, under the version that their writer gave them."""

    key: bytes
    version: Version
    part: Part
    weights_id: bytes
    kv_form: str
    length: int
    checksum: int
    cost_us: int = 0
    kind: int = 0
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Adopt:
    """Parts that came from elsewhere, in the order in which they are to be stored. One that is here already counts as
    used. The bytes go where Fill says before anything else happens.
    """

    entries: tuple[AdoptEntry, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. At least every 100 ms, so that deadlines are kept."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Shut down in order: no new clients, dirty blocks go to NVMe, then a checkpoint, then Drained."""


# ---- to clients


@dataclass(frozen=True, slots=True)
class Attached:
    """Service begins. incarnation: of this store; lent: (page, generation) pairs"""

    incarnation: int
    lent: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was changed; the message says why and what to do."""

    message: str


@dataclass(frozen=True, slots=True)
class Reported:
    """lent: newly lent (page, generation) pairs; refused: indexes, in the report, of entries that changed nothing (a
    slot that was lent to the client still is).
    """

    seq: int
    lent: tuple[tuple[int, int], ...]
    refused: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """What there is of a chain, up to the first key without any complete version.

    counts: one byte per key, the number of `groups.ROW`s of it in `rows`, in order; parts: what part numbers mean.
    """

    read: int
    counts: bytes
    rows: bytes
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The picked blocks that are in host slots now, a prefix of the picks; as in Opened."""

    read: int
    counts: bytes
    rows: bytes
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class HardPinned:
    """pinned: whether the blocks stay where `rows` says until unpinned."""

    request: int
    pinned: bool
    counts: bytes
    rows: bytes
    parts: tuple[Part, ...]


ClientMessage = Attach | Report | Open | Fetch | Used | CloseRead | Bad | Forget | HardPin | HardUnpin
Reply = Attached | Refused | Reported | Opened | Fetched | HardPinned


# ---- instructions to the shell, to be carried out in order


@dataclass(frozen=True, slots=True)
class SetGenerations:
    """Write these (page, generation) pairs into the table that clients map, before anything that follows."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """Copy the bytes of adopted parts into slots: (index into Adopt.entries, page). A page that comes twice holds the
    later one in the end: the earlier was evicted to make room.
    """

    targets: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Send:
    """A reply to a client."""

    client: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End a client's connection; ClientClosed is not needed any more, ClientExited is."""

    client: int
    reason: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Check the checksum of a host slot and answer with Verified; the slot is held until then."""

    io: int
    page: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class GaveWay:
    """Blocks of a client's weights in other numeric forms, `old_forms`, were dropped for its own: records and slots."""

    kv_form: str
    old_forms: tuple[str, ...]
    records: int


@dataclass(frozen=True, slots=True)
class Drained:
    """All that a Drain asked for is done, or the disk does not take it."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Event: the bytes of a slot were checked."""

    io: int
    good: bool
