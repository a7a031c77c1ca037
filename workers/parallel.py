"""How a model is split over ranks: tensor parallel within a layer, pipeline parallel between layers.

Owns the arithmetic of a split: which layers, heads, inner columns and vocabulary rows a rank holds, which splits a
model allows, and which part of which tensor a rank reads. Pure but for that reading; how ranks speak is rank_group.py's
business.

Invariants:
 1. Within a stage, query heads, inner columns and vocabulary rows of the ranks tile those of the model; so do KV heads,
    or, when there are more ranks than KV heads, equally many ranks in a row hold each, the first of which owns it.
 2. Layers of the stages tile those of the model.
 3. A query head is where its KV head is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tournant.kernels.layout import KVLayout
from tournant.kernels.quantized import GROUP
from tournant.kvstore.block import Part
from tournant.workers.errors import ConfigError
from tournant.workers.models.decoder_config import DecoderConfig
from tournant.workers.split import Split
from tournant.workers.weights import Checkpoint, Cut, FilePlace

VOCAB_STEP = 16  # vocabulary rows of a rank are padded to a multiple of this: kernels of matrix products like it
INNER_STEPS = (GROUP, 16, 8, 1)  # inner columns are dealt out in pieces of the first that leaves every rank one


def possible_tensor_sizes(config: DecoderConfig) -> list[int]:
    """Numbers of ranks that can share a layer of this model: they divide the heads, and divide the KV heads or are a
    multiple of them.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return [
        size
        for size in range(1, heads + 1)
        if heads % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
        and size <= min(config.intermediate_size, config.vocab_size)
    ]


def check_split(config: DecoderConfig, tensor: int, pipeline: int) -> Split:
    """The split, if this model allows it. Raises ConfigError naming the possible sizes; no weight need be there."""
    possible = possible_tensor_sizes(config)
    if isinstance(tensor, bool) or tensor not in possible:
        raise ConfigError(
            f"tensor_parallel_size is {tensor!r}, but the model has {config.num_heads} heads and "
            f"{config.num_kv_heads} KV heads; possible are {', '.join(map(str, possible))}"
        )
    layers = len(config.layers)
    if isinstance(pipeline, bool) or not isinstance(pipeline, int) or not 1 <= pipeline <= layers:
        raise ConfigError(
            f"pipeline_parallel_size is {pipeline!r}, but the model has {layers} layers; possible are 1 to {layers}"
        )
    return Split(tensor, pipeline)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank of a split holds of a model.

    layers: of its stage; heads, kv_heads, inner: of each of these; vocab: rows of embedding and head, of which
    `vocab_share` fit, the rest being padding; owns_kv: whether it is this rank that publishes its KV heads. whole: the
    model; config: what this rank's decoder is told.
    """

    split: Split
    rank: int
    layers: range
    heads: range
    kv_heads: range
    inner: range
    vocab: range
    vocab_share: int
    owns_kv: bool
    whole: DecoderConfig
    config: DecoderConfig

    @property
    def part(self) -> Part:
        """Name of what this rank holds of every block."""
        return Part(self.layers.start, self.layers.stop, self.kv_heads.start, self.kv_heads.stop)

    def layout(self, block_tokens: int, kv_dtype: torch.dtype) -> KVLayout:
        """Form of what this rank holds of a block."""
        digest = self.whole.rope_digest()
        return KVLayout(len(self.layers), len(self.kv_heads), block_tokens, self.whole.head_size, kv_dtype, digest)

    def cut(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Cut | None]:
        """The whole shape of a tensor that this rank's decoder wants in `shape`, and which part it holds; None for all.
        The biases of products that are summed over ranks are rank 0's, zero elsewhere.
        """
        if self.split.tensor == 1:
            return shape, None
        whole, size = self.whole, self.whole.head_size
        q, kv = whole.num_heads * size, whole.num_kv_heads * size
        own_q, own_kv = _scaled(self.heads, size), _scaled(self.kv_heads, size)
        inner, own_inner = whole.intermediate_size, self.inner
        module, kind = name.rsplit(".", 2)[-2:]
        if module in ("embed_tokens", "lm_head"):
            return shape, Cut((self.vocab,), padding=self.vocab_share - len(self.vocab))
        if module in ("o_proj", "down_proj"):
            if kind == "bias":
                first = self.rank % self.split.tensor == 0
                return shape, None if first else Cut((), padding=shape[0])
            columns, total = (own_q, q) if module == "o_proj" else (own_inner, inner)
            return (shape[0], total), Cut((range(shape[0]),), columns)
        pieces = {
            "q_proj": [(own_q, q)],
            "k_proj": [(own_kv, kv)],
            "v_proj": [(own_kv, kv)],
            "qkv_proj": [(own_q, q), (own_kv, kv), (own_kv, kv)],
            "gate_proj": [(own_inner, inner)],
            "up_proj": [(own_inner, inner)],
            "gate_up_proj": [(own_inner, inner)] * 2,
        }.get(module)
        if pieces is None:
            return shape, None
        rows, start = [], 0
        for own, total in pieces:
            rows.append(range(start + own.start, start + own.stop))
            start += total
        return (start, *shape[1:]), Cut(tuple(rows))


def shard_of(config: DecoderConfig, split: Split, rank: int) -> Shard:
    """What `rank` holds of a model under a split that `check_split` made."""
    tensor, place = split.tensor, rank % split.tensor
    layers = _share(len(config.layers), split.pipeline, split.stage_of(rank))
    heads = _share(config.num_heads, tensor, place)
    copies = max(1, tensor // config.num_kv_heads)
    kv_heads = _share(config.num_kv_heads, tensor // copies, place // copies)
    inner = _inner_share(config.intermediate_size, tensor, place)
    share = config.vocab_size
    if tensor > 1:
        share = -(-config.vocab_size // (tensor * VOCAB_STEP)) * VOCAB_STEP
    vocab = range(min(place * share, config.vocab_size), min((place + 1) * share, config.vocab_size))
    local = replace(
        config,
        num_layers=len(layers),
        first_layer=layers.start,
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        intermediate_size=len(inner),
    )
    owns = place % copies == 0
    return Shard(split, rank, layers, heads, kv_heads, inner, vocab, share, owns, config, local)


def shards_of(config: DecoderConfig, split: Split) -> Iterator[Shard]:
    """Every rank's."""
    return (shard_of(config, split, rank) for rank in range(split.size))


