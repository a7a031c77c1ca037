"""A model as its engine's processes are told of it: where its files are, and what it is made of.

The client of an engine reads the configuration once, through transformers; the engine and its other ranks get what was
found with their first frame, so that they need not import what reads configurations, a third of their start.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.decoder_config import DecoderConfig, LayerKind
from tournant.workers.models.rope import Rope


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """files: what is loaded; decoder: what its configuration says, for the longest sequences there may be."""

    files: ModelFiles
    decoder: DecoderConfig

    def to_wire(self) -> list[Any]:
        """[folder, name, weights_id, map of the decoder's fields] of plain types."""
        files, decoder = self.files, self.decoder
        plain = {field.name: getattr(decoder, field.name) for field in fields(decoder)}
        plain["eos_token_ids"] = list(decoder.eos_token_ids)
        plain["layers"] = [[kind.window, kind.rope] for kind in decoder.layers]
        plain["ropes"] = [
            [_to_bytes(rope.inv_freq), rope.scaling, _to_bytes(rope.long_inv_freq), rope.switch]
            for rope in decoder.ropes
        ]
        return [str(files.folder), files.name, files.weights_id, plain]

    @classmethod
    def from_wire(cls, data: list[Any]) -> DescribedModel:
        """Inverse of `to_wire`. Raises ValueError or TypeError when it is something else."""
        folder, name, weights_id, plain = data
        ropes = tuple(
            Rope(_frequencies(short), scaling, None if long is None else _frequencies(long), switch)
            for short, scaling, long, switch in plain["ropes"]
        )
        layers = tuple(LayerKind(window, rope) for window, rope in plain["layers"])
        more = {"ropes": ropes, "layers": layers, "eos_token_ids": tuple(plain["eos_token_ids"])}
        return cls(ModelFiles(Path(folder), name, weights_id), DecoderConfig(**plain | more))


def _to_bytes(frequencies: torch.Tensor | None) -> bytes | None:
    return None if frequencies is None else frequencies.numpy().tobytes()


def _frequencies(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)
