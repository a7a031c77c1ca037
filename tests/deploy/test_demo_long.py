"""`make demo-long` on model M: a text eight times the pool is refused, then answered, and what that took is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import demo_long

POOL_TOKENS = 64
TOKEN_BYTES = 2 * 2 * 2 * 64 * 2  # of M in bfloat16


def figure(printed: str, name: str) -> float:
    """MiB in a row of the table."""
    found = re.search(rf"{re.escape(name)}\W+([\d,.]+) MiB", printed)
    assert found is not None, printed
    return float(found[1].replace(",", ""))


def test_refused_without_places_below_and_answered_with_them(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_long.main(["--model", str(tiny_model), "--pool-tokens", str(POOL_TOKENS), "--threads", "1"])
    printed = capsys.readouterr().out
    plain = " ".join(printed.split())
    text = re.search(r"A text of (\d+) tokens, a device pool of 64\.", plain)
    assert text is not None, printed
    tokens = int(text[1])
    assert 7 * POOL_TOKENS < tokens <= 8 * POOL_TOKENS
    assert f"refused the prompt is too long: it has {tokens} tokens" in plain
    answer = plain.split("With them: answered ")[1].split(" time ")[0]
    assert len(answer) > 8
    assert f"s for {tokens} + " in plain
    pool, whole = (POOL_TOKENS * TOKEN_BYTES / 2**20, tokens * TOKEN_BYTES / 2**20)
    assert figure(printed, "the device pool") == pytest.approx(pool, abs=0.05)
    assert figure(printed, "the text's KV") == pytest.approx(whole, abs=0.05)
    assert figure(printed, "KV copied off the device") >= whole - pool - 0.1
    assert figure(printed, "KV attended to in RAM, where it lies") > 2 * pool
    assert figure(printed, "KV attended to that was read from disk") > whole
    assert figure(printed, "peak memory of the engine, weights included") > 50
