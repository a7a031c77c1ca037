"""Runs batches on one device: model, KV pool, inputs, sampling.

Owns everything that lives on the device of a shard. Decides nothing about who runs. A batch is carried out by `run`;
batches are carried out in the order they are given.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.kvstore.block import Namespace
from tournant.workers.batch import Batch, StepResult
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.forward_input import ForwardInput, InputBuilder
from tournant.workers.kv_cache import KVCache, pool_blocks
from tournant.workers.messages import TokenLogprobs
from tournant.workers.model_files import ModelFiles
from tournant.workers.models.decoder import REVISION, Decoder
from tournant.workers.models.families import read_decoder_config
from tournant.workers.models.linear import can_pack
from tournant.workers.sampler import Sampler, token_logprobs
from tournant.workers.weights import load_checkpoint

TORCH_DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
CPU_BLOCK_TOKENS = 16
LOGPROB_ROWS = 64  # rows of prompt log-probabilities computed at once: bounds memory at 64 x vocabulary floats
SELF_CHECK_ROWS = (1, 7, 16, 300)


class ModelRunner:
    """One shard's device side.

    Raises ModelFormatError for unusable files, ConfigError for a configuration that does not fit model or machine.
    """

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        # said outright, because Ray gives its workers OMP_NUM_THREADS=1 and the engine inherits it
        torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        self.config = config
        self.decoder_config = read_decoder_config(files.folder, config.max_model_len)
        dtype = TORCH_DTYPES[config.dtype]
        checkpoint = load_checkpoint(files.folder)
        packed = not config.deterministic and can_pack(dtype)
        self.decoder = Decoder(self.decoder_config, checkpoint, dtype, packed=packed)
        if unused := checkpoint.unused():
            raise ModelFormatError(
                f"{files.folder} holds {len(unused)} tensors that a model of {self.decoder_config.num_layers} layers "
                f"does not use, the first is {unused[0]!r}; config.json does not describe this checkpoint"
            )
        try:
            self.layout = self.decoder.layout(config.block_tokens or CPU_BLOCK_TOKENS)
        except ValueError as error:
            raise ModelFormatError(f"config.json describes a model that has no KV layout here: {error}") from error
        self.cache = KVCache(self.layout, pool_blocks(config, self.layout), torch.device("cpu"))
        max_blocks = -(-self.decoder_config.max_model_len // self.layout.block_tokens)
        self.inputs = InputBuilder(
            self.layout, self.decoder_config.num_heads, config.max_num_seqs, max_blocks, pad_rows=config.deterministic
        )
        vocab_size = self.decoder_config.vocab_size
        self.sampler = Sampler(vocab_size, config.max_num_seqs, self.decoder_config.eos_token_ids)
        self.namespace = Namespace(
            weights_id=files.weights_id,
            kv_form=self.layout.kv_form,
            numerics="/".join(
                (
                    str(dtype).removeprefix("torch."),
                    REVISION,
                    ops.backend(),
                    "deterministic" if config.deterministic else "fast",
                )
            ),
            layout_id=self.layout.layout_id,
        )
        self.long_layout_id = self.decoder.layout(self.layout.block_tokens, long=True).layout_id
        if config.deterministic:
            self.check_row_independence()

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Carry out one batch: copies, then forward, then one token per sampling entry."""
        for state in batch.new_rows:
            self.sampler.start(state)
        if batch.copies:
            self.cache.copy_blocks(batch.copies)
        step = self.inputs.build(batch)
        hidden = self.decoder.forward(step, self.cache.tensor)
        result = StepResult(token_ids=[])
        for entry, num_top, following in batch.prompt_logprobs:
            result.prompt_logprobs[entry] = self._prompt_logprobs(batch, hidden, entry, num_top, following)
        if batch.sampling:
            logits = self._sampling_logits(hidden, step)
            rows = [batch.rows[entry] for entry in batch.sampling]
            positions = np.asarray([batch.starts[entry] + batch.counts[entry] for entry in batch.sampling])
            tokens, result.logprobs = self.sampler.sample(logits, rows, positions)
            self.inputs.last_tokens[rows] = tokens
            result.token_ids = tokens.tolist()
        return result

    def _sampling_logits(self, hidden: torch.Tensor, step: ForwardInput) -> torch.Tensor:
        rows = step.sample_rows
        count = len(rows)
        if self.config.deterministic:
            rows = torch.cat([rows, rows.new_zeros(-count % 16)])
        return self.decoder.logits(hidden[rows])[:count]

    def _prompt_logprobs(
        self, batch: Batch, hidden: torch.Tensor, entry: int, num_top: int, following: int | None
    ) -> list[TokenLogprobs]:
        first = sum(batch.counts[:entry])
        targets = batch.token_ids[first + 1 : first + batch.counts[entry]]
        if following is not None:
            targets.append(following)
        found: list[TokenLogprobs] = []
        for start in range(0, len(targets), LOGPROB_ROWS):
            part = targets[start : start + LOGPROB_ROWS]
            rows = torch.zeros(LOGPROB_ROWS, dtype=torch.int64)  # a fixed count: the same bits for every chunk size
            rows[: len(part)] = torch.arange(first + start, first + start + len(part))
            logits = self.decoder.logits(hidden[rows])[: len(part)]
            found.extend(token_logprobs(logits, part, [num_top] * len(part)))
        return found

    @torch.inference_mode()
    def check_row_independence(self) -> None:
        """Deterministic mode's start-up check: a layer and the head give a row the same bits beside 1 to 300 others.

        Raises ConfigError when they do not on this machine (then tokens could depend on batch mates).
        """
        if ops.backend() != "c":
            raise ConfigError(
                "deterministic is true, but no C compiler was found and the plain-PyTorch kernels do not promise equal "
                "bits; install gcc or use deterministic: false"
            )
        most = max(SELF_CHECK_ROWS)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(most, self.decoder_config.hidden_size, generator=generator).to(self.decoder.dtype)
        wanted: tuple[torch.Tensor, torch.Tensor] | None = None
        for count in reversed(SELF_CHECK_ROWS):
            found = self._layer_and_head(hidden[:count])
            wanted = wanted or found
            if not all(torch.equal(a, b[:count]) for a, b in zip(found, wanted, strict=True)):
                raise ConfigError(
                    f"deterministic is true, but {self.decoder.dtype} matrix products of this machine give a row other "
                    f"bits among {count} rows than among {most}; use dtype float32 or deterministic: false"
                )

    def _layer_and_head(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row i as a sequence of one token through layer 0 and the head, padded as `run` does."""
        count, tokens = len(hidden), self.layout.block_tokens
        layout = KVLayout(1, self.layout.num_kv_heads, tokens, self.layout.head_size, self.layout.dtype)
        kv_cache = layout.allocate(count, torch.device("cpu"))
        builder = InputBuilder(layout, self.decoder_config.num_heads, count, 1, pad_rows=True)
        batch = Batch(
            step=0,
            rows=list(range(count)),
            starts=[0] * count,
            counts=[1] * count,
            rope_offsets=[0] * count,
            token_ids=[0] * count,
            block_updates=[(row, 0, [row]) for row in range(count)],
            sampling=list(range(count)),
        )
        step = builder.build(batch)
        rows = len(step.input_ids)
        padded = torch.zeros(rows, hidden.shape[1], dtype=hidden.dtype)
        padded[:count] = hidden
        out = self.decoder.layer(0, padded, padded.clone(), step, kv_cache, cache_layer=0)
        return out[:count], self._sampling_logits(out, step)
