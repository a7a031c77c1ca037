"""A soft prompt of the default model is learnt through the tiled attention; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples import prompt_tuning
from tournant.kernels import flash_attention as kernels


def test_the_loss_falls_through_our_attention(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    for name in ("forward", "backward"):
        inner = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, inner=inner, name=name: calls.append(name) or inner(*args))
    assert prompt_tuning.main(["--steps", "4", "--prompt-tokens", "4", "--max-tokens", "24"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.05
    assert calls == (["forward"] * 30 + ["backward"] * 30) * 4  # each layer of each step, both ways


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "'0' is no whole number from 1"),
        (["--prompt-tokens", "-1"], "'-1' is no whole number from 1"),
        (["--text", "/nowhere"], "--text /nowhere cannot be read"),
        (["--text", "/dev/null"], "is empty; there is nothing to learn"),
    ],
)
def test_mistakes_are_a_line_before_the_model_is_loaded(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prompt_tuning.main([*arguments, "--model", "/nowhere/at/all"])
    assert said in capsys.readouterr().err


def test_gradients_are_those_of_transformers_own_attention(tiny_model: Any) -> None:
    """Through a whole model, on every vector of the prompt."""
    found = []
    for attention in (prompt_tuning.ATTENTION, "eager"):
        model, tokenizer = prompt_tuning.load(str(tiny_model), attention)
        tokens = torch.tensor(tokenizer(prompt_tuning.TEXT)["input_ids"][:150])
        found.append([step.loss for step in prompt_tuning.train(model, tokens, 3, 3, 0.1)])
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert len({round(loss, 4) for loss in found[0]}) == 3  # so that steps, which gradients decide, were compared


@pytest.mark.parametrize("arguments", [{"attention_mask": torch.zeros(1, 1, 2, 2)}, {"dropout": 0.1}])
def test_what_the_tiles_do_not_know_is_refused(arguments: dict[str, Any]) -> None:
    heads = torch.zeros(1, 2, 2, 8)
    options = {"attention_mask": None} | arguments
    with pytest.raises(ValueError, match="padding masks nor dropout"):
        prompt_tuning.tiled_attention(torch.nn.Identity(), heads, heads, heads, **options)
