"""A small random llama as a GGUF file, with the weights that a right reader must find in it.

Owns the shapes, names and row order of the file and two small vocabularies, written with the gguf package; knows
nothing of the code under test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, dequantize, quantize


@dataclass(frozen=True)
class Shape:
    """Layers, hidden size, size of the MLP, heads, KV heads and head size."""

    layers: int = 2
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16


SMALL = Shape()
WIDE = Shape(layers=1, hidden=256, inner=512, heads=4, kv_heads=2, head_size=64)
"""Rows of whole blocks of 256, for the types that need them."""

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, UNKNOWN_ID = 1, 2, 0
MERGES = ("h e", "Ġ Ġ")
WHOLE_WORD = "zqx"  # in the vocabulary, but no merges lead to it
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

LLAMA_SPECIALS = ("<unk>", "<s>", "</s>")
GEMMA_SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
MARKS = ("<|user|>", "<|end|>")
PIECES = ("he", "ll", "▁w", "or", "▁he", "llo", "ld", "▁hello")  # best first
LETTERS = ("▁", "h", "e", "l", "o", "w", "r", "d")

F32 = GGMLQuantizationType.F32
NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6
U32, FLOAT, TEXT, ARRAY = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING, GGUFValueType.ARRAY
SCALES = {  # where a block of each type that the gguf package cannot make holds its float16 scales
    GGMLQuantizationType.Q4_K: (0, 2), GGMLQuantizationType.Q5_K: (0, 2), GGMLQuantizationType.Q6_K: (208,),
}  # fmt: skip

Fields = dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]]


def vocabulary() -> list[str]:
    """Special tokens, one token per byte as byte-level vocabularies spell it, two merged ones, one unmergeable word."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    return [*SPECIALS, *letters, *(merge.replace(" ", "") for merge in MERGES), WHOLE_WORD]


VOCAB_SIZE = len(vocabulary())


def byte_level_fields(size: int = VOCAB_SIZE) -> Fields:
    """The tokenizer's metadata by key: value, type, type of items. size: tokens, unused ones included."""
    tokens = vocabulary()
    types = [CONTROL] * len(SPECIALS) + [NORMAL] * (len(tokens) - len(SPECIALS))
    unused = range(len(tokens), size)
    return {
        "tokenizer.ggml.model": ("gpt2", TEXT, None),
        "tokenizer.ggml.pre": ("smollm", TEXT, None),
        "tokenizer.ggml.tokens": (tokens + [f"[PAD{i}]" for i in unused], ARRAY, TEXT),
        "tokenizer.ggml.token_type": (types + [UNUSED for _ in unused], ARRAY, GGUFValueType.INT32),
        "tokenizer.ggml.merges": (list(MERGES), ARRAY, TEXT),
        "tokenizer.ggml.bos_token_id": (BOS_ID, U32, None),
        "tokenizer.ggml.eos_token_id": (EOS_ID, U32, None),
        "tokenizer.ggml.unknown_token_id": (UNKNOWN_ID, U32, None),
        "tokenizer.chat_template": (TEMPLATE, TEXT, None),
    }


def sentencepiece_fields(size: int = 320, specials: Sequence[str] = LLAMA_SPECIALS) -> Fields:
    """A vocabulary with byte fallback: special tokens, the bytes, two marks, letters, pieces, unused ones."""
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *MARKS, *LETTERS, *PIECES]
    types = [UNKNOWN if token == "<unk>" else CONTROL for token in specials] + [BYTE] * 256 + [CONTROL] * len(MARKS)
    types += [NORMAL] * (len(tokens) - len(types)) + [UNUSED] * (size - len(tokens))
    scores = [0.0] * (len(tokens) - len(PIECES)) + [-1.0 - place for place in range(len(PIECES))]
    unused = [f"[PAD{i}]" for i in range(len(tokens), size)]
    return {
        "tokenizer.ggml.model": ("llama", TEXT, None),
        "tokenizer.ggml.pre": ("default", TEXT, None),
        "tokenizer.ggml.tokens": (tokens + unused, ARRAY, TEXT),
        "tokenizer.ggml.scores": (scores + [-1000.0] * len(unused), ARRAY, FLOAT),
        "tokenizer.ggml.token_type": (types, ARRAY, GGUFValueType.INT32),
        "tokenizer.ggml.bos_token_id": (1, U32, None),
        "tokenizer.ggml.eos_token_id": (2, U32, None),
        "tokenizer.ggml.unknown_token_id": (specials.index("<unk>"), U32, None),
    }


def default_fields(shape: Shape = SMALL) -> Fields:
    """Metadata by key: value, type, type of items."""
    return {
        "general.architecture": ("llama", TEXT, None),
        "llama.block_count": (shape.layers, U32, None),
        "llama.context_length": (512, U32, None),
        "llama.embedding_length": (shape.hidden, U32, None),
        "llama.feed_forward_length": (shape.inner, U32, None),
        "llama.attention.head_count": (shape.heads, U32, None),
        "llama.attention.head_count_kv": (shape.kv_heads, U32, None),
        "llama.attention.layer_norm_rms_epsilon": (1e-5, FLOAT, None),
        "llama.rope.freq_base": (50000.0, FLOAT, None),
        "llama.vocab_size": (VOCAB_SIZE, U32, None),
        **byte_level_fields(),
    }


