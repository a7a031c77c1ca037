"""What transformers answers: the judge of every test that compares tokens or logits.

One prompt at a time, fp32, eager attention, greedy, end-of-sequence tokens ignored. Models stay loaded, a few at most.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel


@lru_cache(maxsize=4)
def _load(path: Path) -> PreTrainedModel:
    folder, extra = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, **extra
    )
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None)  # the folder's own would stop early
    return model.eval()


def reference_generate(model_path: Path, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy tokens after each prompt (exactly max_new_tokens each). model_path: a folder, or one .gguf file."""
    model = _load(model_path.resolve())
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@torch.inference_mode()
def reference_logits(model_path: Path, token_ids: list[int]) -> torch.Tensor:
    """Logits after every token of one sequence: float32 [len(token_ids), vocab_size]."""
    return _load(model_path.resolve())(torch.tensor([token_ids]), use_cache=False).logits[0].float()
