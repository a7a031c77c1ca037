"""Models of every architecture that GGUF files are read for, written like llama.cpp's converter does and read back."""

from __future__ import annotations

import dataclasses
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFValueType as Type
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    SmolLM3Config,
)

from tests.helpers.family_gguf import write_family_gguf
from tests.helpers.reference import reference_generate
from tests.helpers.tiny_families import COMMON, FAMILIES, ROPES, WINDOW, build_family, rope_config
from tests.workers.harness import Session, make_engine
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.errors import ModelFormatError
from tournant.workers.gguf_architectures import ARCHITECTURES, read_config, wanted_tensors
from tournant.workers.gguf_files import convert_gguf
from tournant.workers.gguf_header import read_gguf_header
from tournant.workers.model_folder import check_supported
from tournant.workers.models.decoder_config import DecoderConfig
from tournant.workers.models.families import read_decoder_config

GEMMA: dict[str, Any] = COMMON | {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32}
CONFIGS: dict[str, PreTrainedConfig] = {
    **{name: FAMILIES[name] for name in ("llama", "llama_biases", "mistral", "qwen2", "phi3", "phi3_partial")},
    "qwen3": Qwen3Config(**COMMON, head_dim=128),
    "llama_tied": LlamaConfig(**COMMON, head_dim=16, tie_word_embeddings=True),
    "smollm3": SmolLM3Config(**(COMMON | {"num_hidden_layers": 5})),
    "gemma2": Gemma2Config(**(GEMMA | {"num_hidden_layers": 4}), attn_logit_softcapping=20.0),
    "gemma3": Gemma3TextConfig(**(GEMMA | {"num_hidden_layers": 7})),
    "gemma3_full": Gemma3TextConfig(**GEMMA, layer_types=["full_attention"] * 3, final_logit_softcapping=10.0),
}
TRANSFORMERS_READS = [name for name in CONFIGS if name not in ("llama_biases", "smollm3")]


@dataclass(frozen=True)
class Family:
    """A model folder, the same as a GGUF file, what is in that, and what the file was converted to."""

    folder: Path
    file: Path
    weights: dict[str, Any]
    converted: Path


@pytest.fixture(scope="module", params=CONFIGS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    root = tmp_path_factory.mktemp(request.param)
    folder = build_family(CONFIGS[request.param], root / "folder")
    file = root / "model.gguf"
    weights = write_family_gguf(file, folder)
    return Family(folder, file, weights, convert_gguf(file, "float32", root))


def test_every_tensor_is_the_original_one(family: Family) -> None:
    found = load_file(family.converted / "model.safetensors")
    assert found.keys() == family.weights.keys()
    originals = load_file(family.folder / "model.safetensors")
    for name, weights in family.weights.items():
        assert torch.equal(found[name], torch.from_numpy(weights)), name
        torch.testing.assert_close(found[name], originals[name], rtol=0, atol=2e-7)  # Gemma's norms: 1 + w is rounded


def fields_of(config: DecoderConfig) -> dict[str, Any]:
    """All but the rotations, which hold tensors, and the end tokens, which a file knows better."""
    names = {field.name for field in dataclasses.fields(config)} - {"ropes", "eos_token_ids"}
    return {name: getattr(config, name) for name in names}


def assert_same_decoder(found: DecoderConfig, expected: DecoderConfig) -> None:
    assert fields_of(found) == fields_of(expected)
    for mine, other in zip(found.ropes, expected.ropes, strict=True):
        assert mine.switch == other.switch
        torch.testing.assert_close(mine.table(64), other.table(64), rtol=1e-6, atol=1e-6)


def test_configuration_is_the_original_one(family: Family) -> None:
    check_supported(read_config(read_gguf_header(family.file), "float32"))
    found = read_decoder_config(family.converted)
    assert_same_decoder(found, read_decoder_config(family.folder))
    assert found.eos_token_ids[0] == 2


@torch.inference_mode()
def test_transformers_computes_the_same_from_the_folder(family: Family) -> None:
    """Longer than the window, so that layers with and without one differ."""
    ids = torch.randint(3, 320, (1, 60), generator=torch.Generator().manual_seed(1))
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in
              (family.converted, family.folder)]  # fmt: skip
    assert type(models[0]) is type(models[1])
    logits = [model.eval()(ids).logits for model in models]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", TRANSFORMERS_READS, indirect=True)
