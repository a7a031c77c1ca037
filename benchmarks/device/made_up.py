"""Models of random weights made on the spot, and batches for them: the engine's own parts without files.

Weights are scaled so that greedy output keeps changing and its choices are not near ties.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from tournant.workers.batch import Batch, RowState
from tournant.workers.config import EngineConfig
from tournant.workers.device import Device
from tournant.workers.model_folder import ModelFiles
from tournant.workers.model_runner import ModelRunner
from tournant.workers.models.decoder_config import DecoderConfig, LayerKind
from tournant.workers.models.described import DescribedModel
from tournant.workers.models.rope import Rope
from tournant.workers.sampling_params import SamplingParams
from tournant.workers.weights import Checkpoint

GAINS = {"q_proj": 1.4, "k_proj": 1.4, "o_proj": 5.0, "down_proj": 5.0, "embed_tokens": 3.0, "lm_head": 3.0}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def made_up_config(
    num_layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    intermediate: int,
    vocab: int,
    max_model_len: int,
) -> DecoderConfig:
    """A llama of these sizes."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float) / head_size
    return DecoderConfig(
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_positions=max_model_len,
        max_model_len=max_model_len,
        rms_eps=1e-5,
        tied_embeddings=False,
        eos_token_ids=(0,),
        ropes=(Rope(500_000.0**-exponents, 1.0),),
        layers=(LayerKind(),) * num_layers,
        attention_scale=head_size**-0.5,
    )


class MadeUpCheckpoint(Checkpoint):
    """Weights that exist when they are asked for, the same for the same order of asking; drawn on `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__({}, {})
        self._generator = torch.Generator(device).manual_seed(0)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Normal numbers of a size that suits the name; norms around one."""
        generator, device = self._generator, self._generator.device
        if name.endswith("norm.weight"):
            return (0.5 + torch.rand(shape, generator=generator, device=device)).to(dtype)
        gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
        weight = torch.empty(shape, dtype=dtype, device=device)
        return weight.normal_(0.0, gain / math.sqrt(shape[-1]), generator=generator)


class MadeUpRunner(ModelRunner):
    """The engine's device side over a made-up model, its weights drawn on `drawn_on` (the device, if None)."""

    def __init__(
        self, config: EngineConfig, model: DecoderConfig, device: Device, drawn_on: torch.device | None = None
    ) -> None:
        self._drawn_on = drawn_on or device.torch_device
        super().__init__(config, DescribedModel(ModelFiles(Path(), "made up", bytes(32)), model), device)

    def read_model(self, model: DescribedModel) -> tuple[DecoderConfig, Checkpoint]:
        """The model it was given."""
        return model.decoder, MadeUpCheckpoint(self._drawn_on)


def decode_batch(contexts: list[int], block_tokens: int, *, first_block: int = 0) -> Batch:
    """A greedy decode step of one sequence per context, in blocks of their own from first_block on."""
    updates, block = [], first_block
    for row, context in enumerate(contexts):
        count = -(-context // block_tokens)
        updates.append((row, 0, list(range(block, block + count))))
        block += count
    rows = list(range(len(contexts)))
    return Batch(
        step=0,
        rows=rows,
        starts=[context - 1 for context in contexts],
        counts=[1] * len(rows),
        rope_offsets=[0] * len(rows),
        token_ids=[7 + row for row in rows],
        sampling=rows,
        new_rows=[RowState(row, [7], 1, GREEDY, seed=0, index=0) for row in rows],
        block_updates=updates,
    )


def prefill_batch(row: int, start: int, count: int, block_tokens: int, vocab: int) -> Batch:
    """A chunk of one prompt, from block 0 on; a token is sampled."""
    blocks = list(range(-(-(start + count) // block_tokens)))
    return Batch(
        step=0,
        rows=[row],
        starts=[start],
        counts=[count],
        rope_offsets=[0],
        token_ids=[(17 + 31 * place) % vocab for place in range(start, start + count)],
        sampling=[0],
        new_rows=[RowState(row, [7], 1, GREEDY, seed=0, index=0)],
        block_updates=[(row, 0, blocks)],
    )
