"""transformers' `generate` as a contestant: a batch of prompts of equal length, its own KV cache and attention."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from job_loop import Generate, serve
from transformers import AutoModelForCausalLM, GenerationConfig


def load(arguments: dict[str, Any]) -> tuple[str, Generate]:
    """The model of a folder in a dtype."""
    torch.set_num_threads(arguments["threads"])
    dtype = getattr(torch, arguments["dtype"])
    model = AutoModelForCausalLM.from_pretrained(arguments["folder"], dtype=dtype, local_files_only=True).eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None)  # the folder's own would stop early

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens)
        answers: list[list[int]] = found[:, ids.shape[1] :].tolist()
        return answers

    return f"transformers {transformers.__version__}, {arguments['dtype']}", generate


if __name__ == "__main__":
    serve(load)
