"""llama.cpp through llama-cpp-python as a contestant: the .gguf file itself, all cores, one prompt at a time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import llama_cpp
from job_loop import Generate, serve


def load(arguments: dict[str, Any]) -> tuple[str, Generate]:
    """The model of a .gguf file in the numeric form it has there."""
    threads = arguments["threads"]
    model = llama_cpp.Llama(
        arguments["gguf"], n_ctx=arguments["max_model_len"], n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            model.reset()
            tokens = model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
            answers.append(list(itertools.islice(tokens, max_new_tokens)))
        return answers

    return f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), {Path(arguments['gguf']).stem}", generate


if __name__ == "__main__":
    serve(load)
