"""One .gguf file made into a model folder (config.json, model.safetensors, tokenizer files), once per machine.

Owns what GGUF metadata and tensors of the llama architecture mean, and the converted folders of the cache. The bytes of
the header are gguf_header.py's; the tokenizer is built by transformers and corrected here where GGUF says more.

Invariants:
 1. A converted folder is complete or absent: it is written aside under a lock, synced and renamed. What a killed
    conversion left behind is swept by the next one.
 2. The folder's name holds the digest of the file, the dtype and FORMAT_VERSION: change what is written, change that.
 3. Memory stays bounded by the header, CHUNK_ELEMENTS and the tokenizer, whatever the size of the model.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import transformers
from gguf import GGMLQuantizationType, dequantize
from tokenizers import pre_tokenizers

from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from tournant.workers.local_cache import exclusive, file_digests, file_stamp, private_folder

FORMAT_VERSION = 1
TENSOR_TYPES = (
    GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0,
)
"""Exactly the tensor types that are converted; each has a test against the gguf package."""

LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0, "float32": 3.4028234663852886e38}
"""Dtypes a folder can have, each with its largest finite value."""

CHUNK_ELEMENTS = 1 << 21
LOCK_WAIT_S = 1800.0
SPARE_BYTES = 256 << 20  # left free on the disk beside a conversion

LLAMA3_PRE_TOKENIZERS = ("llama-bpe", "llama3", "llama-v3")
PRE_TOKENIZERS = ("default", "gpt-2", "qwen2", "tekken", "smollm", *LLAMA3_PRE_TOKENIZERS)
"""How byte-level vocabularies may say that they split text; another way would silently give other tokens."""

_DTYPE_TAGS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor of the folder. heads: head count when GGUF holds the rows of each head interleaved for RoPE, else 0."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0


def convert_gguf(path: Path, dtype: str, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The folder that holds the model of `path` with weights in `dtype`; converts on first use.

    dtype: "bfloat16", "float16" or "float32". progress: called with a line of text before and during long work.
    Raises ModelFormatError naming the tensor or field when the file is damaged or of an unknown kind, ConfigError when
    the disk is too full, OSError when a file cannot be read or written (TimeoutError: the lock is not free within 30
    minutes). On failure nothing of the conversion is left behind.
    """
    if dtype not in LARGEST:
        raise ConfigError(f"dtype is {dtype!r}; a GGUF file can be converted to {', '.join(LARGEST)}")
    tell = progress or (lambda line: None)
    stamp = file_stamp(path.stat())
    header = read_gguf_header(path)
    config = llama_config(header, dtype)
    tensors = _wanted_tensors(header, config)
    (digest,) = file_digests([path], cache_dir)
    root = private_folder(cache_dir / "converted")
    target = root / f"{digest.hex()}-{dtype}-{FORMAT_VERSION}"
    if target.is_dir():
        return target
    with exclusive(root / "lock", LOCK_WAIT_S, lambda: tell("waiting for another process that converts a model")):
        for leftover in root.glob("tmp-*"):
            shutil.rmtree(leftover)
        if target.is_dir():
            return target
        _check_space(root, tensors, dtype)
        folder = Path(tempfile.mkdtemp(prefix="tmp-", dir=root))  # mode 0700
        try:
            tell(f"converting {path.name} to {dtype} (once)")
            _write_tokenizer(header, config, folder)
            _write_weights(header, tensors, dtype, folder / "model.safetensors", tell)
            _write_json(folder / "config.json", config)
            _write_json(folder / "generation_config.json", _generation_config(header, config))
            if file_stamp(path.stat()) != stamp:
                raise ModelFormatError(f"{path} changed while it was being converted; start again when it is complete")
            _sync(folder)
            os.rename(folder, target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return target


def llama_config(header: GGUFHeader, dtype: str) -> dict[str, Any]:
    """config.json for the file's metadata. Raises ModelFormatError naming the field that is missing or out of range."""
    architecture = header.text("general.architecture")
    if architecture != "llama":
        raise ModelFormatError(f"{header.path}: architecture {architecture!r} is not supported; known for GGUF: llama")
    if header.whole("llama.expert_count", 0, 1 << 16, 0):
        raise ModelFormatError(f"{header.path}: field llama.expert_count: mixture-of-experts is not supported")
    hidden = header.whole("llama.embedding_length", 1, 1 << 17)
    heads = header.whole("llama.attention.head_count", 1, 1 << 12)
    kv_heads = header.whole("llama.attention.head_count_kv", 1, heads, heads)
    head_size = header.whole("llama.attention.key_length", 2, 1 << 12, hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if header.whole(key, 1, 1 << 12, head_size) != head_size:
            raise ModelFormatError(
                f"{header.path}: field {key} is {header.fields[key]}; only the head size, {head_size}, is supported"
            )
    if heads % kv_heads or head_size % 2:
        raise ModelFormatError(
            f"{header.path}: {heads} heads of size {head_size} do not divide evenly over the {kv_heads} KV heads of "
            "field llama.attention.head_count_kv, or into two halves"
        )
    vocab_size = header.whole("llama.vocab_size", 1, 1 << 24, header.length("tokenizer.ggml.tokens"))
    positions = header.whole("llama.context_length", 1, 1 << 28)
    ids = {
        name: header.whole(f"tokenizer.ggml.{key}_token_id", 0, vocab_size - 1)
        for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in header.fields
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": header.whole("llama.feed_forward_length", 1, 1 << 20),
        "num_hidden_layers": header.whole("llama.block_count", 1, 1 << 12),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": positions,
        "rms_norm_eps": header.number("llama.attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "rope_parameters": _rope_parameters(header, head_size, positions),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": dtype,
        **ids,
    }


def _rope_parameters(header: GGUFHeader, head_size: int, positions: int) -> dict[str, Any]:
    """RoPE as transformers writes it. A rope_freqs tensor (Llama 3.1 and later) divides each frequency by its own
    factor, which is longrope with one set of factors and no scaling of attention."""
    base = {"rope_theta": header.number("llama.rope.freq_base", 1.0, 1e12, 10000.0)}
    scaling = header.text("llama.rope.scaling.type", "none")
    factors = header.tensors.get("rope_freqs.weight")
    if scaling == "none" and factors is None:
        return {"rope_type": "default", **base}
    if scaling == "linear" and factors is None:
        return {"rope_type": "linear", "factor": header.number("llama.rope.scaling.factor", 1.0, 1e4), **base}
    if scaling != "none" or factors is None:
        raise ModelFormatError(
            f"{header.path}: field llama.rope.scaling.type is {scaling!r}; known are none and linear, or a tensor "
            "rope_freqs.weight without either"
        )
    if factors.type != GGMLQuantizationType.F32 or factors.shape != (head_size // 2,):
        raise ModelFormatError(
            f"{header.path}: tensor rope_freqs.weight is {factors.type.name} {list(factors.shape)}; it must be F32 "
            f"[{head_size // 2}]"
        )
    with header.path.open("rb") as file:
        file.seek(factors.offset)
        values = np.frombuffer(file.read(factors.num_bytes), dtype="<f4")
    if not (values >= 1e-3).all() or not (values <= 1e6).all():
        raise ModelFormatError(f"{header.path}: tensor rope_freqs.weight holds values outside 0.001 to 1000000")
    shared = [float(str(value)) for value in values]
    return {
        "rope_type": "longrope", "short_factor": shared, "long_factor": shared, "factor": 1.0, "attention_factor": 1.0,
        "original_max_position_embeddings": positions, **base,
    }


def _wanted_tensors(header: GGUFHeader, config: dict[str, Any]) -> dict[str, _Wanted]:
    """What the folder's weights are made of, by GGUF name. Raises ModelFormatError naming one that does not fit."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, kv = heads * config["head_dim"], kv_heads * config["head_dim"]
    wanted = {"token_embd.weight": _Wanted("model.embed_tokens.weight", (vocab, hidden))}
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours, shape, rope_heads in (
            ("attn_norm", "input_layernorm", (hidden,), 0),
            ("attn_q", "self_attn.q_proj", (query, hidden), heads),
            ("attn_k", "self_attn.k_proj", (kv, hidden), kv_heads),
            ("attn_v", "self_attn.v_proj", (kv, hidden), 0),
            ("attn_output", "self_attn.o_proj", (hidden, query), 0),
            ("ffn_norm", "post_attention_layernorm", (hidden,), 0),
            ("ffn_gate", "mlp.gate_proj", (inner, hidden), 0),
            ("ffn_up", "mlp.up_proj", (inner, hidden), 0),
            ("ffn_down", "mlp.down_proj", (hidden, inner), 0),
        ):
            name = f"model.layers.{layer}.{ours}.weight"
            wanted[f"blk.{layer}.{theirs}.weight"] = _Wanted(name, shape, rope_heads)
    wanted["output_norm.weight"] = _Wanted("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        wanted["output.weight"] = _Wanted("lm_head.weight", (vocab, hidden))
    for name, tensor in wanted.items():
        found = header.tensors.get(name)
        if found is None:
            raise ModelFormatError(f"{header.path}: tensor {name} is missing")
        if found.shape != tensor.shape:
            raise ModelFormatError(
                f"{header.path}: tensor {name} has the shape {list(found.shape)}; the metadata make it "
                f"{list(tensor.shape)}"
            )
        if found.type not in TENSOR_TYPES:
            known = ", ".join(kind.name for kind in TENSOR_TYPES)
            raise ModelFormatError(f"{header.path}: tensor {name} has type {found.type.name}; supported are {known}")
    for name in header.tensors:
        if name not in wanted and name != "rope_freqs.weight":
            layers = config["num_hidden_layers"]
            raise ModelFormatError(f"{header.path}: tensor {name} is not part of a llama of {layers} layers")
    return wanted


def _write_weights(
    header: GGUFHeader, tensors: dict[str, _Wanted], dtype: str, target: Path, tell: Progress
) -> None:
    """A safetensors file, written piece by piece: 8 bytes of header length, a JSON header, the tensors' bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors.values():
        start, end = end, end + int(np.prod(tensor.shape)) * _ITEM_BYTES[dtype]
        entries[tensor.name] = {"dtype": _DTYPE_TAGS[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    written, told = 0, 0
    with header.path.open("rb") as source, target.open("wb") as sink:
        sink.write(struct.pack("<Q", len(head)) + head)
        for name, tensor in tensors.items():
            for values in _pieces(source, header.tensors[name], tensor.heads):
                piece = _encode(values, dtype, f"{header.path}: tensor {name}")
                sink.write(piece.data)
                written += piece.nbytes
            if written * 10 // end > told:
                told = written * 10 // end
                tell(f"converting {header.path.name} to {dtype} (once): {told * 10} %")


def _pieces(source: BinaryIO, tensor: GGUFTensor, heads: int) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor's values as float32 [rows, columns], some rows at a time, in the order of the folder's weights."""
    columns = tensor.shape[-1]
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    row_bytes = tensor.num_bytes // rows
    unit = rows // heads if heads else 1  # the rows of a head stay together
    step = max(1, CHUNK_ELEMENTS // (columns * unit)) * unit
    source.seek(tensor.offset)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        raw = np.frombuffer(source.read(count * row_bytes), dtype=np.uint8)
        if raw.size != count * row_bytes:
            raise ModelFormatError(f"{source.name}: it became shorter while tensor {tensor.name} was being read")
        raw = raw.reshape(count, row_bytes)
        if heads:  # GGUF: rows (i, half) of a head; here: rows (half, i), i = 0 .. head size / 2
            raw = raw.reshape(-1, unit // 2, 2, row_bytes).swapaxes(1, 2).reshape(count, row_bytes)
        with np.errstate(all="ignore"):  # what is not finite is refused by _encode
            yield dequantize(raw, tensor.type).reshape(count, columns)


def _encode(values: npt.NDArray[np.float32], dtype: str, where: str) -> npt.NDArray[Any]:
    """`values` in `dtype` (bfloat16 as its bits), rounded to nearest even. Raises ModelFormatError beyond its range."""
    peak = np.maximum(values.max(), -values.min())  # NaN when one is among them
    if not peak <= LARGEST[dtype]:
        found = f"values up to {peak:g}" if np.isfinite(peak) else "NaN or infinity"
        raise ModelFormatError(f"{where} holds {found}; {dtype} ends at {LARGEST[dtype]:g}")
    if dtype == "float32":
        return np.ascontiguousarray(values)
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def _write_tokenizer(header: GGUFHeader, config: dict[str, Any], folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template. Raises ModelFormatError when none can be built."""
    kind = header.text("tokenizer.ggml.model")
    split = header.text("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and split not in PRE_TOKENIZERS:
        raise ModelFormatError(
            f"{header.path}: field tokenizer.ggml.pre is {split!r}; known are {', '.join(PRE_TOKENIZERS)}"
        )
    llama3 = kind == "gpt2" and split in LLAMA3_PRE_TOKENIZERS
    options = {"add_bos_token": True} if llama3 else {}  # holds where the file does not say
    with tempfile.TemporaryDirectory(dir=folder) as alone:  # no other file beside the model's may have a say
        (Path(alone) / "model.gguf").symlink_to(header.path.resolve())
        try:
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
                alone, gguf_file="model.gguf", local_files_only=True, **options
            )
        except Exception as error:  # the builders raise whatever a bad vocabulary makes them stumble over
            reason = repr(error)[:500]
            raise ModelFormatError(f"{header.path}: fields tokenizer.ggml.* make no tokenizer: {reason}") from error
    backend = tokenizer.backend_tokenizer
    if split == "smollm":  # every digit alone, before the rest is split (transformers splits like GPT-2)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if llama3:
        backend.model.ignore_merges = True  # words that are in the vocabulary as a whole are taken as a whole
    if len(tokenizer) > config["vocab_size"]:
        raise ModelFormatError(
            f"{header.path}: the tokenizer has {len(tokenizer)} tokens, the model only {config['vocab_size']}"
        )
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(folder)


def _generation_config(header: GGUFHeader, config: dict[str, Any]) -> dict[str, Any]:
    """End tokens: end of text, of turn and of message, as far as the file names them."""
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    ends = [header.whole(key, 0, config["vocab_size"] - 1) for key in keys if key in header.fields]
    others = {key: value for key, value in config.items() if key in ("bos_token_id", "pad_token_id")}
    return {**others, "eos_token_id": list(dict.fromkeys(ends))}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _check_space(root: Path, tensors: dict[str, _Wanted], dtype: str) -> None:
    needed = sum(int(np.prod(tensor.shape)) for tensor in tensors.values()) * _ITEM_BYTES[dtype] + SPARE_BYTES
    free = shutil.disk_usage(root).free
    if free < needed:
        raise ConfigError(f"the cache folder {root} has {free} bytes free, this model needs {needed}; choose another")


def _sync(folder: Path) -> None:
    """Force the folder's files to disk, so that after a power cut the renamed folder is not full of holes."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
