"""Engines that multiply matrices as a GGUF file quantised them: close to dequantised, the same bits fused or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.helpers.family_gguf import write_family_gguf
from tests.helpers.tiny_gguf import SMALL, WIDE, build_tiny_gguf
from tests.workers.harness import Session
from tournant.kernels import ops
from tournant.workers.config import EngineConfig
from tournant.workers.engine import Engine
from tournant.workers.engine_process import build_engine
from tournant.workers.errors import ConfigError
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.families import describe

NATIVE_KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0)
PROMPTS = [[5 + 7 * i % 250 for i in range(start, start + length)] for start, length in ((0, 9), (3, 40), (50, 21))]


@pytest.fixture(autouse=True)
def compiled() -> None:
    if ops.select_backend("c") != "c":
        pytest.skip("no C compiler here")


def engine_of(files: ModelFiles, **config: object) -> Engine:
    fields: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_bytes": 1 << 22,
        "num_threads": 1,
    } | config
    made = EngineConfig(**fields)  # type: ignore[arg-type]
    return build_engine(made, describe(files, made), writer_id=1)[0]


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of all prompts together, and the logits of every step one below the other."""
    decoder, seen = engine.runner.decoder, []
    original = decoder.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(original(hidden))
        return seen[-1]

    decoder.logits = logits  # type: ignore[method-assign]
    try:
        return Session(engine).ask(prompts, max_tokens=6), torch.cat(seen)
    finally:
        decoder.logits = original  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", NATIVE_KINDS, ids=lambda kind: kind.name)
def test_logits_are_close_to_dequantised(tiny_model: Path, tmp_path: Path, kind: Kind, dtype: str) -> None:
    """Of the first step; int8 activations in groups of 32 err by a part in 254 of a group's largest at most."""
    file = tmp_path / "m.gguf"
    write_family_gguf(file, tiny_model, kind)
    files = resolve_model(str(file), dtype, tmp_path)
    exact = answers(engine_of(files, dtype=dtype, quantization="dequantize"))[1][: len(PROMPTS)]
    native = answers(engine_of(files, dtype=dtype, quantization="native"))[1][: len(PROMPTS)]
    assert not torch.equal(native, exact)
    assert (native - exact).square().mean().sqrt() < 0.05 * exact.std()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fused_layers_give_the_bits_of_single_calls(tmp_path: Path, dtype: str, deterministic: bool) -> None:
    build_tiny_gguf(file := tmp_path / "m.gguf", kind=Kind.Q4_1, shape=SMALL)
    files = resolve_model(str(file), dtype, tmp_path)
    found = []
    for fused in (True, False):
        engine = engine_of(files, dtype=dtype, deterministic=deterministic)
        assert engine.runner.decoder._fused is not None
        if not fused:
            engine.runner.decoder._fused = None
        found.append((*answers(engine), engine.runner.cache.tensor.nan_to_num()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][2], found[1][2])


def test_a_prompts_bits_do_not_depend_on_its_batch(tmp_path: Path) -> None:
    build_tiny_gguf(file := tmp_path / "m.gguf", kind=Kind.Q4_0, shape=SMALL)
    files = resolve_model(str(file), "bfloat16", tmp_path)
    fields = {"dtype": "bfloat16", "deterministic": True}
    together = answers(engine_of(files, **fields))[1][: len(PROMPTS)]
    alone = [answers(engine_of(files, **fields), [prompt])[1][:1] for prompt in PROMPTS]
    assert torch.equal(together, torch.cat(alone))


def test_types_that_cannot_be_multiplied_are_dequantised(tmp_path: Path) -> None:
    """A joined product where one part is of such a type, and a single one; the rest stays native, not fused."""
    kinds = {"blk.0.attn_v.weight": Kind.Q6_K, "blk.1.ffn_down.weight": Kind.F16, "blk.1.ffn_up.weight": Kind.Q8_0}
    build_tiny_gguf(file := tmp_path / "m.gguf", kind=Kind.Q4_1, kinds=kinds, shape=WIDE)
    files = resolve_model(str(file), "float32", tmp_path)
    native = engine_of(files)
    assert native.runner.decoder._fused is None
    exact = answers(engine_of(files, quantization="dequantize"))[1][: len(PROMPTS)]
    found = answers(native)[1][: len(PROMPTS)]
    assert not torch.equal(found, exact)
    assert (found - exact).square().mean().sqrt() < 0.2 * exact.std()


def test_keys_of_blocks_differ(tmp_path: Path) -> None:
    build_tiny_gguf(file := tmp_path / "m.gguf", kind=Kind.Q4_1)
    files = resolve_model(str(file), "float32", tmp_path)
    names = {mode: engine_of(files, quantization=mode).runner.namespace for mode in ("auto", "native", "dequantize")}
    assert names["auto"] == names["native"]
    assert names["auto"].numerics.endswith("/native")
    assert names["dequantize"].numerics.endswith("/plain")


def test_a_model_without_quantised_matrices(tmp_path: Path) -> None:
    build_tiny_gguf(file := tmp_path / "m.gguf", kind=Kind.Q6_K, shape=WIDE)
    files = resolve_model(str(file), "float32", tmp_path)
    with pytest.raises(ConfigError, match=r"quantization is 'native', which .* but the model has none of these"):
        engine_of(files, quantization="native")
    assert engine_of(files).runner.namespace.numerics.endswith("/plain")


def test_without_a_compiler(tmp_path: Path) -> None:
    """Then the plain product is faster; who insists gets the twins, with the same logits."""
    build_tiny_gguf(file := tmp_path / "m.gguf", kind=Kind.Q8_0)
    files = resolve_model(str(file), "float32", tmp_path)
    compiled = answers(engine_of(files))[1]
    ops.select_backend("torch")
    try:
        assert engine_of(files).runner.namespace.numerics.endswith("/plain")
        twins = answers(engine_of(files, quantization="native"))[1]
    finally:
        ops.select_backend("c")
    torch.testing.assert_close(
        twins[: len(PROMPTS)], compiled[: len(PROMPTS)], rtol=0, atol=0.05 * float(compiled.std())
    )


def test_unknown_choice() -> None:
    with pytest.raises(ConfigError, match="quantization is 'int3'; it must be one of auto, native, dequantize"):
        EngineConfig(quantization="int3")
