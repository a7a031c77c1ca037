"""What a decoder is made of, read from a model folder through transformers' own configuration classes.

Owns the few numbers and switches that the one decoder definition is told. How each architecture sets them is in
families.py; which ones are known at all is model_folder.py's business.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.json_files import read_json_object
from tournant.workers.models.rope import Rope

MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Where layers of one model differ. window: tokens a query sees, itself included, 0 = all before it;
    rope: index into `DecoderConfig.ropes`, None = no rotation.
    """

    window: int = 0
    rope: int | None = 0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer. Sizes in elements, max_positions in tokens.

    qk_norm: q and k are normalised per head before rotation; offset_norms: norms multiply by 1 + weight in fp32
    (Gemma); sandwich_norms: attention and MLP outputs are normalised before they are added; fused_projections: the
    checkpoint holds qkv and gate_up in one tensor each; softcaps: 0 = none; activation: of the gate.

    Of a part of a model, num_layers counts its layers, the first of which is first_layer of all `layers`, and heads and
    intermediate_size are those of the part; everything else is the whole model's.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    max_model_len: int
    rms_eps: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    ropes: tuple[Rope, ...]
    layers: tuple[LayerKind, ...]
    attention_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    offset_norms: bool = False
    sandwich_norms: bool = False
    fused_projections: bool = False
    activation: str = "silu"
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    first_layer: int = 0

    @property
    def begins(self) -> bool:
        """Whether the model's first layer, and so its embedding, is here."""
        return self.first_layer == 0

    @property
    def ends(self) -> bool:
        """Whether the model's last layer, and so its head, is here."""
        return self.first_layer + self.num_layers == len(self.layers)

    def kind_of(self, index: int) -> LayerKind:
        """What layer `index` of this part is."""
        return self.layers[self.first_layer + index]

    @property
    def rope_switch(self) -> int:
        """Sequences of more than this many tokens rotate by the long frequencies; 0 = there is one set only."""
        return max(rope.switch for rope in self.ropes)

    def rope_digest(self, *, long: bool = False) -> bytes:
        """SHA-256 over all rotations and which layer uses which: part of the layout id of every key."""
        hasher = hashlib.sha256()
        for rope in self.ropes:
            hasher.update(rope.digest(long=long))
        hasher.update(repr([kind.rope for kind in self.layers]).encode())
        return hasher.digest()


def check_limit(max_model_len: int | None, positions: int) -> int:
    """Tokens a sequence may have. Raises ConfigError when more are asked for than the model has positions."""
    if max_model_len is None:
        return positions
    if max_model_len > positions:
        raise ConfigError(
            f"max_model_len is {max_model_len}; this model has {positions} positions: choose at most that"
        )
    return max_model_len


def read_eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """End-of-text tokens: generation_config.json's where it names some, else config.json's."""
    found: Any = config.eos_token_id
    generation = folder / "generation_config.json"
    if generation.exists():
        from_file = read_json_object(generation, MAX_JSON_BYTES).get("eos_token_id")
        found = from_file if from_file is not None else found
    if found is None:
        return ()
    tokens = found if isinstance(found, list) else [found]
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise ModelFormatError(
                f"eos_token_id of {folder.name} names token {token!r}; this model's are 0 to {config.vocab_size - 1}"
            )
    return tuple(tokens)
