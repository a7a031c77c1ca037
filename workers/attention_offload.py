"""Attention that keeps its whole matrix of probabilities, wherever there is room: a torch module.

Owns the module and the order in which tiles are made and read back; arithmetic is attention_tiles.py's, places are
score_arena.py's. For inference: outputs carry no gradient (kernels/flash_attention.py is for training).

Guarantee: the bits of the output depend on the input and the weights alone, not on offload, granularity or capacities.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_io import DiskIO
from tournant.workers import attention_tiles as tiles
from tournant.workers.attention_tiles import ALIGN, CHUNK, Rows, Scoring
from tournant.workers.device import make_device
from tournant.workers.errors import ConfigError
from tournant.workers.score_arena import ArenaStats, Key, ScoreArena, SpillBottom
from tournant.workers.spill_file import SpillFile
from tournant.workers.tile_ledger import Kind

OFFLOADS = ("none", "cpu", "ssd")
GRANULARITIES = ("layer", "head")
DEVICE_BYTES, HOST_BYTES = 64 << 20, 256 << 20


class KVPair(NamedTuple):
    """Keys and values [batch, kv_heads, tokens, head_size]."""

    keys: torch.Tensor
    values: torch.Tensor


class AttentionWithOffload(nn.Module):
    """Causal self-attention without positions: projections q, k, v, o, softmax(q k^T / sqrt(head_size)) v.

    offload_to: where tiles of the matrix of probabilities go when the device has no room: "none", "cpu" (host memory),
    "ssd" (host memory, then a file); granularity: what is whole at a time before its product with the values, the
    matrices of all heads of the "layer" or of one "head"; num_kv_heads: None = num_heads; device_bytes, host_bytes:
    room for tiles of a sequence, None = 64 MiB (all that is needed with "none") and 256 MiB (no business of "none");
    folder: of spill files, one per call and sequence, None = /var/tmp; disk: system calls of these; bias: of the
    projections.

    Raises ConfigError for arguments that do not fit each other.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        offload_to: str = "none",
        granularity: str = "layer",
        *,
        num_kv_heads: int | None = None,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        folder: Path | str | None = None,
        disk: DiskIO | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value, known in (("offload_to", offload_to, OFFLOADS), ("granularity", granularity, GRANULARITIES)):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        if hidden_dim < 1 or num_heads < 1 or hidden_dim % num_heads:
            raise ConfigError(f"hidden_dim is {hidden_dim}; it must be a multiple of num_heads, {num_heads}")
        if kv_heads < 1 or num_heads % kv_heads:
            raise ConfigError(f"num_heads is {num_heads}; it must be a multiple of num_kv_heads, {kv_heads}")
        for name, size in (("device_bytes", device_bytes), ("host_bytes", host_bytes)):
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ConfigError(f"{name} is {size!r}; it must be a whole number from 1, or None")
        self.head_size = hidden_dim // num_heads
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.offload_to, self.granularity = offload_to, granularity
        self._bytes = device_bytes, host_bytes
        self._folder, self._disk = None if folder is None else Path(folder), disk
        self.q = nn.Linear(hidden_dim, hidden_dim, bias=bias)
        self.k = nn.Linear(hidden_dim, kv_heads * self.head_size, bias=bias)
        self.v = nn.Linear(hidden_dim, kv_heads * self.head_size, bias=bias)
        self.o = nn.Linear(hidden_dim, hidden_dim, bias=bias)
        self.stats: list[ArenaStats] = []
        """Of the last call, by sequence."""

    @torch.no_grad()
    def forward(self, x: torch.Tensor, cache: KVPair | None = None) -> tuple[torch.Tensor, KVPair]:
        """Output [batch, tokens, hidden_dim] in the dtype of x, and the cache with these tokens after those it had.

        x: [batch, tokens, hidden_dim], tokens that follow those of `cache`; scores are float32. The cache comes back on
        the CPU where tiles are offloaded, else on the device of x, and is taken from either. Raises ConfigError when
        the shapes or capacities do not fit, OSError when a spill file fails; then nothing of the call is left.
        """
        if x.ndim != 3 or x.shape[2] != self.q.in_features or not x.numel():
            raise ConfigError(
                f"x is {tuple(x.shape)}; it must be [1 or more sequences, 1 or more tokens, {self.q.in_features}]"
            )
        batch, tokens, _ = x.shape
        queries = self._heads(self.q, x).float()
        pair = self._extended(cache, KVPair(self._heads(self.k, x), self._heads(self.v, x)))
        attended = torch.empty_like(queries)
        self.stats = []
        for one in range(batch):
            work = _Work(queries[one], pair.keys[one], pair.values[one], attended[one], self.granularity == "head")
            with self._arena(work) as arena:
                work.run(arena)
                self.stats.append(arena.stats)
        merged = attended.transpose(1, 2).reshape(batch, tokens, -1).to(x.dtype)
        output: torch.Tensor = self.o(merged)
        return output, pair

    def _heads(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = linear(x).view(*x.shape[:2], -1, self.head_size)
        return heads.transpose(1, 2).contiguous()

    def _extended(self, cache: KVPair | None, new: KVPair) -> KVPair:
        home = new.keys.device if self.offload_to == "none" else torch.device("cpu")
        if cache is None:
            return KVPair(*(part.to(home) for part in new))
        batch, heads, _, size = new.keys.shape
        tokens = cache[0].shape[2] if cache[0].ndim == 4 else 0
        for name, part, fresh in zip(KVPair._fields, cache, new, strict=True):
            if part.shape != (batch, heads, tokens, size) or part.dtype != fresh.dtype:
                raise ConfigError(
                    f"cache {name} are {part.dtype} {tuple(part.shape)}; they must be {fresh.dtype} "
                    f"[{batch}, {heads}, tokens, {size}], keys and values of as many tokens"
                )
        return KVPair(*(torch.cat([old.to(home), part.to(home)], 2) for old, part in zip(cache, new, strict=True)))

    def _arena(self, work: _Work) -> ScoreArena:
        """An arena that the tiles of a sequence fit into. Raises ConfigError when its capacities are too small."""
        device_bytes, host_bytes = self._bytes
        at_once, least = work.sizes()
        if self.offload_to == "none":
            room, host = at_once if device_bytes is None else device_bytes, 0
        else:
            room, host = device_bytes or DEVICE_BYTES, host_bytes or HOST_BYTES
        if room < (least if host else at_once) or (host and host < least):
            raise ConfigError(
                f"device_bytes is {room}, host_bytes {host}: this call needs at least {least if host else at_once} "
                f"of each tier with offload_to {self.offload_to!r} and granularity {self.granularity!r}; raise them"
            )
        if self.offload_to == "cpu" and room + host < at_once + least:
            raise ConfigError(
                f"the probabilities take {at_once} bytes; device_bytes, {room}, and host_bytes, {host}, must be "
                f"{at_once + least} together: raise them, or offload to ssd"
            )
        device = make_device(work.device.type, work.device.index or 0)
        bottom = SpillBottom(SpillFile(self._folder, self._disk)) if self.offload_to == "ssd" else None
        return ScoreArena(room, host, bottom, device=device)


@dataclass(frozen=True, slots=True)
class _Work:
    """One sequence: queries and out [heads, tokens, size] on the device, keys and values [kv_heads, all tokens, size]
    anywhere.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    by_head: bool

    @property
    def device(self) -> torch.device:
        return self.queries.device

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.queries.shape[2] ** -0.5)

    def blocks(self) -> list[Rows]:
        """The rows of a matrix, cut."""
        num_queries = self.queries.shape[1]
        return tiles.cut_rows(num_queries, self.keys.shape[1] - num_queries)

    def groups(self) -> list[tuple[range, range]]:
        """Heads whose matrices are whole at a time, and their KV heads."""
        heads, kv_heads = len(self.queries), len(self.keys)
        if not self.by_head:
            return [(range(heads), range(kv_heads))]
        shared = heads // kv_heads
        return [(range(head, head + 1), range(head // shared, head // shared + 1)) for head in range(heads)]

    def sizes(self) -> tuple[int, int]:
        """Bytes of tiles that there are at once, at most, and the least capacity of a tier, for tiles that are in use
        or on their way.
        """
        heads, kv_heads = self.groups()[0]
        scores = [4 * len(heads) * block.count * block.width + PAGE_BYTES for block in self.blocks()]
        num_keys, size = self.keys.shape[1:]
        chunk = 4 * len(kv_heads) * _aligned(min(CHUNK, num_keys)) * size + PAGE_BYTES
        at_once = sum(scores) + 2 * chunk * -(-num_keys // CHUNK)
        return at_once, 3 * (max(scores) + chunk)

    def run(self, arena: ScoreArena) -> None:
        """Fill `out`."""
        groups, blocks = list(enumerate(self.groups())), self.blocks()
        arena.schedule(list(self._reads(len(groups), blocks)))
        for group, (heads, kv_heads) in groups:
            self._bring(arena, "k", group, kv_heads, self.keys)
            for place, rows in enumerate(blocks):
                self._score(arena, group, heads, place, rows)
            self._bring(arena, "v", group, kv_heads, self.values)
            for place, rows in enumerate(blocks):
                self._sum(arena, group, heads, place, rows)

    @staticmethod
    def _reads(num_groups: int, blocks: list[Rows]) -> Iterator[Key]:
        """The tiles that `run` reads, in order."""
        for group in range(num_groups):
            for rows in blocks:
                yield from (("k", group, piece.chunk) for piece in rows.chunks())
            for place, rows in enumerate(blocks):
                yield "p", group, place
                yield from (("v", group, piece.chunk) for piece in rows.chunks())

    def _bring(self, arena: ScoreArena, name: str, group: int, kv_heads: range, source: torch.Tensor) -> None:
        """Keys or values of a group into tiles, those of each head from an address that its tokens cannot shift."""
        for chunk in range(-(-source.shape[1] // CHUNK)):
            part = source[kv_heads.start : kv_heads.stop, chunk * CHUNK : (chunk + 1) * CHUNK]
            heads, tokens, size = part.shape
            tile = arena.new((name, group, chunk), (heads, _aligned(tokens), size), Kind.KV)
            tile[:, :tokens].copy_(part)
            arena.done((name, group, chunk))

    def _score(self, arena: ScoreArena, group: int, heads: range, place: int, rows: Rows) -> None:
        """Make the probabilities of a block of rows."""
        tile = arena.new(("p", group, place), (len(heads), rows.count, rows.width))
        queries = self.queries[heads.start : heads.stop, rows.first : rows.first + rows.count]
        for piece in rows.chunks():
            keys = arena.read(("k", group, piece.chunk))
            for head in range(len(heads)):
                tiles.multiply_keys(tile[head], queries[head], keys[head * len(keys) // len(heads)], piece)
            arena.done(("k", group, piece.chunk))
        for head in range(len(heads)):
            tiles.finish_scores(tile[head], self.scoring)
            tiles.to_probabilities(tile[head], rows, self.scoring)
        arena.done(("p", group, place))

    def _sum(self, arena: ScoreArena, group: int, heads: range, place: int, rows: Rows) -> None:
        """Multiply the probabilities of a block of rows with the values."""
        tile = arena.read(("p", group, place))
        out = torch.zeros((len(heads), _aligned(rows.count), self.out.shape[2]), device=self.device)[:, : rows.count]
        for piece in rows.chunks():
            values = arena.read(("v", group, piece.chunk))
            for head in range(len(heads)):
                tiles.add_values(out[head], tile[head], values[head * len(values) // len(heads)], piece)
            arena.done(("v", group, piece.chunk))
        arena.done(("p", group, place))
        self.out[heads.start : heads.stop, rows.first : rows.first + rows.count] = out


def _aligned(rows: int) -> int:
    """Rows of whatever size after which an address is as aligned as before: how a product rounds depends on that."""
    return -(-rows // ALIGN) * ALIGN
