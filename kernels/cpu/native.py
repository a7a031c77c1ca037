"""Calls the compiled C kernels: packs pointers and strides, chooses the function by dtype.

Owns: the binary layout of the structs shared with kernels/cpu/*.c. Does not check arguments: `ops` has done that.
ctypes releases the GIL during a call. Threads: as many as torch uses, from torch's own pool.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels.cpu.native_blocks import LAYER, NativeBlocks, NativeRow
from tournant.kernels.layers import FusedLayers, LayerParts
from tournant.kernels.plan import PARTIAL_EXTRA, AttentionPlan
from tournant.kernels.quantized import KINDS, QuantizedMatrix
from tournant.kernels.reference import row_error

if TYPE_CHECKING:
    from tournant.kernels.block_sparse import RowAttention

SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_PLAN = struct.Struct("6P11q")  # struct plan
_STORE = struct.Struct("9P16q")  # struct store
_MATRIX = struct.Struct("2P3q")  # struct matrix
_PRODUCT = struct.Struct("2P6q")  # struct product
_WEIGHTS = struct.Struct("7P5q")  # struct layer_weights
_STEP = struct.Struct("11P16qP3qdff")  # struct step
_FORMS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}  # enum form; 0: the type of the activations
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum type
_COUNTS_AT = 6 * 8 + 6 * 8  # num_units, num_splits, num_partials in struct plan
_UNIT_BYTES = _SPLIT_BYTES = 32

_P, _Q, _D, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int


@dataclass(frozen=True, slots=True)
class NativePlan:
    """struct plan with the arrays that it points into."""

    packed: ctypes.Array[ctypes.c_char]
    units: npt.NDArray[np.uint8]
    splits: npt.NDArray[np.uint8]
    partials: torch.Tensor


class NativeKernels:
    """The C back end; one instance per process. Methods mirror the functions of `reference`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, restype: Any, *argtypes: Any) -> Any:
            found = getattr(library, name)
            found.restype, found.argtypes = restype, argtypes
            return found

        def functions(name: str, *argtypes: Any) -> dict[torch.dtype, Any]:
            return {dtype: function(f"{name}_{suffix}", None, *argtypes) for dtype, suffix in SUFFIXES.items()}

        self._rms_norm = functions("rms_norm", _P, _P, _P, _P, _P, _Q, _Q, _Q, _D, _I)
        self._silu_mul = functions("silu_mul", _P, _P, _Q, _Q, _Q, _I)
        self._gelu_mul = functions("gelu_mul", _P, _P, _Q, _Q, _Q, _I)
        self._store_kv = functions("store_kv", ctypes.c_char_p)
        self._paged_attention = functions("paged_attention", _P, ctypes.c_char_p)
        self._first_bad_row = function("first_bad_row", _Q, ctypes.c_char_p)
        self._cut = function("cut_into_units", None, _P, _P, _P, _I)
        self._quantized_linear = function("quantized_linear", None, ctypes.c_char_p, ctypes.c_char_p)
        self._decoder_layers = {
            dtype: function(f"decoder_layers_{suffix}", _Q, _P, _P, _Q, ctypes.c_char_p)
            for dtype, suffix in SUFFIXES.items()
        }
        self._encode_blocks = functions("encode_blocks", _P, _P, _P, _Q, _Q, _Q, _Q, _I)
        self._decode_blocks = functions("decode_blocks", _P, _P, _P, _Q, _Q, _Q, _Q, _I)
        self._copy_blocks = function("copy_blocks", None, _P, _P, _P, _Q, _Q, _I)
        self._attend_row = {
            dtype: function(f"attend_row_{suffix}", _D, *[ctypes.c_char_p] * 3, _P, ctypes.c_char_p, _D)
            for dtype, suffix in SUFFIXES.items()
        }
        self.blocks = NativeBlocks(
            functions("score_bounds", ctypes.c_char_p),
            function("choose_blocks", None, ctypes.c_char_p),
            function("pack_blocks", None, ctypes.c_char_p),
        )

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> torch.Tensor:
        rows, size = x.shape
        out = torch.empty((rows, size), dtype=x.dtype)
        self._rms_norm[x.dtype](
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr() if weight.dtype == x.dtype else None,
            weight.data_ptr() if weight.dtype != x.dtype else None,
            out.data_ptr(),
            rows,
            size,
            x.stride(0),
            eps,
            torch.get_num_threads(),
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(self._silu_mul, gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(self._gelu_mul, gate_up)

    @staticmethod
    def _gated(functions: dict[torch.dtype, Any], gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, size), dtype=gate_up.dtype)
        functions[gate_up.dtype](
            gate_up.data_ptr(), out.data_ptr(), rows, size, gate_up.stride(0), torch.get_num_threads()
        )
        return out

    def store_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        self._store(None, k, v, None, None, kv_cache, layer, slot_mapping, kv_scales)

    def rope_store_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        self._store(q, k, v, cos_sin, positions, kv_cache, layer, slot_mapping, kv_scales)

    def _store(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor | None,
        positions: torch.Tensor | None,
        kv_cache: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
        kv_scales: torch.Tensor | None,
    ) -> None:
        num_blocks, _, _, kv_heads, block_tokens, head_size = kv_cache.shape
        block_stride, layer_stride, value_offset = kv_cache.stride()[:3]
        scales, scale_stride = _scales(kv_scales, layer)
        short = positions is not None and positions.dtype == torch.int32
        where = 0 if positions is None else positions.data_ptr()
        packed = _STORE.pack(
            0 if q is None else q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            kv_cache.data_ptr() + layer * layer_stride * kv_cache.itemsize,
            0 if cos_sin is None else cos_sin.data_ptr(),
            0 if short else where,
            where if short else 0,
            slot_mapping.data_ptr(),
            scales,
            0 if q is None else q.stride(0),
            k.stride(0),
            v.stride(0),
            block_stride,
            value_offset,
            scale_stride,
            k.shape[0],
            0 if q is None else q.shape[1],
            kv_heads,
            head_size,
            block_tokens,
            0 if cos_sin is None else cos_sin.shape[1],
            0 if cos_sin is None else cos_sin.shape[0],
            num_blocks * block_tokens,
            _FORMS.get(kv_cache.dtype, 0),
            torch.get_num_threads(),
        )
        bad = self._first_bad_row(packed)
        if bad >= 0:
            raise row_error(bad, slot_mapping, kv_cache, positions, cos_sin)
        self._store_kv[k.dtype](packed)

    def copy_blocks(self, kv_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
        block_bytes = kv_cache.stride(0) * kv_cache.itemsize
        self._copy_blocks(
            kv_cache.data_ptr(), src.data_ptr(), dst.data_ptr(), len(src), block_bytes, torch.get_num_threads()
        )

    def encode_blocks(self, pool: torch.Tensor, ids: torch.Tensor, images: torch.Tensor, dtype: torch.dtype) -> None:
        """In this thread alone: several may do it at once, each with blocks of its own."""
        self._encode_blocks[pool.dtype](
            pool.data_ptr(),
            ids.data_ptr(),
            images.data_ptr(),
            *_panels(pool, ids, images),
            dtype == torch.float8_e4m3fn,
        )

    def decode_blocks(self, images: torch.Tensor, dtype: torch.dtype, ids: torch.Tensor, pool: torch.Tensor) -> None:
        """As `encode_blocks`."""
        self._decode_blocks[pool.dtype](
            images.data_ptr(),
            ids.data_ptr(),
            pool.data_ptr(),
            *_panels(pool, ids, images),
            dtype == torch.float8_e4m3fn,
        )

    def prepare(self, plan: AttentionPlan) -> NativePlan:
        """Cut the step into units of work of about equal size for torch's number of threads."""
        threads = torch.get_num_threads()
        pointers = [array.ctypes.data for array in (plan.block_tables, plan.query_start, plan.context_lens)]
        sizes = [
            len(plan.context_lens),
            plan.block_tables.shape[1],
            plan.num_heads,
            plan.layout.num_kv_heads,
            plan.layout.block_tokens,
            plan.layout.head_size,
        ]
        packed = ctypes.create_string_buffer(_PLAN.pack(*pointers, 0, 0, 0, *sizes, 0, 0, 0, *plan.pieces), _PLAN.size)
        self._cut(packed, None, None, threads)
        num_units, num_splits, num_partials = struct.unpack_from("3q", packed, _COUNTS_AT)
        units = np.empty(num_units * _UNIT_BYTES, np.uint8)
        splits = np.empty(num_splits * _SPLIT_BYTES, np.uint8)
        partials = torch.empty(num_partials * (plan.layout.head_size + PARTIAL_EXTRA), dtype=torch.float32)
        self._cut(packed, units.ctypes.data, splits.ctypes.data, threads)
        struct.pack_into("3P", packed, 3 * 8, units.ctypes.data, splits.ctypes.data, partials.data_ptr())
        return NativePlan(packed, units, splits, partials)

    def paged_attention(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        plan: AttentionPlan,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        lse: torch.Tensor | None = None,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        native = plan.native
        if native is None:
            native = plan.native = self.prepare(plan)
        if len(out) > plan.num_tokens:
            out[plan.num_tokens :].zero_()
        block_stride, layer_stride, value_offset = kv_cache.stride()[:3]
        scales, scale_stride = _scales(kv_scales, layer)
        packed = LAYER.pack(
            q.data_ptr(),
            kv_cache.data_ptr() + layer * layer_stride * kv_cache.itemsize,
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            scales,
            q.stride(0),
            out.stride(0),
            block_stride,
            value_offset,
            scale_stride,
            _FORMS.get(kv_cache.dtype, 0),
            window,
            scale,
            softcap,
            torch.get_num_threads(),
            0,
            0,
            *_below(plan, layer)[:3],
        )
        self._paged_attention[q.dtype](ctypes.addressof(native.packed), packed)

    def walk_pieces(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        form: torch.Tensor,
        addresses: npt.NDArray[np.int64],
        plan: AttentionPlan,
        scale: float,
        window: int,
        softcap: float,
        state: torch.Tensor | None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """form: a KV tensor of the kind that lies at the addresses, int64 [S, blocks], of one layer's K."""
        if plan.native is None:
            plan.native = self.prepare(plan)
        packed = LAYER.pack(
            q.data_ptr(),
            0,
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            0,
            q.stride(0),
            out.stride(0),
            0,
            form.stride(2),
            0,
            _FORMS.get(form.dtype, 0),
            window,
            scale,
            softcap,
            torch.get_num_threads(),
            addresses.ctypes.data,
            0 if state is None else state.data_ptr(),
            0,
            0,
            0,
        )
        self._paged_attention[q.dtype](ctypes.addressof(plan.native.packed), packed)

    def row_attention(self, one: RowAttention) -> NativeRow:
        """For its `attend`."""
        plan, form = one.plan.heads, one.places.tensors[0]
        if plan.native is None:
            plan.native = self.prepare(plan)
        stride = one.heads // one.bounds.shape[1] * one.bounds.shape[4]
        fields = (0, 0, stride, stride, 0, form.stride(2), 0, _FORMS.get(form.dtype, 0), 0), (torch.get_num_threads(),)
        return NativeRow(self._attend_row[one.bounds.dtype], plan.native.packed, fields, one)

    def quantized_linear(self, out: torch.Tensor, x: torch.Tensor, matrix: QuantizedMatrix) -> None:
        product = _PRODUCT.pack(
            x.data_ptr(),
            out.data_ptr(),
            len(x),
            x.stride(0),
            out.stride(0),
            _TYPES[x.dtype],
            _TYPES[out.dtype],
            torch.get_num_threads(),
        )
        self._quantized_linear(_packed(matrix), product)

    def decoder_layers(
        self,
        layers: FusedLayers,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: AttentionPlan,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        if layers.native is None:
            layers.native = ctypes.create_string_buffer(
                b"".join(_packed_weights(part, layers.dtype) for part in layers.parts)
            )
        if plan.native is None:
            plan.native = self.prepare(plan)
        rows, size, inner = len(hidden), layers.head_size, layers.inner_size
        widths = (layers.qkv_heads * size, layers.num_heads * size, 2 * inner, inner)
        scratch = [torch.empty((rows, width), dtype=hidden.dtype) for width in widths]
        block_stride, layer_stride, value_offset = kv_cache.stride()[:3]
        scales, scale_stride = _scales(kv_scales, 0)
        short = positions.dtype == torch.int32
        step = _STEP.pack(
            hidden.data_ptr(),
            residual.data_ptr(),
            *(tensor.data_ptr() for tensor in scratch),
            kv_cache.data_ptr(),
            0 if short else positions.data_ptr(),
            positions.data_ptr() if short else 0,
            slot_mapping.data_ptr(),
            scales,
            rows,
            plan.num_tokens,
            layers.hidden_size,
            inner,
            layers.num_heads,
            layers.num_kv_heads,
            size,
            kv_cache.shape[4],
            kv_cache.shape[0] * kv_cache.shape[4],
            block_stride,
            layer_stride,
            value_offset,
            scale_stride,
            _FORMS.get(kv_cache.dtype, 0),
            layers.gelu,
            torch.get_num_threads(),
            *_below(plan, 0),
            layers.eps,
            layers.scale,
            layers.softcap,
        )
        run = self._decoder_layers[hidden.dtype]
        bad = run(ctypes.addressof(plan.native.packed), ctypes.addressof(layers.native), len(layers.parts), step)
        if bad >= 0:
            table = next((part.cos_sin for part in layers.parts if part.cos_sin is not None), None)
            raise row_error(bad, slot_mapping, kv_cache, positions if table is not None else None, table)


def _panels(pool: torch.Tensor, ids: torch.Tensor, images: torch.Tensor) -> tuple[int, int, int, int]:
    """Number of blocks, bytes from image to image, panels of a block, elements of a panel."""
    layers, kinds, heads, tokens, size = pool.shape[1:]
    return len(ids), images.stride(0), layers * kinds * heads, tokens * size


def _below(plan: AttentionPlan, layer: int) -> tuple[int, int, int, int]:
    """Address of a layer in the first block below, from block to block, the id of that block, from layer to layer."""
    if plan.below is None:
        return 0, 0, 0, 0
    tensor = plan.below.tensor
    block_stride, layer_stride = tensor.stride()[:2]
    return tensor.data_ptr() + layer * layer_stride * tensor.itemsize, block_stride, plan.below.first, layer_stride


def _scales(kv_scales: torch.Tensor | None, layer: int) -> tuple[int, int]:
    """Address of a layer's scales in block 0, and from block to block; zeros where there are none."""
    if kv_scales is None:
        return 0, 0
    block_stride, layer_stride = kv_scales.stride()[:2]
    return kv_scales.data_ptr() + layer * layer_stride * kv_scales.itemsize, block_stride


def _packed(matrix: QuantizedMatrix) -> ctypes.Array[ctypes.c_char]:
    """struct matrix, kept with it."""
    if matrix.native is None:
        bias = 0 if matrix.bias is None else matrix.bias.data_ptr()
        kind = KINDS.index(matrix.kind)  # enum kind
        packed = _MATRIX.pack(matrix.tiles.data_ptr(), bias, matrix.outputs, matrix.columns, kind)
        matrix.native = ctypes.create_string_buffer(packed, len(packed))
    found: ctypes.Array[ctypes.c_char] = matrix.native
    return found


def _packed_weights(part: LayerParts, dtype: torch.dtype) -> bytes:
    """struct layer_weights."""
    table, norms = part.cos_sin, (part.mlp_norm, part.next_norm)
    matrices = (part.qkv, part.o, part.gate_up, part.down)
    return _WEIGHTS.pack(
        *(ctypes.addressof(_packed(matrix)) for matrix in matrices),
        *(norm.data_ptr() for norm in norms),
        0 if table is None else table.data_ptr(),
        *(norm.dtype != dtype for norm in norms),
        0 if table is None else table.shape[1],
        0 if table is None else table.shape[0],
        part.window,
    )
