"""A trace through the real node store core, with the payloads left out: every block is one page that nobody fills.

`CoreCache` is a `Cache` for trace_replay.hit_ratio: the hits are what the core says is there; then all blocks of the
request are adopted at once, tail first, which for a block that is there already means that it was used.
"""

from __future__ import annotations

from collections.abc import Sequence

from tournant.kvstore.block import KEY_BYTES, Part, Version
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.events import Adopt, AdoptEntry, Attach
from tournant.kvstore.node_store import NodeStore

_WHOLE = Part(0, 1, 0, 1)
_WEIGHTS = b"w" * KEY_BYTES


class CoreCache:
    """A node store of `capacity` blocks with one eviction policy."""

    def __init__(self, eviction: str, capacity: int) -> None:
        size = capacity * PAGE_BYTES
        self.core = NodeStore(StoreConfig(host_bytes=size, chunk_bytes=size, eviction=eviction), 1, b"")
        reader = Attach(1, _WEIGHTS, "none", b"", 1, None, (), PAGE_BYTES, 0)  # weights that somebody uses
        self.core.step(0, reader)

    def request(self, keys: Sequence[int], now_us: int) -> int:
        """Blocks of the chain, head first, that were there without a gap; afterwards all are, as far as they fit."""
        names = [key.to_bytes(KEY_BYTES, "little") for key in keys]
        core = self.core
        hits = core.lookup(names)
        core.residency.policy.begin_request(names, now_us)
        entries = [
            AdoptEntry(name, Version(1, key), _WHOLE, _WEIGHTS, "none", 1, 0, depth=depth)
            for depth, (name, key) in enumerate(zip(names, keys, strict=True))
        ]
        core.step(now_us, Adopt(tuple(reversed(entries))))
        return hits
