"""Scores and probabilities of causal attention, tile by tile: which rows and keys a tile has, and its arithmetic.

Owns the cut of a matrix into blocks of whole rows and the order of operations. Where tiles lie is no business of it:
the cut depends on the numbers of queries and keys alone, so that the bits of a result do, too. float32 throughout.

A tile of one head is [rows, width]: the scores of a block of queries with the keys from `low` on, `high` not included;
columns from high - low to `width` are padding. Both borders of keys are multiples of ALIGN wherever a product reads or
writes, so that it finds the same alignment in every buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

ALIGN = 16  # floats: 64 bytes
MIN_ROWS, MAX_ROWS = 8, 32
TILE_FLOATS = 1 << 18  # of one head, where MIN_ROWS allow it
CHUNK = 1024  # keys that one product takes


@dataclass(frozen=True, slots=True)
class Rows:
    """A block of queries: `count` from `first` on; `position` of the first among the keys; `low` to `high`: keys that
    they see, from a multiple of ALIGN on.
    """

    first: int
    count: int
    position: int
    low: int
    high: int

    @property
    def width(self) -> int:
        """Columns of a tile, padding included."""
        return -(-(self.high - self.low) // ALIGN) * ALIGN

    def chunks(self) -> Iterator[Piece]:
        """The keys in pieces that lie in one chunk of keys each, ascending."""
        for chunk in range(self.low // CHUNK, -(-self.high // CHUNK)):
            yield Piece(chunk, max(self.low, chunk * CHUNK), min(self.high, (chunk + 1) * CHUNK), self.low)


@dataclass(frozen=True, slots=True)
class Piece:
    """Keys `begin` to `end` of the whole, all of chunk `chunk`, of a tile that begins at key `low`."""

    chunk: int
    begin: int
    end: int
    low: int

    @property
    def in_tile(self) -> slice:
        """Their columns of the tile."""
        return slice(self.begin - self.low, self.end - self.low)

    @property
    def in_chunk(self) -> slice:
        """Their rows of the chunk of keys or values."""
        return slice(self.begin - self.chunk * CHUNK, self.end - self.chunk * CHUNK)


@dataclass(frozen=True, slots=True)
class Scoring:
    """scale: of the products; softcap: scores become softcap * tanh(score / softcap), 0 = as they are; window: keys
    that a query sees, its own included, 0 = all before it.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0


def cut_rows(num_queries: int, past: int, window: int = 0) -> list[Rows]:
    """The blocks of `num_queries` queries that come after `past` keys. Those of long sequences have fewer rows."""
    step = min(MAX_ROWS, max(MIN_ROWS, TILE_FLOATS // (past + num_queries)))
    blocks = []
    for first in range(0, num_queries, step):
        count = min(step, num_queries - first)
        position = past + first
        low = max(0, position - window + 1) // ALIGN * ALIGN if window else 0
        blocks.append(Rows(first, count, position, low, position + count))
    return blocks


def multiply_keys(tile: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, piece: Piece) -> None:
    """Products of queries [rows, size] with the keys of a chunk [n, size], into their columns of a tile."""
    tile[:, piece.in_tile] = queries @ keys[piece.in_chunk].T


def finish_scores(tile: torch.Tensor, scoring: Scoring) -> None:
    """Products become scores, in place; those of keys that a query does not see are not masked yet."""
    tile.mul_(scoring.scale)
    if scoring.softcap:
        tile.div_(scoring.softcap).tanh_().mul_(scoring.softcap)


def mask(tile: torch.Tensor, rows: Rows, scoring: Scoring, value: float) -> None:
    """Give every cell of a tile [rows, width] whose key the query does not see this value, padding included."""
    positions = torch.arange(rows.position, rows.position + rows.count, device=tile.device)[:, None]
    keys = torch.arange(rows.low, rows.low + rows.width, device=tile.device)
    late = rows.position - rows.low  # keys before it are behind all queries
    tile[:, late:].masked_fill_(keys[late:] > positions, value)
    if scoring.window:
        early = max(0, rows.high - scoring.window - rows.low)
        tile[:, :early].masked_fill_(keys[:early] <= positions - scoring.window, value)


def to_probabilities(tile: torch.Tensor, rows: Rows, scoring: Scoring) -> None:
    """Scores become probabilities, in place; what a query does not see becomes 0."""
    mask(tile, rows, scoring, float("-inf"))
    tile.sub_(tile.amax(-1, keepdim=True)).exp_()
    tile.div_(tile.sum(-1, keepdim=True))


def add_values(out: torch.Tensor, tile: torch.Tensor, values: torch.Tensor, piece: Piece) -> None:
    """Add to out [rows, size] the probabilities of a tile times the values of a chunk [n, size]."""
    out.addmm_(tile[:, piece.in_tile], values[piece.in_chunk])
