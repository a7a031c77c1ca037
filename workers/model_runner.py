"""Runs batches on one device: model, KV pool, inputs, sampling.

Owns everything that lives on the device of a shard. Decides nothing about who runs. A batch is begun by `run` and
carried out in the order it is given; on a GPU `run` returns while the device still works, and nothing of the step
passes through the CPU: tokens stay on the device for the next step and are copied back beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.kernels.quantized import KINDS
from tournant.kvstore.block import Namespace
from tournant.kvstore.token_bucket import Pace
from tournant.workers.batch import Batch, PendingStep, StepResult
from tournant.workers.config import EngineConfig
from tournant.workers.decode_graphs import DecodeGraphs
from tournant.workers.device import Device, make_device
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.forward_input import ForwardInput, InputBuilder
from tournant.workers.kv_cache import KVCache, kv_cache_dtype
from tournant.workers.models.decoder import REVISION, Decoder
from tournant.workers.models.decoder_config import DecoderConfig
from tournant.workers.models.described import DescribedModel
from tournant.workers.models.linear import can_pack
from tournant.workers.overflow_attention import InPlaceStep, OverflowAttention, OverflowStep
from tournant.workers.overflow_pool import OverflowPool
from tournant.workers.sampler import Logprobs, Sampled, Sampler
from tournant.workers.warm_up import kinds_of_steps, largest_batch
from tournant.workers.weights import Tensors, load_checkpoint
from tournant.workers.weights_offload import LayerTiers

TORCH_DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
LOGPROB_ROWS = 64  # rows of prompt log-probabilities computed at once: bounds memory at 64 x vocabulary floats
SELF_CHECK_ROWS = (1, 7, 16, 300)


class DeviceStep:
    """A batch whose results are on their way from the device to the CPU. See `PendingStep`."""

    def __init__(
        self,
        device: Device,
        sampled: Sampled | None,
        prompts: dict[int, list[Logprobs]],
        overflow: OverflowStep | InPlaceStep | None,
    ) -> None:
        self.sampled = sampled
        self._overflow = overflow
        self._prompts = prompts
        tensors = [tensor for parts in prompts.values() for part in parts for tensor in part.tensors]
        if sampled is not None:
            tensors += [sampled.tokens, *(sampled.logprobs.tensors if sampled.logprobs is not None else [])]
        self._arrived: Callable[[], list[torch.Tensor]] = device.download(tensors)

    def result(self) -> StepResult:
        """Wait for the device and read what came."""
        tensors, result = self._arrived(), StepResult(token_ids=[])
        if self._overflow is not None:
            result.lost, result.overflow = self._overflow.lost, self._overflow.counts()
        for entry, parts in self._prompts.items():
            items = result.prompt_logprobs[entry] = []
            for part in parts:
                items += part.read(tensors[: len(part.tensors)])
                tensors = tensors[len(part.tensors) :]
        if self.sampled is not None:
            result.token_ids = tensors[0].tolist()
            if self.sampled.logprobs is not None:
                found = self.sampled.logprobs.read(tensors[1:])
                result.logprobs = dict(zip(self.sampled.wants, found, strict=True))
        return result


class ModelRunner:
    """One shard's device side. device: where, if not what the configuration names.

    Ready when constructed: on a GPU the pool is sized by a run of the largest step, then every kind of step is run once
    and decode steps are captured. Raises ModelFormatError for unusable files, ConfigError for a configuration that does
    not fit model or machine.
    """

    captures = True  # decode steps, where the device can

    def __init__(self, config: EngineConfig, model: DescribedModel, device: Device | None = None) -> None:
        # said outright, because Ray gives its workers OMP_NUM_THREADS=1 and the engine inherits it
        torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        self.config = config
        self.device = device or make_device(config.device)
        dtype = TORCH_DTYPES[config.dtype]
        self._kv_dtype = kv_cache_dtype(config, dtype)
        files = model.files
        self.decoder_config, checkpoint = self.read_model(model)
        tiers = None if config.weights_offload is None else LayerTiers(config.weights_offload, self.device)
        packed = not config.deterministic and self.device.kind == "cpu" and can_pack(dtype) and tiers is None
        native = self._multiplies_quantized(checkpoint)
        self.decoder = Decoder(
            self.decoder_config, checkpoint, dtype, self.device.torch_device, packed=packed, native=native, tiers=tiers
        )
        if unused := checkpoint.unused():
            raise ModelFormatError(
                f"{files.folder} holds {len(unused)} tensors that a model of {self.decoder_config.num_layers} layers "
                f"does not use, the first is {unused[0]!r}; config.json does not describe this checkpoint"
            )
        self._set_up()
        self.namespace = Namespace(
            weights_id=files.weights_id,
            kv_form=self.layout.kv_form,
            numerics="/".join(
                (
                    str(dtype).removeprefix("torch."),
                    REVISION,
                    ops.backend(self.device.torch_device),
                    "deterministic" if config.deterministic else "fast",
                    "native" if native else "plain",
                )
            ),
            layout_id=self.layout.layout_id,
        )
        self.long_layout_id = self.decoder.layout(self.layout.block_tokens, self._kv_dtype, long=True).layout_id

    def read_model(self, model: DescribedModel) -> tuple[DecoderConfig, Tensors]:
        """What this runner computes, and its weights in the folder. A subclass may make them up."""
        return model.decoder, load_checkpoint(model.files.folder)

    def _multiplies_quantized(self, checkpoint: Tensors) -> bool:
        """Whether matrices stay as a GGUF file quantised them. Raises ConfigError when they must but cannot."""
        wanted, on_cpu = self.config.quantization, self.device.kind == "cpu"
        if wanted == "native" and not (checkpoint.has_quantized and on_cpu):
            reason = f"the device is {self.device.kind}" if not on_cpu else "the model has none of these"
            raise ConfigError(
                f"quantization is 'native', which multiplies matrices of a .gguf file ({', '.join(KINDS)}) on the CPU, "
                f"but {reason}; use auto or dequantize"
            )
        fast = on_cpu and ops.backend() == "c"
        return checkpoint.has_quantized and (wanted == "native" or (wanted == "auto" and fast))

    def _set_up(self) -> None:
        """Everything beside the weights: inputs, sampler, pool, and what must have run once."""
        config, decoder = self.config, self.decoder_config
        try:
            self.layout = self.decoder.layout(config.block_tokens or self.device.block_tokens, self._kv_dtype)
        except ValueError as error:
            raise ModelFormatError(f"config.json describes a model that has no KV layout here: {error}") from error
        max_blocks = -(-decoder.max_model_len // self.layout.block_tokens)
        self.inputs = InputBuilder(
            self.layout,
            decoder.num_heads,
            config.max_num_seqs,
            max_blocks,
            self.device,
            deterministic=config.deterministic,
        )
        self.sampler = Sampler(decoder.vocab_size, config.max_num_seqs, decoder.eos_token_ids, self.device)
        self.graphs: DecodeGraphs | None = None
        num_blocks = self.agreed_blocks(self.device.pool_blocks(config, self.layout, self.run_largest_step))
        self.cache = KVCache(self.layout, num_blocks, self.device.torch_device)
        self._set_up_overflow()
        if config.deterministic:
            self.check_row_independence()
        sizes = self.device.graph_sizes(config.max_num_seqs)
        if sizes:
            captures = self.captures and not config.deterministic and not self.decoder.streams
            self.warm_up(sizes if captures else (), max_blocks)

    def _set_up_overflow(self) -> None:
        """Places below the device for sequences that are larger than it."""
        config, layout = self.config, self.layout
        for name in ("overflow_host_bytes", "overflow_disk_bytes"):
            if 0 < getattr(config, name) < layout.block_bytes:
                raise ConfigError(
                    f"{name} is {getattr(config, name)}, less than one block of {layout.block_bytes} bytes; use 0 for "
                    "none, or as much as the tokens beyond the device need"
                )
        host, disk = (
            self.agreed_blocks(size // layout.block_bytes)
            for size in (config.overflow_host_bytes, config.overflow_disk_bytes)
        )
        self.overflow_blocks = host + disk
        self.overflow: OverflowPool | None = None
        if not self.overflow_blocks:
            return
        folder = None if config.overflow_folder is None else Path(config.overflow_folder).expanduser()
        sparse, way = config.sparse_attention, config.overflow_attention
        if self.device.has_link and sparse is not None:
            raise ConfigError(f"sparse_attention is for the device cpu; it is {self.device.kind}: leave it out")
        if self.device.has_link and config.deterministic and way == "in_place":
            raise ConfigError(
                f"deterministic is true and overflow_attention 'in_place', but the device is {self.device.kind}, whose "
                "sums are not the CPU's to the bit; use streamed or auto"
            )
        self.overflow = OverflowPool(
            layout,
            host,
            disk,
            self.device,
            folder,
            host_pace=Pace(config.overflow_host_bytes_per_s),
            disk_pace=Pace(config.overflow_disk_bytes_per_s),
            bounds_dtype=None if sparse is None else self.decoder.dtype,
        )
        windows = [self.decoder_config.kind_of(index).window for index in range(layout.num_layers)]
        self.inputs.overflow = OverflowAttention(
            self.overflow,
            self.device,
            self.cache.num_blocks,
            self.decoder_config.num_heads,
            windows,
            sparse,
            way=way,
            deterministic=config.deterministic,
        )

    def agreed_blocks(self, num_blocks: int) -> int:
        """Blocks of the pool, when this device has room for so many. A shard's runner asks the others."""
        return num_blocks

    @property
    def num_in_flight(self) -> int:
        """Batches worth giving to this device at a time."""
        return self.device.num_in_flight

    def run_largest_step(self) -> None:
        """Run a step as large as one may be, on a pool of its own. It is over when this returns."""
        config, decoder, tokens = self.config, self.decoder_config, self.layout.block_tokens
        batch = largest_batch(
            config.max_num_seqs, config.max_num_batched_tokens, decoder.max_model_len, tokens, decoder.vocab_size
        )
        self.cache = KVCache(self.layout, len(batch.block_updates[0][2]), self.device.torch_device)
        self.run(batch).result()
        del self.cache

    @torch.inference_mode()
    def warm_up(self, graph_sizes: tuple[int, ...], max_blocks: int) -> None:
        """Run every kind of step once, then capture decode steps of these numbers of sequences. KV becomes undefined,
        so nothing may have been stored yet.
        """
        config, decoder, tokens = self.config, self.decoder_config, self.layout.block_tokens
        pool_tokens = self.cache.num_blocks * tokens
        limits = config.max_num_batched_tokens, decoder.max_model_len, pool_tokens, tokens, decoder.vocab_size
        for batch in kinds_of_steps(*limits):
            self.run(batch).result()
        if self.cache.num_blocks > 1:
            self.cache.copy_blocks([(0, 1)])
        self.graphs = DecodeGraphs(self.decoder, self.cache, self.device, graph_sizes, max_blocks)

    @torch.inference_mode()
    def run(self, batch: Batch) -> PendingStep:
        """Begin one batch: copies, then forward, then one token per sampling entry."""
        step = self.begin(batch)
        hidden = None if self.graphs is None else self.graphs.run(step)
        if hidden is None:
            hidden = self.decoder.forward(step, self.cache.tensor, kv_scales=self.cache.scales)
        return self.finish(batch, step, hidden)

    def begin(self, batch: Batch) -> ForwardInput:
        """Rows and copies of a batch, and its inputs."""
        for state in batch.new_rows:
            self.sampler.start(state)
        if batch.demotions and self.overflow is not None:
            below = self.cache.num_blocks
            self.overflow.put(self.cache.tensor, [(block, place - below) for block, place in batch.demotions])
        if batch.copies:
            self.cache.copy_blocks(batch.copies)
        return self.inputs.build(batch)

    def finish(self, batch: Batch, step: ForwardInput, hidden: torch.Tensor) -> DeviceStep:
        """What a batch yields, from the hidden states [num_rows, hidden] after the last norm."""
        prompts = {
            entry: self._prompt_logprobs(batch, hidden, entry, num_top, following)
            for entry, num_top, following in batch.prompt_logprobs
        }
        sampled = None
        if batch.sampling:
            logits = self._sampling_logits(hidden, step)
            rows = [batch.rows[entry] for entry in batch.sampling]
            positions = np.asarray([batch.starts[entry] + batch.counts[entry] for entry in batch.sampling])
            sampled = self.sampler.sample(logits, rows, positions)
            self.inputs.remember(step, sampled.tokens)
        return DeviceStep(self.device, sampled, prompts, step.overflow or step.in_place)

    def _sampling_logits(self, hidden: torch.Tensor, step: ForwardInput) -> torch.Tensor:
        rows = step.sample_rows
        count = len(rows)
        if self.config.deterministic:
            rows = torch.cat([rows, rows.new_zeros(-count % 16)])
        return self.decoder.logits(hidden.index_select(0, rows))[:count]

    def _prompt_logprobs(
        self, batch: Batch, hidden: torch.Tensor, entry: int, num_top: int, following: int | None
    ) -> list[Logprobs]:
        first = sum(batch.counts[:entry])
        targets = batch.token_ids[first + 1 : first + batch.counts[entry]]
        if following is not None:
            targets.append(following)
        found: list[Logprobs] = []
        for start in range(0, len(targets), LOGPROB_ROWS):
            part = np.asarray(targets[start : start + LOGPROB_ROWS], dtype=np.int64)
            rows = np.zeros(LOGPROB_ROWS, dtype=np.int64)  # a fixed count: the same bits for every chunk size
            rows[: len(part)] = np.arange(first + start, first + start + len(part))
            chosen, tokens = self.device.upload([rows, part])
            logits = self.decoder.logits(hidden.index_select(0, chosen))[: len(part)]
            found.append(Logprobs(logits, tokens, [num_top] * len(part)))
        return found

    @torch.inference_mode()
    def check_row_independence(self) -> None:
        """Deterministic mode's start-up check: a layer and the head give a row the same bits beside 1 to 300 others.

        Raises ConfigError when they do not on this machine (then tokens could depend on batch mates).
        """
        if ops.backend(self.device.torch_device) == "torch":
            raise ConfigError(
                "deterministic is true, but no C compiler was found and the plain-PyTorch kernels do not promise equal "
                "bits; install gcc or use deterministic: false"
            )
        most = max(SELF_CHECK_ROWS)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(most, self.decoder_config.hidden_size, generator=generator)
        hidden = hidden.to(self.device.torch_device, self.decoder.dtype)
        wanted: tuple[torch.Tensor, ...] | None = None
        for count in reversed(SELF_CHECK_ROWS):
            found = self._layer_and_head(hidden[:count])
            wanted = wanted or found
            if not all(torch.equal(a, b[:count]) for a, b in zip(found, wanted, strict=True)):
                raise ConfigError(
                    f"deterministic is true, but {self.decoder.dtype} matrix products of this machine give a row other "
                    f"bits among {count} rows than among {most}; use dtype float32 or deterministic: false"
                )

    def _layer_and_head(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Row i as a sequence of one token through layer 0 and the head, if it is here, padded as `run` does."""
        count, tokens = len(hidden), self.layout.block_tokens
        layout = KVLayout(1, self.layout.num_kv_heads, tokens, self.layout.head_size, self.layout.dtype)
        cache = KVCache(layout, count, self.device.torch_device)
        builder = InputBuilder(layout, self.decoder_config.num_heads, count, 1, self.device, deterministic=True)
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
        padded = torch.zeros(rows, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        padded[:count] = hidden
        out = self.decoder.layer(0, padded, padded.clone(), step, cache.tensor, cache_layer=0, kv_scales=cache.scales)
        return (out[:count], self._sampling_logits(out, step)) if self.decoder_config.ends else (out[:count],)
