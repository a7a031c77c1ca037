"""Cases about model files: types of GGUF tensors, and the dtype that a model runs in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from tests.cases.conftest import random_prompts
from tests.helpers.family_gguf import write_family_gguf
from tests.helpers.reference import reference_logits
from tests.helpers.tiny_gguf import WIDE, build_tiny_gguf, tensor_shapes
from tests.workers.harness import Session
from tournant.workers.config import EngineConfig
from tournant.workers.engine_process import build_engine
from tournant.workers.errors import ModelFormatError
from tournant.workers.gguf_architectures import TENSOR_TYPES
from tournant.workers.model_files import resolve_model
from tournant.workers.models.families import describe
from tournant.workers.weights import load_checkpoint

OTHER_TYPES = [kind for kind in Kind if kind in GGML_QUANT_SIZES and kind not in TENSOR_TYPES]


def first_tokens(
    file: Path, dtype: str, prompts: list[list[int]], cache: Path, quantization: str = "auto"
) -> list[int]:
    """What the engine answers each prompt with, run on the file in this dtype."""
    files = resolve_model(str(file), dtype, cache)
    config = EngineConfig(
        device="cpu", dtype=dtype, quantization=quantization, kv_cache_bytes=1 << 22, enable_prefix_caching=False
    )
    answers = Session(build_engine(config, describe(files, config), writer_id=1)[0]).ask(prompts, max_tokens=1)
    return [token for (token,) in answers]


def clear_prompts(file: Path, count: int) -> tuple[list[list[int]], list[int]]:
    """Prompts whose first token transformers, in fp32, chooses by a clear margin, and those tokens."""
    prompts, tokens = [], []
    for prompt in random_prompts(10 * count, 12, seed=59):
        logits = reference_logits(file, prompt)[-1]
        first, second = logits.topk(2).values
        if first - second > 0.2 * logits.std():
            prompts.append(prompt)
            tokens.append(int(logits.argmax()))
        if len(prompts) == count:
            return prompts, tokens
    raise ValueError(f"only {len(prompts)} of the prompts have a clear answer")


@pytest.mark.case(59)
@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_case_59_the_same_file_in_every_dtype(tiny_model: Path, tmp_path: Path, kind: Kind) -> None:
    file = tmp_path / "m.gguf"
    write_family_gguf(file, tiny_model, kind)
    prompts, expected = clear_prompts(file, 50)
    assert len(set(expected)) > 20
    for dtype in ("float32", "float16", "bfloat16"):
        assert first_tokens(file, dtype, prompts, tmp_path) == expected, dtype


@pytest.mark.case(59)
def test_case_59_weights_that_a_dtype_cannot_hold(tmp_path: Path) -> None:
    """Refused by name in that dtype, served in the others."""
    file = tmp_path / "large.gguf"
    build_tiny_gguf(file, values={"output_norm.weight": np.full(64, 1e5, np.float32)})
    prompts = random_prompts(3, 12)
    assert len(first_tokens(file, "float32", prompts, tmp_path)) == 3
    assert len(first_tokens(file, "bfloat16", prompts, tmp_path)) == 3
    with pytest.raises(
        ModelFormatError, match=r"tensor output_norm\.weight holds values up to 100000; float16 ends at"
    ):
        resolve_model(str(file), "float16", tmp_path)


@pytest.mark.case(61)
@pytest.mark.parametrize("kind", TENSOR_TYPES, ids=lambda kind: kind.name)
def test_case_61_every_claimed_type_loads(tmp_path: Path, kind: Kind) -> None:
    """With the values of the reference dequantiser, and answers like those of transformers on the same file."""
    file = tmp_path / "tiny.gguf"
    expected = build_tiny_gguf(file, kind=kind, shape=WIDE)
    checkpoint = load_checkpoint(resolve_model(str(file), "float32", tmp_path).folder)
    assert checkpoint.names() == sorted(expected)
    for name, values in expected.items():
        assert torch.equal(checkpoint.take(name, values.shape, torch.float32), torch.from_numpy(values)), name
    prompts, tokens = clear_prompts(file, 8)
    assert first_tokens(file, "float32", prompts, tmp_path, "dequantize") == tokens


@pytest.mark.case(61)
@pytest.mark.parametrize("kind", OTHER_TYPES, ids=lambda kind: kind.name)
def test_case_61_every_other_type_is_refused(tmp_path: Path, kind: Kind) -> None:
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    name, file = "blk.0.ffn_up.weight", tmp_path / "tiny.gguf"
    rows, columns = tensor_shapes(WIDE)[name][1]
    stored = np.zeros((rows, columns // block_size * block_bytes), np.uint8)
    build_tiny_gguf(file, shape=WIDE, stored={name: (stored, kind)})
    known = ", ".join(kind.name for kind in TENSOR_TYPES)
    with pytest.raises(ModelFormatError) as caught:
        resolve_model(str(file), "float32", tmp_path)
    assert str(caught.value) == f"{file}: tensor {name} has type {kind.name}; supported are {known}"
