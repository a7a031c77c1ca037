"""What the processes of an engine are told of a model is what its configuration says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import torch
from transformers import PreTrainedConfig

from tests.helpers.tiny_families import FAMILIES, build_family, rope_config
from tournant.workers.config import EngineConfig
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.described import DescribedModel
from tournant.workers.models.families import describe
from tournant.workers.models.rope import Rope

CONFIGS = FAMILIES | {kind: rope_config(kind) for kind in ("yarn", "longrope")}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_nothing_of_it_is_lost_on_the_way(config: PreTrainedConfig, tmp_path: Path) -> None:
    files = ModelFiles(build_family(config, tmp_path), "m", b"w" * 32)
    told = describe(files, EngineConfig(max_model_len=100))
    heard = DescribedModel.from_wire(msgpack.unpackb(msgpack.packb(told.to_wire())))
    assert heard.files == files
    assert heard.decoder.max_model_len == 100
    assert replace(heard.decoder, ropes=()) == replace(told.decoder, ropes=())
    for got, rope in zip(heard.decoder.ropes, told.decoder.ropes, strict=True):
        assert same(got, rope)
    for long in (False, True):
        assert heard.decoder.rope_digest(long=long) == told.decoder.rope_digest(long=long)


def same(one: Rope, other: Rope) -> bool:
    sets = [(one.inv_freq, other.inv_freq), (one.long_inv_freq, other.long_inv_freq)]
    equal = all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in sets)
    return equal and (one.scaling, one.switch) == (other.scaling, other.switch)


def test_something_else_is_refused() -> None:
    for data in (["/m", "m", b"w" * 32], ["/m", "m", b"w" * 32, {"ropes": [], "layers": [], "eos_token_ids": []}]):
        with pytest.raises((TypeError, ValueError)):
            DescribedModel.from_wire(data)


def test_processes_of_an_engine_do_without_what_reads_configurations() -> None:
    """A third of their start."""
    check = "import sys, tournant.workers.engine_process, tournant.workers.rank_process; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=120)
    modules = set(found.stdout.split())
    assert "torch" in modules
    assert not {"transformers", "huggingface_hub", "gguf", "tokenizers"} & modules
