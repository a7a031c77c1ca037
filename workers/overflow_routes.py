"""How a sequence's keys are walked when some of its blocks lie below the device: in which order, cut where, by whom.

Owns the cuts. Pure: knows no bytes and brings nothing. A walk is a range of whole pieces (kernels/segments.py), cut so
that what it needs from below fits a part of the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tournant.kernels.plan import PIECE_TOKENS

Array = npt.NDArray[np.int64]
DEVICE, RAM, BROUGHT = 0, 1, 2  # sources of blocks


def resident(table: Array, places: Array) -> tuple[Array, Array]:
    """Sources and ids of a sequence's blocks where they lie, those on disk as if they were in RAM. table: ids of both
    halves; places: the same as places below, below 0 for those on the device.
    """
    return np.where(places < 0, DEVICE, RAM), np.where(places < 0, table, places)


def first_piece(context: int, num_rows: int, window: int) -> int:
    """Of a sequence's pieces the first that any of its newest rows sees. window: keys that a row sees, 0 = all."""
    return max(0, context - num_rows - window + 1) // PIECE_TOKENS if window else 0


@dataclass(frozen=True, slots=True)
class Cut:
    """Pieces begin up to end. brought: indices of the blocks that come through the ring; on_cpu: walked by the CPU
    beside a device with a link, to whose ring they do not go then.
    """

    begin: int
    end: int
    brought: list[int]
    on_cpu: bool


def cut_pieces(
    places: Array, per_piece: int, pieces: range, part_blocks: int, first_brought: int, first_read: int | None = None
) -> list[Cut]:
    """Walks over all of `pieces`, the one with the last piece last.

    places: of every block of the sequence, below 0 for those on the device; per_piece: blocks of a piece; part_blocks:
    of a part of the ring, at least a piece's; first_brought: places from here on come through the ring. first_read: the
    CPU walks pieces of which no block is on the device, first of all, and places from here on are read for it.
    """
    on_cpu = [False] * len(pieces)
    if first_read is not None:
        on_cpu = [bool((places[piece * per_piece : (piece + 1) * per_piece] >= 0).all()) for piece in pieces]
    cuts: list[Cut] = []
    for kind, first in ((True, first_read), (False, first_brought)):
        open_cut: Cut | None = None
        for piece in (piece for piece, own in zip(pieces, on_cpu, strict=True) if own == kind):
            start = piece * per_piece
            wanted = (start + np.flatnonzero(places[start : start + per_piece] >= (first or 0))).tolist()
            fits = open_cut is not None and (not open_cut.brought or len(open_cut.brought) + len(wanted) <= part_blocks)
            if open_cut is not None and fits and open_cut.end == piece:
                open_cut = cuts[-1] = Cut(open_cut.begin, piece + 1, open_cut.brought + wanted, kind)
            else:
                open_cut = Cut(piece, piece + 1, wanted, kind)
                cuts.append(open_cut)
    return cuts
