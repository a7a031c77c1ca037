"""M and its siblings: random-weight llama folders that load like any model from a hub.

Owns the shapes, the random weights and the byte-level tokenizer. The same arguments give the same weights, so a
folder's weights_id lasts. Weights are scaled so that greedy output keeps changing, its choices are not near ties, and
logits depend on every earlier token: a test that compares tokens then notices a single wrong KV entry.

Tokenizer: ids 0 to 255 are the bytes themselves (one token per UTF-8 byte, so every text round-trips), 256 to 259 the
special tokens, the rest filler tokens of three letters that encoding never makes but a model may generate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 256, 257, 258, 259
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
NUM_FIXED_TOKENS = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

M: Mapping[str, Any] = {}
"""The model of most tests: 2 layers, 4 heads over 2 KV heads of 64, hidden 128."""

TIED: Mapping[str, Any] = {
    "num_layers": 3,
    "hidden": 96,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_size": 32,
    "intermediate": 160,
    "tie": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
"""Three layers, tied embeddings, another RoPE base, a group of two query heads for each of three KV heads."""

MQA: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden": 120,
    "num_heads": 5,
    "num_kv_heads": 1,
    "head_size": 80,
    "intermediate": 211,
    "vocab_size": 389,
    "rms_norm_eps": 1e-5,
}
"""One KV head for five query heads, head size 80, and widths that fit no vector register (211, 389)."""

SHAPES: Mapping[str, Mapping[str, Any]] = {"m": M, "tied": TIED, "mqa": MQA}


def build_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 64,
    intermediate: int = 256,
    vocab_size: int = 512,
    max_positions: int = 2048,
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
    add_bos: bool = False,
    **overrides: Any,
) -> Path:
    """Write a llama with random weights as a Hugging Face folder and return the folder.

    add_bos: the tokenizer puts <|bos|> before every text, and the chat template begins with it too, as many real models
    do; overrides go to `LlamaConfig`. Raises ValueError when vocab_size cannot hold the bytes and special tokens.
    """
    if vocab_size < NUM_FIXED_TOKENS:
        raise ValueError(f"vocab_size is {vocab_size}; bytes and special tokens need at least {NUM_FIXED_TOKENS}")
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_size,
        intermediate_size=intermediate,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
        dtype=dtype,
        architectures=["LlamaForCausalLM"],
        bos_token_id=BOS_ID,
        eos_token_id=[EOS_ID, IM_END_ID],
        pad_token_id=EOS_ID,
        **overrides,
    )
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=BOS_ID, eos_token_id=[EOS_ID, IM_END_ID], pad_token_id=EOS_ID).save_pretrained(folder)
    save_file(_random_weights(config, seed, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(folder, vocab_size, max_positions, add_bos)
    return folder


def _random_weights(config: LlamaConfig, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Normal weights by name, scaled by what each matrix does; norms around one; biases, if any, small."""
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in LlamaForCausalLM(config).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            tensor = 0.5 + torch.rand(shape, generator=generator)
        else:
            tensor = torch.randn(shape, generator=generator) * _std(name, shape)
        weights[name] = tensor.to(dtype).contiguous()
    return weights


def _std(name: str, shape: torch.Size) -> float:
    """Standard deviation for a weight. With inputs of size one: scores of about 2, blocks that outweigh the embedding
    (else tied models only repeat their last token), logits of about 3."""
    if len(shape) == 1:
        return 0.1
    gains = {"q_proj": 1.4, "k_proj": 1.4, "o_proj": 5.0, "down_proj": 5.0, "embed_tokens": 3.0, "lm_head": 3.0}
    gain = next((gain for part, gain in gains.items() if part in name), 1.0)
    return gain / math.sqrt(shape[-1])


def _byte_alphabet() -> list[str]:
    """The character that byte-level tokenizers write for each byte, by byte value.

    Printable bytes stand for themselves and the others, in order, for the characters from U+0100 on: the encoding that
    `tokenizers.pre_tokenizers.ByteLevel` and `tokenizers.decoders.ByteLevel` use.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _save_tokenizer(folder: Path, vocab_size: int, max_positions: int, add_bos: bool) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    fillers = [letters[i // 26 % 26] + letters[i % 26] + letters[i // 676 % 26] for i in range(vocab_size)]
    texts = [*_byte_alphabet(), *SPECIAL_TOKENS, *fillers[: vocab_size - NUM_FIXED_TOKENS]]
    tokenizer = Tokenizer(models.BPE(vocab={text: token for token, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS_ID)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|eos|>",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        chat_template=("{{ bos_token }}" if add_bos else "") + CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder, save_jinja_files=False)