def keeps_groups(config: DecoderConfig, split: Split) -> bool:
    """Whether every rank's columns of quantised matrices are whole groups, so that they can be multiplied as they are.
    All ranks must agree, or a row's bits would depend on who computes it.
    """
    if split.tensor == 1:
        return True
    return all(
        edge % GROUP == 0
        for shard in shards_of(config, Split(split.tensor))
        for columns in (_scaled(shard.heads, config.head_size), shard.inner)
        for edge in (columns.start, columns.stop)
    )


class ShardTensors:
    """A checkpoint as one rank reads it: its decoder asks for tensors in the shapes of its own configuration and gets
    its part of them; nothing else is read.
    """

    def __init__(self, checkpoint: Checkpoint, shard: Shard) -> None:
        self._checkpoint = checkpoint
        self._shard = shard

    @property
    def has_quantized(self) -> bool:
        """As of the checkpoint, unless the split cuts groups apart."""
        return self._checkpoint.has_quantized and keeps_groups(self._shard.whole, self._shard.split)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """This rank's part; see `Checkpoint.take`."""
        whole, cut = self._shard.cut(name, shape)
        return self._checkpoint.take(name, whole, dtype, cut)

    def take_quantized(self, name: str, shape: tuple[int, int]) -> tuple[str, torch.Tensor] | None:
        """This rank's part; see `Checkpoint.take_quantized`."""
        whole, cut = self._shard.cut(name, shape)
        return self._checkpoint.take_quantized(name, (whole[0], whole[1]), cut)

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> FilePlace | None:
        """Where a file has this rank's part, if that is the whole; see `Checkpoint.place`."""
        whole, cut = self._shard.cut(name, shape)
        return self._checkpoint.place(name, whole, dtype) if cut is None else None

    def unused(self) -> list[str]:
        """Names of this rank's layers that were not taken; what lies outside all layers another rank may have taken."""
        stages, config = self._shard.layers, self._shard.whole
        known = {"model.embed_tokens.weight", "model.norm.weight"}
        known |= set() if config.tied_embeddings else {"lm_head.weight"}
        others = {f"model.layers.{index}" for index in range(len(config.layers)) if index not in stages}
        return [
            name
            for name in self._checkpoint.unused()
            if name not in known and ".".join(name.split(".", 3)[:3]) not in others
        ]


def _share(total: int, count: int, index: int) -> range:
    """The index-th of `count` ranges of nearly equal length that tile 0..total."""
    return range(index * total // count, (index + 1) * total // count)


def _inner_share(total: int, count: int, index: int) -> range:
    step = next(step for step in INNER_STEPS if total % step == 0 and total // step >= count)
    return _scaled(_share(total // step, count, index), step)


def _scaled(part: range, factor: int) -> range:
    return range(part.start * factor, part.stop * factor)
