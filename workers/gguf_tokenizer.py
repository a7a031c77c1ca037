"""The tokenizer that a GGUF file describes, written as the tokenizer files of a model folder.

Owns which kinds of vocabularies are known, and which tokens end an answer. transformers builds the tokenizer; where the
file or llama.cpp's conventions say more than it heeds, that is corrected here.

Kinds (field tokenizer.ggml.model): "gpt2", byte-level pairs, split as field tokenizer.ggml.pre says; "llama",
SentencePiece pairs with byte fallback, in the three forms of Llama, Gemma and Phi-3.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

from tournant.workers.errors import ModelFormatError
from tournant.workers.gguf_architectures import token_id
from tournant.workers.gguf_header import GGUFHeader


@dataclass(frozen=True, slots=True)
class _Split:
    """begin: a text begins with the begin token unless the file says otherwise; whole_words: a word that the vocabulary
    holds as a whole is taken as a whole, whatever the merges make of it.
    """

    begin: bool = False
    whole_words: bool = False


_LLAMA3 = _Split(begin=True, whole_words=True)
BYTE_LEVEL_SPLITS = {
    "default": _Split(),
    "gpt-2": _Split(),
    "smollm": _Split(),
    "qwen2": _Split(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _Split(whole_words=True),  # Llama 3's vocabulary without a begin token: SmolLM3
    "tekken": _Split(begin=True, whole_words=True),  # Mistral
    "gpt-4o": _Split(),  # Phi-4-mini
    "dbrx": _Split(),  # Phi-4
}
"""How byte-level vocabularies may say that they split text; another way would silently give other tokens."""

KINDS = ("gpt2", "llama")
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Added tokens that end a turn in every vocabulary that has them, whether or not the file says so."""

MAX_PIECES_BYTES = 4 << 20
"""Of a SentencePiece vocabulary (Gemma 3's has about 2 MB): every character of a piece may become a merge."""

PHI3_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def write_tokenizer(header: GGUFHeader, config: dict[str, Any], folder: Path) -> list[int]:
    """Write tokenizer.json, tokenizer_config.json and the chat template; return the tokens that end an answer.

    config: that of gguf_architectures.read_config. Raises ModelFormatError when the kind of vocabulary or its way of
    splitting is not known, or no tokenizer can be built that fits the model.
    """
    kind = header.text("tokenizer.ggml.model")
    if kind not in KINDS:
        raise ModelFormatError(f"{header.path}: field tokenizer.ggml.model is {kind!r}; known are {', '.join(KINDS)}")
    split = header.text("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and split not in BYTE_LEVEL_SPLITS:
        raise ModelFormatError(
            f"{header.path}: field tokenizer.ggml.pre is {split!r}; known are {', '.join(BYTE_LEVEL_SPLITS)}"
        )
    pieces_bytes = header.array("tokenizer.ggml.tokens").text_bytes
    if kind == "llama" and pieces_bytes > MAX_PIECES_BYTES:
        raise ModelFormatError(
            f"{header.path}: field tokenizer.ggml.tokens has {pieces_bytes} bytes; at most {MAX_PIECES_BYTES} are "
            "allowed"
        )
    begin = kind == "llama" or BYTE_LEVEL_SPLITS[split].begin
    tokenizer = _build(header, folder, {"add_bos_token": True} if begin else {})
    if kind == "gpt2":
        _correct_byte_level(tokenizer.backend_tokenizer, split)
    elif not header.fields.get("tokenizer.ggml.add_space_prefix", True):
        _drop_prefix_space(tokenizer.backend_tokenizer)
    if len(tokenizer) > config["vocab_size"]:
        raise ModelFormatError(
            f"{header.path}: the tokenizer has {len(tokenizer)} tokens, the model only {config['vocab_size']}"
        )
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    if kind == "llama" and header.text("general.architecture") == "phi3":
        _strip_after_marks(folder / "tokenizer.json")
    added = tokenizer.get_added_vocab()
    named = [token_id(header, key, config["vocab_size"]) for key in ("eos", "eot", "eom")]
    ends = [*named, *(added.get(text) for text in TURN_ENDS)]
    return list(dict.fromkeys(token for token in ends if token is not None))


def _build(header: GGUFHeader, folder: Path, options: dict[str, Any]) -> Any:
    """What transformers makes of the file alone. options: hold where the file does not say."""
    with tempfile.TemporaryDirectory(dir=folder) as alone:  # no other file beside the model's may have a say
        (Path(alone) / "model.gguf").symlink_to(header.path.resolve())
        try:
            return transformers.PreTrainedTokenizerFast.from_pretrained(
                alone, gguf_file="model.gguf", local_files_only=True, **options
            )
        except Exception as error:  # the builders raise whatever a bad vocabulary makes them stumble over
            reason = repr(error)[:500]
            raise ModelFormatError(f"{header.path}: fields tokenizer.ggml.* make no tokenizer: {reason}") from error


def _correct_byte_level(backend: Tokenizer, split: str) -> None:
    if split == "smollm":  # every digit alone, before the rest is split (transformers splits like GPT-2)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.model.ignore_merges = BYTE_LEVEL_SPLITS[split].whole_words


def _drop_prefix_space(backend: Tokenizer) -> None:
    """A text does not begin with a space of its own."""
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):  # Llama; Phi-3's is in the normalizer
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _strip_after_marks(path: Path) -> None:
    """Phi-3's marks swallow the white space that follows them."""
    state = json.loads(path.read_text(encoding="utf-8"))
    for token in state["added_tokens"]:
        token["rstrip"] = token["content"] not in PHI3_UNSTRIPPED
    path.write_text(json.dumps(state, ensure_ascii=False, indent=2), encoding="utf-8")
