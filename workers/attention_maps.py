"""The attention of chosen layers and heads over a prompt, whole and exact, written to disk tile by tile.

Owns a prefill of its own: layer by layer over the whole prompt, through the engine's decoder with its weights, up to
the last layer that is asked for; of KV only the current layer's is kept. Scores are computed from queries and keys as
that layer attends with them (after their norms, rotation and rounding), in float32.

Memory beside weights and prompt (a hidden state and a residual per token): KV of one layer, queries of the chosen
heads, and tiles, which are bounded (score_arena.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_io import DiskIO
from tournant.workers import attention_tiles as tiles
from tournant.workers.attention_tiles import CHUNK, Rows, Scoring
from tournant.workers.batch import Batch
from tournant.workers.config import EngineConfig
from tournant.workers.device import Device, make_device
from tournant.workers.errors import ConfigError
from tournant.workers.forward_input import ForwardInput, InputBuilder
from tournant.workers.map_files import KINDS, AttentionMaps, MapFolder, MapName
from tournant.workers.model_folder import ModelFiles
from tournant.workers.model_runner import TORCH_DTYPES
from tournant.workers.models.decoder import Decoder
from tournant.workers.models.decoder_config import DecoderConfig
from tournant.workers.models.families import read_decoder_config
from tournant.workers.models.linear import can_pack
from tournant.workers.score_arena import ScoreArena
from tournant.workers.weights import load_checkpoint

TILE_BYTES, LEAST_TILES = 24 << 20, 8  # of the device, and as many of the host
PREFILL_TOKENS = 512
MapProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class MapRequest:
    """What is wanted. layers, heads: numbers from 0, without repeats; kinds: of KINDS; token_texts: what stands in the
    manifest for each token.
    """

    token_ids: Sequence[int]
    layers: Sequence[int]
    heads: Sequence[int]
    out_dir: Path
    kinds: Sequence[str] = ("probabilities",)
    overwrite: bool = False
    token_texts: Sequence[str] | None = None

    def check(self, config: DecoderConfig) -> None:
        """Raises ConfigError for what this model does not have."""
        num_layers, limit, count = len(config.layers), config.max_model_len, len(self.token_ids)
        for name, chosen, most in (("layers", self.layers, num_layers), ("heads", self.heads, config.num_heads)):
            if isinstance(chosen, str) or not isinstance(chosen, Sequence):
                raise ConfigError(f"{name} is {chosen!r:.100}; it must be a list of numbers, such as [0, 1]")
            wrong = [
                item
                for item in chosen
                if isinstance(item, bool) or not isinstance(item, int) or item not in range(most)
            ]
            if wrong or not chosen or len(set(chosen)) != len(chosen):
                raise ConfigError(
                    f"{name} are {list(chosen)}; this model has 0 to {most - 1}: name one or more, each once"
                )
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ConfigError(f"kinds are {list(self.kinds)}; choose one or both of {', '.join(KINDS)}")
        if not 0 < count <= limit:
            raise ConfigError(f"the prompt has {count} tokens; this model takes 1 to {limit}")
        if bad := [token for token in self.token_ids if not 0 <= token < config.vocab_size]:
            raise ConfigError(f"the prompt has token {bad[0]}; this model has 0 to {config.vocab_size - 1}")

    def names(self) -> list[MapName]:
        """The arrays, by layer, head and kind."""
        kinds = [kind for kind in KINDS if kind in self.kinds]
        return [MapName(kind, layer, head) for layer in sorted(self.layers) for head in self.heads for kind in kinds]


def write_attention_maps(
    config: EngineConfig,
    files: ModelFiles,
    request: MapRequest,
    *,
    tile_bytes: int | None = None,
    progress: MapProgress | None = None,
    disk: DiskIO | None = None,
) -> AttentionMaps:
    """Compute and write the maps of a request; see map_files.py for what lies in the folder then.

    config: device, dtype, quantization and max_model_len are used, as the engine would; KV has the dtype of computing.
    tile_bytes: most memory of tiles on the device, and on the host, None = 24 MiB, or 8 tiles; progress: called with
    what is done ("layers" of the model, "rows" of maps), how much of it, and how much there is. Raises ConfigError,
    ModelFormatError, or OSError when the disk is full or fails; nothing is left in the folder then, nor when progress
    raises.
    """
    device = make_device(config.device)
    decoder_config = read_decoder_config(files.folder, config.max_model_len)
    request.check(decoder_config)
    limit = _tile_bytes(len(request.token_ids), tile_bytes)
    folder = MapFolder(request.out_dir, request.names(), len(request.token_ids), overwrite=request.overwrite, disk=disk)
    told = progress or _silent
    try:
        prefill = _Prefill(config, files, decoder_config, request, device)
        with torch.no_grad():
            peak = _write(prefill, request, folder, limit, told)
        folder.finish(_manifest(files, request, prefill))
    except BaseException:
        folder.discard()
        raise
    return AttentionMaps(request.out_dir, tuple(request.names()), len(request.token_ids), peak)


def _tile_bytes(num_tokens: int, asked: int | None) -> int:
    least = LEAST_TILES * max(4 * rows.count * rows.width + PAGE_BYTES for rows in tiles.cut_rows(num_tokens, 0))
    if asked is not None and asked < least:
        raise ConfigError(f"tile_bytes is {asked}; a prompt of {num_tokens} tokens needs {least}")
    return max(TILE_BYTES, least) if asked is None else asked


def _silent(_what: str, _done: int, _total: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class Attending:
    """One layer: queries [chosen heads, tokens, size] and keys [kv_heads, tokens, size], float32 on the device."""

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    heads_per_kv: int
    scoring: Scoring


class _Prefill:
    """A model up to the last layer of a request, and its hidden states."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, whole: DecoderConfig, request: MapRequest, device: Device
    ) -> None:
        self.device = device
        self._request = request
        self.config = replace(whole, num_layers=max(request.layers) + 1)
        dtype = TORCH_DTYPES[config.dtype]
        on_cpu = device.kind == "cpu"
        checkpoint = load_checkpoint(files.folder)
        native = config.quantization == "native" or (config.quantization == "auto" and on_cpu and ops.backend() == "c")
        self._decoder = Decoder(
            self.config,
            checkpoint,
            dtype,
            device.torch_device,
            packed=on_cpu and not config.deterministic and can_pack(dtype),
            native=native and checkpoint.has_quantized,
        )
        tokens, count = config.block_tokens or device.block_tokens, len(request.token_ids)
        self.layout = KVLayout(1, whole.num_kv_heads, tokens, whole.head_size, dtype)
        self._num_blocks = -(-count // tokens)
        self._cache = self.layout.allocate(self._num_blocks, device.torch_device)
        self._inputs = InputBuilder(self.layout, whole.num_heads, 1, self._num_blocks, device, deterministic=False)

    def layers(self, progress: MapProgress) -> Iterator[Attending]:
        """The layers of the request, ascending."""
        request, config = self._request, self.config
        (ids,) = self.device.upload([torch.tensor(list(request.token_ids), dtype=torch.int64).numpy()])
        residual = self._decoder.embedded(ids)
        hidden = self._decoder.first_norm(residual)
        heads = torch.tensor(list(request.heads), device=self.device.torch_device)
        for layer in range(config.num_layers):
            wanted, last = layer in request.layers, layer == config.num_layers - 1
            parts = []
            for start, step in self._steps():
                rows = slice(start, start + step.num_tokens)
                if wanted:
                    queries = self._decoder.queries(layer, hidden[rows], step, self._cache, 0)
                    parts.append(queries.index_select(1, heads).float())
                if not last:
                    hidden[rows] = self._decoder.layer(layer, hidden[rows], residual[rows], step, self._cache, 0)
            progress("layers", layer + 1, config.num_layers)
            if wanted:
                queries = torch.cat(parts).transpose(0, 1).contiguous()
                shared = config.num_heads // config.num_kv_heads
                yield Attending(layer, queries, self._keys(), shared, self._scoring(layer))

    def _steps(self) -> Iterator[tuple[int, ForwardInput]]:
        """The prompt in pieces: (first token, step)."""
        token_ids, long = list(self._request.token_ids), self.config.rope_switch
        offset = self.config.max_model_len if long and len(token_ids) > long else 0
        for start in range(0, len(token_ids), PREFILL_TOKENS):
            part = token_ids[start : start + PREFILL_TOKENS]
            batch = Batch(0, rows=[0], starts=[start], counts=[len(part)], rope_offsets=[offset], token_ids=part)
            batch.block_updates = [(0, 0, list(range(self._num_blocks)))]
            yield start, self._inputs.build(batch)

    def _keys(self) -> torch.Tensor:
        """All keys of the layer that was computed last."""
        keys = self._cache[:, 0, 0].transpose(0, 1).flatten(1, 2)
        return keys[:, : len(self._request.token_ids)].float().contiguous()

    def _scoring(self, layer: int) -> Scoring:
        config = self.config
        return Scoring(config.attention_scale, config.attention_softcap, config.kind_of(layer).window)


def _write(prefill: _Prefill, request: MapRequest, folder: MapFolder, tile_bytes: int, progress: MapProgress) -> int:
    """Write all arrays; returns the most memory that tiles took."""
    with ScoreArena(tile_bytes, tile_bytes, folder, device=prefill.device, forgets=True) as arena:
        done, total = 0, len(request.layers) * len(request.heads) * len(request.token_ids)
        for attending in prefill.layers(progress):
            for place, head in enumerate(request.heads):
                for rows in tiles.cut_rows(len(request.token_ids), 0, attending.scoring.window):
                    _make(attending, place, head, rows, arena, [kind for kind in KINDS if kind in request.kinds])
                    done += rows.count
                    progress("rows", done, total)
        arena.flush()
        return arena.stats.peak_bytes


def _make(attending: Attending, place: int, head: int, rows: Rows, arena: ScoreArena, kinds: Sequence[str]) -> None:
    """The tiles of a block of rows of one head; they go to their files by themselves."""
    scoring, queries = attending.scoring, attending.queries[place, rows.first : rows.first + rows.count]
    keys = attending.keys[head // attending.heads_per_kv]
    made = {kind: (MapName(kind, attending.layer, head), rows) for kind in kinds}
    first, *others = made.values()
    tile = arena.new(first, (rows.count, rows.width))
    for piece in rows.chunks():
        tiles.multiply_keys(tile, queries, keys[piece.chunk * CHUNK :], piece)
    tiles.finish_scores(tile, scoring)
    for key in others:  # of two kinds, the scores come first
        probabilities = arena.new(key, (rows.count, rows.width))
        tiles.to_probabilities(probabilities.copy_(tile), rows, scoring)
        arena.done(key)
    if "scores" in made:
        tiles.mask(tile, rows, scoring, 0.0)
    else:
        tiles.to_probabilities(tile, rows, scoring)
    arena.done(first)


def _manifest(files: ModelFiles, request: MapRequest, prefill: _Prefill) -> dict[str, Any]:
    config = prefill.config
    return {
        "model": files.name,
        "weights_id": files.weights_id.hex(),
        "computed_in": str(prefill.layout.dtype).removeprefix("torch."),
        "num_tokens": len(request.token_ids),
        "token_ids": list(request.token_ids),
        "tokens": None if request.token_texts is None else list(request.token_texts),
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "scale": config.attention_scale,
        "softcap": config.attention_softcap,
        "windows": {str(layer): config.kind_of(layer).window for layer in sorted(request.layers)},
    }