def tensor_shapes(shape: Shape = SMALL) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name: (name in a Hugging Face folder, shape)."""
    hidden, inner = shape.hidden, shape.inner
    query, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (VOCAB_SIZE, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
        "output.weight": ("lm_head.weight", (VOCAB_SIZE, hidden)),
    }
    for layer in range(shape.layers):
        for gguf_name, name, dims in (
            ("attn_norm", "input_layernorm", (hidden,)),
            ("attn_q", "self_attn.q_proj", (query, hidden)),
            ("attn_k", "self_attn.k_proj", (kv, hidden)),
            ("attn_v", "self_attn.v_proj", (kv, hidden)),
            ("attn_output", "self_attn.o_proj", (hidden, query)),
            ("ffn_norm", "post_attention_layernorm", (hidden,)),
            ("ffn_gate", "mlp.gate_proj", (inner, hidden)),
            ("ffn_up", "mlp.up_proj", (inner, hidden)),
            ("ffn_down", "mlp.down_proj", (hidden, inner)),
        ):
            shapes[f"blk.{layer}.{gguf_name}.weight"] = (f"model.layers.{layer}.{name}.weight", dims)
    return shapes


def paired_rows(num_rows: int, head_size: int) -> list[int]:
    """Which row of a Hugging Face query or key matrix each row of the file is: the halves of a head are paired."""
    half = head_size // 2
    return [
        head * head_size + part * half + index
        for head in range(num_rows // head_size)
        for index in range(half)
        for part in range(2)
    ]


def quantised(
    weights: npt.NDArray[np.float32], kind: GGMLQuantizationType, random: np.random.Generator
) -> npt.NDArray[Any]:
    """`weights` as rows of `kind`. Where the gguf package cannot do that: random blocks with scales around 0.001."""
    if kind not in SCALES:
        return quantize(np.ascontiguousarray(weights), kind)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (weights.size // block_size, block_bytes), dtype=np.uint8)
    for place in SCALES[kind]:
        scales = (0.001 * random.standard_normal(len(blocks))).astype("<f2")
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(len(weights), -1)


def build_tiny_gguf(
    path: Path,
    *,
    kind: GGMLQuantizationType = F32,
    fields: Mapping[str, tuple[Any, GGUFValueType]] | None = None,
    without: Sequence[str] = (),
    values: Mapping[str, npt.NDArray[np.float32]] | None = None,
    extra: Mapping[str, npt.NDArray[np.float32]] | None = None,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    stored: Mapping[str, tuple[npt.NDArray[np.uint8], GGMLQuantizationType]] | None = None,
    shape: Shape = SMALL,
) -> dict[str, npt.NDArray[np.float32]]:
    """Write the file; return its weights by Hugging Face name as float32, rounded as `kind` rounds them.

    kind: type of all matrices (norms are F32), kinds: of single tensors; fields: metadata added or replaced; without:
    metadata fields and tensors left out; values: matrices or norms given instead of random ones, by GGUF name; extra:
    further F32 tensors; stored: tensors added or replaced, as bytes [rows, bytes of a row] with their type.
    """
    all_fields = {**default_fields(shape), **{key: (*item, None) for key, item in (fields or {}).items()}}
    random = np.random.default_rng(7)
    found, tensors = {}, {}
    for name, (folder_name, dims) in tensor_shapes(shape).items():
        weights = random.standard_normal(dims, dtype=np.float32)
        weights = (values or {}).get(name, weights)
        if name in without:
            continue
        tensor_kind = (kinds or {}).get(name, kind if weights.ndim > 1 else F32)
        paired = ".attn_q." in name or ".attn_k." in name
        rows = paired_rows(len(weights), shape.head_size) if paired else list(range(len(weights)))
        data = quantised(weights[rows], tensor_kind, random)
        tensors[name] = (data, tensor_kind)
        right = np.empty_like(weights)
        right[rows] = dequantize(data, tensor_kind).reshape(weights.shape)
        found[folder_name] = right
    tensors |= {name: (weights, F32) for name, weights in (extra or {}).items()} | dict(stored or {})
    write_gguf(path, {key: item for key, item in all_fields.items() if key not in without}, tensors)
    return found


def write_gguf(
    path: Path, fields: Fields, tensors: Mapping[str, tuple[npt.NDArray[Any], GGMLQuantizationType]]
) -> None:
    """A file of exactly these fields and tensors (rows as stored, with their type)."""
    writer = GGUFWriter(path, "llama")
    writer.kv_data[0].clear()  # the architecture is among the fields
    for key, (value, value_type, item_type) in fields.items():
        writer.add_key_value(key, value, value_type, item_type)
    for name, (stored, kind) in tensors.items():
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