def test_transformers_reads_the_same_weights(family: Family) -> None:
    model = AutoModelForCausalLM.from_pretrained(family.file.parent, gguf_file=family.file.name, dtype=torch.float32)
    expected = model.state_dict()
    found = load_file(family.converted / "model.safetensors")
    assert expected.keys() - found.keys() <= {"lm_head.weight"}
    for name, weights in found.items():
        assert torch.equal(weights, expected[name]), name


def test_greedy_tokens_equal_transformers(family: Family) -> None:
    prompts = [list(range(3, 3 + length)) for length in (8, WINDOW + 1, 60)]
    session = Session(make_engine(family.converted))
    assert session.ask(prompts, max_tokens=10) == reference_generate(family.folder, prompts, 10)


def test_tokenizer_of_the_folder(family: Family) -> None:
    """What AutoTokenizer makes of the folder is what was written there, and text comes back from it."""
    text = "hello world, 12 naïve\n  日本語"
    tokenizer = AutoTokenizer.from_pretrained(family.converted)
    ids = Backend.from_file(str(family.converted / "tokenizer.json")).encode(text).ids
    assert tokenizer.encode(text) == ids
    assert Tokenizer.from_folder(family.converted).decode(ids).strip() == text


def test_all_architectures_are_tested() -> None:
    assert {name.partition("_")[0] for name in CONFIGS} == {*ARCHITECTURES, "mistral"}


def test_flipped_bits_are_read_or_refused(family: Family, tmp_path: Path) -> None:
    """Whatever the header says, it makes a configuration and tensors, or ModelFormatError."""
    good = family.file.read_bytes()
    first = min(tensor.offset for tensor in read_gguf_header(family.file).tensors.values())
    interesting = [good.index(b"general.architecture"), good.index(b"tokenizer.ggml.model")]  # sizes and RoPE between
    path, dice, refused = tmp_path / "bad.gguf", random.Random(7), 0
    for turn in range(150):
        data = bytearray(good[:first])
        for _ in range(dice.randint(1, 3)):
            place = dice.randrange(*interesting) if turn % 3 else dice.randrange(first)
            data[place] ^= 1 << dice.randrange(8)
        with path.open("wb") as file:
            file.write(data)
            file.truncate(len(good))
        try:
            header = read_gguf_header(path)
            wanted_tensors(header, read_config(header, "float32"))
        except ModelFormatError:
            refused += 1
    assert refused > 20


