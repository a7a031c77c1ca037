"""All layers in one call: the bits of single calls, and refusals that write nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quantize

from tests.kernels.kernel_case import DTYPES
from tournant.kernels import ops
from tournant.kernels.layers import FusedLayers, LayerParts
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import BlocksBelow
from tournant.kernels.quantized import QuantizedMatrix, pack

HIDDEN, INNER, HEADS, KV_HEADS, SIZE, EPS, SCALE = 64, 96, 4, 2, 16, 1e-5, 0.25
LENGTHS, PADDING = (5, 1, 20), 6
ROWS = sum(LENGTHS) + PADDING
LAYOUT = (3, KV_HEADS, 8, SIZE)

pytestmark = pytest.mark.usefixtures("compiled")


def matrix_of(kind: str, outputs: int, columns: int, biased: bool) -> QuantizedMatrix:
    random = np.random.default_rng([outputs, columns])
    weights = 0.1 * random.standard_normal((outputs, columns), dtype=np.float32)
    rows = torch.from_numpy(quantize(weights, GGMLQuantizationType[kind]))
    return pack(kind, rows, torch.randn(outputs) if biased else None)


def layers_of(dtype: torch.dtype, *, gelu: bool = False, wide: bool = False) -> FusedLayers:
    """Three layers: with a window, without rotation, with biases and 8-bit weights."""
    table = torch.randn(50, SIZE)
    parts = []
    for index, (kind, window, cos_sin) in enumerate((("Q4_1", 3, table), ("Q4_0", 0, None), ("Q8_0", 0, table))):
        shapes = (((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), (HIDDEN, HEADS * SIZE), (2 * INNER, HIDDEN), (HIDDEN, INNER))
        matrices = [matrix_of(kind, *shape, biased=index == 2) for shape in shapes]
        norms = [torch.rand(HIDDEN).to(torch.float32 if wide else dtype) for _ in range(2)]
        parts.append(LayerParts(*matrices, *norms, cos_sin, window))  # type: ignore[arg-type, call-arg]
    return FusedLayers(parts, HEADS, KV_HEADS, SIZE, EPS, SCALE, 20.0 if gelu else 0.0, gelu, dtype)


@dataclasses.dataclass
class Step:
    """Three prompts, then padding."""

    dtype: torch.dtype
    form: torch.dtype | None = None  # of KV, where it is another

    def __post_init__(self) -> None:
        layout = KVLayout(*LAYOUT, self.form or self.dtype)
        self.kv_cache, self.kv_scales = layout.allocate(8), layout.allocate_scales(8)
        tables = np.array([[0, 0, 0], [1, 0, 0], [2, 3, 4]], np.int32)
        self.plan = ops.plan_attention(tables, np.cumsum([0, *LENGTHS]), np.array(LENGTHS), layout, HEADS)
        at = [(row, token) for row, length in enumerate(LENGTHS) for token in range(length)]
        self.positions = torch.tensor([token for _, token in at] + [0] * PADDING)
        slots = [int(tables[row, token // 8]) * 8 + token % 8 for row, token in at]
        self.slots = torch.tensor([*slots, *[-1] * PADDING])
        generator = torch.Generator().manual_seed(4)
        self.hidden, self.residual = (torch.randn(ROWS, HIDDEN, generator=generator).to(self.dtype) for _ in range(2))

    def fused(self, layers: FusedLayers) -> None:
        step = (self.hidden, self.residual, self.kv_cache, self.plan, self.positions, self.slots)
        ops.decoder_layers(layers, *step, kv_scales=self.kv_scales)

    def one_by_one(self, layers: FusedLayers) -> None:
        for index, part in enumerate(layers.parts):
            qkv = self.multiply(part.qkv, self.hidden).view(ROWS, -1, SIZE)
            q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            if part.cos_sin is None:
                ops.store_kv(k, v, self.kv_cache, index, self.slots, kv_scales=self.kv_scales)
            else:
                where = (part.cos_sin, self.positions, self.kv_cache, index, self.slots)
                ops.rope_store_kv(q, k, v, *where, kv_scales=self.kv_scales)
            attended = torch.empty(ROWS, HEADS, SIZE, dtype=self.dtype)
            options = {"window": part.window, "softcap": layers.softcap, "kv_scales": self.kv_scales}
            ops.paged_attention(attended, q, self.kv_cache, index, self.plan, SCALE, **options)
            hidden = self.multiply(part.o, attended.flatten(1))
            hidden = ops.rms_norm(hidden, part.mlp_norm, EPS, self.residual)
            gated = (ops.gelu_mul if layers.gelu else ops.silu_mul)(self.multiply(part.gate_up, hidden))
            self.hidden = ops.rms_norm(self.multiply(part.down, gated), part.next_norm, EPS, self.residual)

    def multiply(self, matrix: QuantizedMatrix, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(ROWS, matrix.outputs, dtype=self.dtype)
        ops.quantized_linear(out, x, matrix)
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [None, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("gelu", "wide", "short"), [(False, False, False), (True, True, True)])
@pytest.mark.usefixtures("threads")
def test_the_bits_of_single_calls(
    dtype: torch.dtype, gelu: bool, wide: bool, short: bool, form: torch.dtype | None
) -> None:
    layers = layers_of(dtype, gelu=gelu, wide=wide)
    single = Step(dtype, form)
    single.one_by_one(layers)
    assert single.hidden.isfinite().all()
    for number in (1, 2):
        torch.set_num_threads(number)
        fused = Step(dtype, form)
        if short:
            fused.positions = fused.positions.int()
        fused.fused(layers)
        for name in ("hidden", "residual", "kv_cache", "kv_scales"):
            ours, others = getattr(fused, name), getattr(single, name)
            assert ours is others is None or torch.equal(ours.view(torch.uint8), others.view(torch.uint8)), name


@pytest.mark.parametrize("form", [None, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_below_are_read_where_they_lie(dtype: torch.dtype, form: torch.dtype | None) -> None:
    layers = layers_of(dtype)
    prompt = Step(dtype, form)
    prompt.fused(layers)
    decode, scattered = Step(dtype, form), Step(dtype, form)
    tables = np.array([[0, 0, 0], [1, 0, 0], [2, 3, 4]], np.int32)
    moved = np.array([[0, 0, 0], [1, 0, 0], [11, 10, 4]], np.int32)  # blocks 8 and 9 of the device there are not
    below = torch.full((5, *prompt.kv_cache.shape[1:]), float("nan"), dtype=torch.float32).to(prompt.kv_cache.dtype)
    below = below.transpose(0, 1).contiguous().transpose(0, 1)  # layers outermost
    below[3], below[2] = prompt.kv_cache[2], prompt.kv_cache[3]
    for step, table in ((decode, tables), (scattered, moved)):
        step.kv_cache.copy_(prompt.kv_cache)
        where = None if step is decode else BlocksBelow(8, below)
        contexts = np.array(LENGTHS) + 1
        step.plan = ops.plan_attention(
            table, [0, 1, 2, 3], contexts, KVLayout(*LAYOUT, step.kv_cache.dtype), HEADS, below=where
        )
        step.hidden, step.residual = step.hidden[:3].clone(), step.residual[:3].clone()
        step.positions = torch.tensor(LENGTHS)
        step.slots = torch.tensor([int(table[row, length // 8]) * 8 + length % 8 for row, length in enumerate(LENGTHS)])
    scattered.kv_cache.view(torch.uint8)[2:4] = 0x7F  # of every form no number
    decode.fused(layers)
    scattered.fused(layers)
    assert decode.hidden.isfinite().all()
    assert torch.equal(scattered.hidden, decode.hidden)
    assert torch.equal(scattered.residual, decode.residual)


def test_rows_out_of_range_write_nothing() -> None:
    layers = layers_of(torch.float32)
    for name, value, message in (
        ("slots", 64, "row 2 has slot 64 at position 2; allowed are slots -1 to 63 and positions 0 to 49"),
        ("positions", 50, "at position 50"),
    ):
        step, untouched = Step(torch.float32), Step(torch.float32)
        getattr(step, name)[2] = value
        with pytest.raises(ValueError, match=message):
            step.fused(layers)
        for tensor in ("hidden", "residual", "kv_cache"):
            assert torch.equal(getattr(step, tensor), getattr(untouched, tensor))


def test_what_does_not_fit_is_refused() -> None:
    layers, step = layers_of(torch.float32), Step(torch.float32)
    changes: list[tuple[str, Callable[[Step], object]]] = [
        ("hidden is", lambda s: setattr(s, "hidden", s.hidden[:, :32])),
        ("residual is", lambda s: setattr(s, "residual", s.residual[:4])),
        ("positions is", lambda s: setattr(s, "positions", s.positions.float())),
        ("slot_mapping is", lambda s: setattr(s, "slots", s.slots[:4])),
        ("names block 4; the KV cache holds 2", lambda s: setattr(s, "kv_cache", s.kv_cache[:2])),
        ("kv_cache is", lambda s: setattr(s, "kv_cache", s.kv_cache.bfloat16())),
        ("needs kv_scales", lambda s: setattr(s, "kv_cache", s.kv_cache.to(torch.float8_e4m3fn))),
        ("layer is 2", lambda s: setattr(s, "kv_cache", s.kv_cache[:, :2].contiguous())),
    ]
    for message, change in changes:
        wrong = Step(torch.float32)
        change(wrong)
        with pytest.raises(ValueError, match=message):
            wrong.fused(layers)
    part = layers.parts[0]
    for message, wrong_part in (
        ("o of layer 0 has the shape", dataclasses.replace(part, o=part.down)),
        ("a norm of layer 0 is", dataclasses.replace(part, mlp_norm=torch.ones(HIDDEN, dtype=torch.float16))),
        ("RoPE table of layer 0", dataclasses.replace(part, cos_sin=torch.ones(50, SIZE + 2))),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(layers, parts=[wrong_part])
    ops.select_backend("torch")
    try:
        with pytest.raises(ValueError, match="need the C back end; torch serves cpu"):
            step.fused(layers)
    finally:
        ops.select_backend("c")
