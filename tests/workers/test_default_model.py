"""The default model: greedy tokens equal transformers' in fp32, and come close as the file quantised them.

That the folder holds exactly the tensors transformers makes of the GGUF file is test_gguf_files.py's business.
"""

from __future__ import annotations

import pytest

from tests.helpers.reference import reference_generate
from tests.workers.harness import Session
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.config import EngineConfig
from tournant.workers.engine_process import build_engine
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.families import describe

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In the beginning of the twentieth century, physics was changed by two discoveries: ",
    "Ingredients for four people: 500 g of flour, 2 eggs, a pinch of salt. Mix the flour with",
    "<|im_start|>user\nWrite a short letter to a friend who moved to another city.<|im_end|>\n<|im_start|>assistant\n",
)
NUM_NEW = 32


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model(None, "float32")


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(files.folder)
    return [tokenizer.encode(text) for text in PROMPTS]


def test_greedy_tokens_equal_transformers(files: ModelFiles, prompts: list[list[int]]) -> None:
    """Five prompts together: cold, then from the prefix cache."""
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        quantization="dequantize",
        kv_cache_bytes=1 << 26,
        deterministic=True,
        num_threads=1,
    )
    session = Session(build_engine(config, describe(files, config), writer_id=1)[0])
    cold = session.ask(prompts, max_tokens=NUM_NEW)
    assert cold == reference_generate(files.folder, prompts, NUM_NEW)
    assert session.ask(prompts, max_tokens=NUM_NEW) == cold
    assert session.engine.stats().prefix_hit_tokens > 0


def test_quantised_as_in_the_file(files: ModelFiles, prompts: list[list[int]]) -> None:
    """By default: next tokens along the exact answers are mostly the same (152 of 160 measured), and so is a fact."""
    exact = reference_generate(files.folder, prompts, NUM_NEW)
    heads = [prompt + answer[:count] for prompt, answer in zip(prompts, exact, strict=True) for count in range(NUM_NEW)]
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_bytes=1 << 27, num_threads=1)
    engine = build_engine(config, describe(files, config), writer_id=1)[0]
    assert engine.runner.namespace.numerics.endswith("/native")
    found = [token for (token,) in Session(engine).ask(heads, max_tokens=1)]
    wanted = [token for answer in exact for token in answer]
    equal = sum(a == b for a, b in zip(found, wanted, strict=True))
    assert 0.87 * len(wanted) < equal < len(wanted)
    assert found[0] == wanted[0]
