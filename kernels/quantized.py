"""Matrices of 4- or 8-bit weights (GGUF's Q4_0, Q4_1, Q8_0) in the layout the CPU kernel reads, and its twin.

Owns the layout of tiles, described in kernels/cpu/quantized.c, and the meaning of the product. Argument checks and the
choice of back end are `ops.quantized_linear`'s.

Invariant: kernel and twin do the same float32 operations in the same order, so their results are equal bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

GROUP = 32  # elements of a row that share a scale, in x as in the weights
TILE = 32
ALIGNMENT = 64
MAX_COLUMNS = 1 << 15  # six quantised rows fit the kernel's scratch
LEAST = 1e-30
FINE_FROM, FINE_STEPS = 2.0, 254  # see kernels/cpu/quantized.c
MIDDLES = {"Q4_0": 8, "Q4_1": 0, "Q8_0": 128}  # the code that stands for zero (of Q4_1: for the minimum)
KINDS = tuple(MIDDLES)
ROW_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # of GROUP weights in a GGUF file


@dataclass(slots=True)
class QuantizedMatrix:
    """weight[outputs, columns] in tiles, uint8 [ceil(outputs / 32), bytes of a tile], and bias, float32 [outputs].

    Made by `pack`. `native` is what the C back end keeps with it.
    """

    kind: str
    outputs: int
    columns: int
    tiles: torch.Tensor
    bias: torch.Tensor | None
    native: Any = field(default=None, repr=False)


def can_pack(kind: str, columns: int) -> bool:
    """Whether rows of this type and length can be multiplied as they are."""
    return kind in KINDS and columns % GROUP == 0 and 0 < columns <= MAX_COLUMNS


def pack(kind: str, rows: torch.Tensor, bias: torch.Tensor | None = None) -> QuantizedMatrix:
    """The matrix whose rows lie in `rows`, uint8 [outputs, bytes of a row], as a GGUF file has them.

    Raises ValueError when `can_pack` says no or the bytes do not fill groups.
    """
    groups, rest = divmod(rows.shape[1], ROW_BYTES.get(kind, 1))
    if rest or rows.dtype != torch.uint8 or not can_pack(kind, groups * GROUP):
        raise ValueError(f"rows are {rows.dtype} {tuple(rows.shape)}; {kind} rows cannot be packed from that")
    outputs = len(rows)
    blocks = torch.zeros((-(-outputs // TILE) * TILE, groups, ROW_BYTES[kind]), dtype=torch.uint8)
    blocks[:outputs] = rows.view(outputs, groups, ROW_BYTES[kind])
    factors = 4 if kind == "Q4_1" else 2  # bytes of d and m, which come first
    codes = blocks[:, :, factors:] ^ 128 if kind == "Q8_0" else blocks[:, :, factors:]
    pieces = [_by_group(codes, torch.int32)]
    pieces += [_by_group(blocks[:, :, start : start + 2], torch.int16) for start in range(0, factors, 2)]
    tiles = torch.cat(pieces, dim=1)
    tiles = torch.nn.functional.pad(tiles, (0, -tiles.shape[1] % ALIGNMENT)).contiguous()
    return QuantizedMatrix(kind, outputs, groups * GROUP, tiles, None if bias is None else bias.float().contiguous())


def _by_group(data: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """Bytes [outputs, groups, bytes of words] as [tiles, bytes of groups, words, outputs of a tile]."""
    words = data.contiguous().view(word)
    return (
        words.reshape(-1, TILE, *words.shape[1:]).permute(0, 2, 3, 1).reshape(len(words) // TILE, -1).view(torch.uint8)
    )


def unpack(matrix: QuantizedMatrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes [outputs, groups, GROUP], d and (Q4_1) m [outputs, groups], all float32: weight = d * code + m."""
    groups, wide, count = matrix.columns // GROUP, matrix.kind == "Q8_0", len(matrix.tiles)
    words = groups * TILE * (GROUP if wide else GROUP // 2)
    codes = matrix.tiles[:, :words].reshape(count, groups, -1, TILE, 4).permute(0, 3, 1, 2, 4).flatten(3)
    if not wide:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    factors = [
        matrix.tiles[:, start : start + groups * TILE * 2]
        .contiguous()
        .view(torch.float16)
        .view(count, groups, TILE)
        .transpose(1, 2)
        .reshape(-1, groups)[: matrix.outputs]
        .float()
        for start in (words, words + groups * TILE * 2)[: 2 if matrix.kind == "Q4_1" else 1]
    ]
    centred = codes.flatten(0, 1)[: matrix.outputs].float() - MIDDLES[matrix.kind]
    return centred, factors[0], factors[1] if len(factors) > 1 else None


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes -127 to 127 [N, groups, GROUP] and scales [N, groups] of x [N, columns], then fine codes and fine scales.

    All float32. Fine are the groups whose largest element exceeds FINE_FROM times the row's mean of these: fine codes
    and scales hold what rounding left of them, and 0 elsewhere.
    """
    values = x.float().unflatten(1, (-1, GROUP))
    most = values.abs().amax(-1)
    scales = torch.where(most < LEAST, 0.0, most / 127)
    inverse = torch.where(most >= LEAST, torch.full_like(most, 127) / most, 0.0)  # a number / most is rounded twice
    codes = (values * inverse[..., None]).round()
    total = torch.zeros(len(x))
    for group in range(most.shape[1]):  # one after another, as the kernel adds
        total += most[:, group]
    limit = FINE_FROM * (total / most.shape[1] / 127)
    fine_scales = torch.where(scales > limit[:, None], scales / FINE_STEPS, 0.0)
    left = values - codes * scales[..., None]
    fine_inverse = torch.where(fine_scales > 0, torch.ones_like(most) / fine_scales, 0.0)
    fine_codes = torch.where(fine_scales[..., None] > 0, (left * fine_inverse[..., None]).round(), 0.0)
    return codes, scales, fine_codes, fine_scales


def quantized_linear(out: torch.Tensor, x: torch.Tensor, matrix: QuantizedMatrix) -> None:
    """out = x times the transpose of the matrix, plus bias; see `ops.quantized_linear`."""
    codes, scales, fine_codes, fine_scales = quantize_rows(x)
    weights, d, m = unpack(matrix)
    total = torch.zeros(len(x), matrix.outputs)
    for group in range(matrix.columns // GROUP):
        for code, scale in (
            (codes[:, group], scales[:, group, None]),
            (fine_codes[:, group], fine_scales[:, group, None]),
        ):
            dots = code @ weights[:, group].t()  # whole numbers below 2^24: exact in any order
            term = scale * d[:, group] * dots
            total += term if m is None else term + m[:, group] * (scale * code.sum(-1, keepdim=True))
    out.copy_(total if matrix.bias is None else total + matrix.bias)