ROPE_CONFIGS: dict[str, PreTrainedConfig] = {
    **{kind: rope_config(kind) for kind in ("linear", "llama3", "yarn", "longrope")},
    "yarn_tuned": LlamaConfig(
        **COMMON,
        rope_parameters=ROPES["yarn"] | {"attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
    ),
    "gemma3": Gemma3TextConfig(
        **(GEMMA | {"num_hidden_layers": 6}),
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPE_CONFIGS)
def test_rope_scaling(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The frequencies of the original configuration, at any length, without a word of complaint by transformers."""
    folder = build_family(ROPE_CONFIGS[kind], tmp_path / "folder")
    write_family_gguf(tmp_path / "model.gguf", folder)
    with caplog.at_level(logging.WARNING):
        found = read_decoder_config(convert_gguf(tmp_path / "model.gguf", "float32", tmp_path))
    expected = read_decoder_config(folder)
    assert_same_decoder(found, expected)
    for mine, other in zip(found.ropes, expected.ropes, strict=True):
        torch.testing.assert_close(mine.table(1000), other.table(1000), rtol=1e-4, atol=1e-4)


def header_config(tmp_path: Path, name: str, **changed: tuple[Any, Type]) -> dict[str, Any]:
    """config.json for a file of this family with changed metadata."""
    path = tmp_path / "model.gguf"
    write_family_gguf(path, build_family(CONFIGS[name], tmp_path / "folder"), **changed)
    return read_config(read_gguf_header(path), "float32")


@pytest.mark.parametrize(("name", "layers", "scalar"), [("gemma2", 42, 32), ("gemma2", 46, 16), ("gemma3", 62, 16)])
def test_the_largest_gemmas_scale_attention_in_their_own_way(
    tmp_path: Path, name: str, layers: int, scalar: int
) -> None:
    config = header_config(tmp_path, name, block_count=(layers, Type.UINT32))
    assert config["query_pre_attn_scalar"] == scalar
    kinds = config["layer_types"]
    assert len(kinds) == layers
    assert [place for place, kind in enumerate(kinds) if kind == "full_attention"][:2] == (
        [1, 3] if name == "gemma2" else [5, 11]
    )


def test_fields_that_files_may_have(tmp_path: Path) -> None:
    config = header_config(
        tmp_path, "gemma3", attention__sliding_window_pattern=(3, Type.UINT32), rope__freq_base_swa=(5e4, Type.FLOAT32)
    )
    assert config["layer_types"][:3] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 50000.0}
    window = {"attention__sliding_window": (256, Type.UINT32)}
    assert "sliding_window" not in header_config(tmp_path, "qwen2", **window)  # as long as the context
    factor = header_config(tmp_path, "llama", rope__scaling__factor=(2.0, Type.FLOAT32))["rope_parameters"]
    assert (factor["rope_type"], factor["factor"]) == ("linear", 2.0)  # files before there was a type


def test_what_a_gemma2_file_leaves_out_is_that_of_all_gemma2(tmp_path: Path) -> None:
    write_family_gguf(tmp_path / "model.gguf", build_family(CONFIGS["gemma2"], tmp_path / "folder"))
    header = read_gguf_header(tmp_path / "model.gguf")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"):
        del header.fields[f"gemma2.{key}"]
    config, original = read_config(header, "float32"), Gemma2Config()
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"):
        assert config[key] == getattr(original, key)


REFUSED: dict[str, tuple[str, dict[str, tuple[Any, Type]], str]] = {
    "window": ("qwen2", {"attention__sliding_window": (64, Type.UINT32)}, "field qwen2.attention.sliding_window is 64"),
    "experts": ("qwen3", {"expert_count": (8, Type.UINT32)}, "field qwen3.expert_count is 8"),
    "scale": ("llama", {"attention__scale": (0.5, Type.FLOAT32)}, "field llama.attention.scale is 0.5"),
    "logit scale": ("llama", {"logit_scale": (8.0, Type.FLOAT32)}, "field llama.logit_scale is 8.0"),
    "encoder": ("gemma3", {"attention__causal": (False, Type.BOOL)}, "field gemma3.attention.causal is False"),
    "phi3 linear": ("phi3", {"rope__scaling__factor": (2.0, Type.FLOAT32)}, "Phi-3 is known with none and longrope"),
    "dynamic": ("llama", {"rope__scaling__type": ("dynamic", Type.STRING)}, "known are none, linear, yarn and"),
    "scaled linear": (
        "llama",
        {"rope__scaling__factor": (2.0, Type.FLOAT32), "rope__scaling__attn_factor": (1.5, Type.FLOAT32)},
        "field llama.rope.scaling.attn_factor is 1.5; only 1.0 is supported with linear",
    ),
    "longrope": ("phi3", {"rope__scaling__type": ("longrope", Type.STRING)}, "rope_factors_short.weight is missing"),
    "rotary": ("qwen3", {"rope__dimension_count": (16, Type.UINT32)}, "only the head size, 128, is supported"),
    "value size": ("qwen3", {"attention__value_length": (16, Type.UINT32)}, "only the head size, 128, is supported"),
    "odd rotary": ("phi3", {"rope__dimension_count": (7, Type.UINT32)}, "field phi3.rope.dimension_count is 7"),
    "extrapolation": (
        "llama", {"rope__scaling__yarn_ext_factor": (0.5, Type.FLOAT32)}, "yarn_ext_factor is 0.5; only 1.0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_compute_something_else_is_refused(tmp_path: Path, case: str) -> None:
    name, changed, message = REFUSED[case]
    with pytest.raises(ModelFormatError) as caught:
        header_config(tmp_path, name, **changed)
    assert message in str(caught.value)
