"""The default model over a device pool that is a fraction of its context."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.harness import GREEDY
from tournant.deploy.llm import LLM
from tournant.workers.sampling_params import SamplingParams

TOKEN_BYTES = 23_040  # of its KV in bfloat16
NEEDLE = "The secret word of the kitchen is marjoram."
QUESTION = "What is the secret word of the kitchen?"
BELOW = {"overflow_host_bytes": 512 * TOKEN_BYTES, "overflow_disk_bytes": 7680 * TOKEN_BYTES}


def llm_of(pool_tokens: int, **config: object) -> LLM:
    return LLM(device="cpu", dtype="bfloat16", deterministic=True, kv_cache_bytes=pool_tokens * TOKEN_BYTES, **config)


def documentation(length: int) -> str:
    """So many characters of it."""
    docs = Path(__file__).parents[2] / "docs"
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(docs.glob("*.md")))[:length]


def text_of(llm: LLM, tokens: int) -> list[int]:
    """So many tokens of the documentation."""
    return llm.encode(documentation(tokens * 6))[:tokens]


def test_four_thousand_tokens_over_a_pool_of_500() -> None:
    params = SamplingParams(max_tokens=16, **GREEDY)
    with llm_of(4096) as llm:
        prompt = text_of(llm, 4000)
        want, short = llm.generate([prompt, prompt[:1000]], params, use_tqdm=False)
    with llm_of(496, **BELOW) as llm:
        (found,) = llm.generate([prompt], params, use_tqdm=False)
        stats = llm.engine_stats.overflow
    assert found.outputs[0].token_ids == want.outputs[0].token_ids
    assert stats.host_bytes > 0
    assert stats.disk_bytes > 0
    with llm_of(128, overflow_host_bytes=1024 * TOKEN_BYTES) as llm:  # by the calls that read the device's blocks
        (found,) = llm.generate([prompt[:1000]], params, use_tqdm=False)
        assert llm.engine_stats.overflow.host_bytes > 0
    assert found.outputs[0].token_ids == short.outputs[0].token_ids


@pytest.mark.soak
def test_a_needle_is_found_with_a_quarter_of_the_blocks() -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0)
    answers = []
    for sparse in (None, {"budget": 0.25}):
        with llm_of(512, **BELOW, sparse_attention=sparse) as llm:
            text = 3 * (Path(__file__).parents[2] / "LICENSE").read_text()  # it does not change; dense finds it there
            while len(llm.encode(text)) > 5900:
                text = text[:-400]
            half = text.rfind("\n\n", 0, len(text) // 2)
            text = f"{text[:half]}\n\n{NEEDLE}\n{text[half:]}"
            prompt = llm.encode([{"role": "user", "content": f"{text}\n\n{QUESTION}"}])
            (found,) = llm.generate([prompt], params, use_tqdm=False)
            answers.append(found.outputs[0].text)
            counts = llm.engine_stats.overflow
            assert 5800 < len(prompt) < 6200
    assert "marjoram" in answers[0]
    assert answers[1] == answers[0]
    assert counts.chosen_layers > 0
    assert counts.dense_layers == 0
