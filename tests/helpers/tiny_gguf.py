"""A small random llama as a GGUF file, with the weights that a right reader must find in it.

Owns the shapes, names and row order of the file, written with the gguf package; knows nothing of the code under test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, dequantize, quantize

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_SIZE = 2, 64, 96, 4, 2, 16
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, UNKNOWN_ID = 1, 2, 0
MERGES = ("h e", "Ġ Ġ")
WHOLE_WORD = "zqx"  # in the vocabulary, but no merges lead to it
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

F32 = GGMLQuantizationType.F32
NORMAL, CONTROL = 1, 3


def vocabulary() -> list[str]:
    """Special tokens, one token per byte as byte-level vocabularies spell it, two merged ones, one unmergeable word."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    return [*SPECIALS, *letters, *(merge.replace(" ", "") for merge in MERGES), WHOLE_WORD]


VOCAB_SIZE = len(vocabulary())


def default_fields() -> dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]]:
    """Metadata by key: value, type, type of items."""
    u32, f32, text, array = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING, GGUFValueType.ARRAY
    tokens = vocabulary()
    types = [CONTROL] * len(SPECIALS) + [NORMAL] * (len(tokens) - len(SPECIALS))
    return {
        "general.architecture": ("llama", text, None),
        "llama.block_count": (LAYERS, u32, None),
        "llama.context_length": (512, u32, None),
        "llama.embedding_length": (HIDDEN, u32, None),
        "llama.feed_forward_length": (INNER, u32, None),
        "llama.attention.head_count": (HEADS, u32, None),
        "llama.attention.head_count_kv": (KV_HEADS, u32, None),
        "llama.attention.layer_norm_rms_epsilon": (1e-5, f32, None),
        "llama.rope.freq_base": (50000.0, f32, None),
        "llama.vocab_size": (VOCAB_SIZE, u32, None),
        "tokenizer.ggml.model": ("gpt2", text, None),
        "tokenizer.ggml.pre": ("smollm", text, None),
        "tokenizer.ggml.tokens": (tokens, array, text),
        "tokenizer.ggml.token_type": (types, array, GGUFValueType.INT32),
        "tokenizer.ggml.merges": (list(MERGES), array, text),
        "tokenizer.ggml.bos_token_id": (BOS_ID, u32, None),
        "tokenizer.ggml.eos_token_id": (EOS_ID, u32, None),
        "tokenizer.ggml.unknown_token_id": (UNKNOWN_ID, u32, None),
        "tokenizer.chat_template": (TEMPLATE, text, None),
    }


def tensor_shapes() -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name: (name in a Hugging Face folder, shape)."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN)),
        "output_norm.weight": ("model.norm.weight", (HIDDEN,)),
        "output.weight": ("lm_head.weight", (VOCAB_SIZE, HIDDEN)),
    }
    for layer in range(LAYERS):
        for gguf_name, name, shape in (
            ("attn_norm", "input_layernorm", (HIDDEN,)),
            ("attn_q", "self_attn.q_proj", (HEADS * HEAD_SIZE, HIDDEN)),
            ("attn_k", "self_attn.k_proj", (KV_HEADS * HEAD_SIZE, HIDDEN)),
            ("attn_v", "self_attn.v_proj", (KV_HEADS * HEAD_SIZE, HIDDEN)),
            ("attn_output", "self_attn.o_proj", (HIDDEN, HEADS * HEAD_SIZE)),
            ("ffn_norm", "post_attention_layernorm", (HIDDEN,)),
            ("ffn_gate", "mlp.gate_proj", (INNER, HIDDEN)),
            ("ffn_up", "mlp.up_proj", (INNER, HIDDEN)),
            ("ffn_down", "mlp.down_proj", (HIDDEN, INNER)),
        ):
            shapes[f"blk.{layer}.{gguf_name}.weight"] = (f"model.layers.{layer}.{name}.weight", shape)
    return shapes


def file_rows(name: str, num_rows: int) -> list[int]:
    """Which row of the Hugging Face matrix each row of the file is: query and key rows pair the halves of a head."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return list(range(num_rows))
    half = HEAD_SIZE // 2
    return [
        head * HEAD_SIZE + part * half + index
        for head in range(num_rows // HEAD_SIZE)
        for index in range(half)
        for part in range(2)
    ]


def build_tiny_gguf(
    path: Path,
    *,
    kind: GGMLQuantizationType = F32,
    fields: Mapping[str, tuple[Any, GGUFValueType]] | None = None,
    without: Sequence[str] = (),
    values: Mapping[str, npt.NDArray[np.float32]] | None = None,
    extra: Mapping[str, npt.NDArray[np.float32]] | None = None,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> dict[str, npt.NDArray[np.float32]]:
    """Write the file; return its weights by Hugging Face name as float32, rounded as `kind` rounds them.

    kind: type of all matrices (norms are F32), kinds: of single tensors; fields: metadata added or replaced; without:
    metadata fields and tensors left out; values: matrices or norms given instead of random ones, by GGUF name; extra:
    further F32 tensors.
    """
    writer = GGUFWriter(path, "llama")
    all_fields = {**default_fields(), **{key: (*item, None) for key, item in (fields or {}).items()}}
    writer.kv_data[0].clear()
    for key, (value, value_type, item_type) in all_fields.items():
        if key not in without:
            writer.add_key_value(key, value, value_type, item_type)
    random = np.random.default_rng(7)
    found = {}
    for name, (folder_name, shape) in tensor_shapes().items():
        weights = random.standard_normal(shape, dtype=np.float32)
        weights = (values or {}).get(name, weights)
        if name in without:
            continue
        tensor_kind = (kinds or {}).get(name, kind if weights.ndim > 1 else F32)
        rows = file_rows(name, len(weights))
        stored = quantize(np.ascontiguousarray(weights[rows]), tensor_kind)
        writer.add_tensor(name, stored, raw_dtype=tensor_kind)
        restored = dequantize(stored, tensor_kind).reshape(weights.shape)
        right = np.empty_like(restored)
        right[rows] = restored
        found[folder_name] = right
    for name, weights in (extra or {}).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found
