"""vLLM's CPU build as a contestant: its offline engine, no prefix cache, no text made.

It gets as many cores as everyone; left to itself ("auto") it keeps one of them for its scheduler's process. Set
VLLM_CPU_OMP_THREADS_BIND to try other bindings.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from job_loop import Generate, serve

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, what Tournant's pool has
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CORES = sorted(os.sched_getaffinity(0))[: json.loads(sys.argv[1])["threads"]]
BINDING = os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, CORES)))

import vllm  # noqa: E402 - reads the settings above when it is imported


def load(arguments: dict[str, Any]) -> tuple[str, Generate]:
    """The engine of a model folder in a dtype."""
    engine = vllm.LLM(
        model=arguments["folder"],
        dtype=arguments["dtype"],
        max_model_len=arguments["max_model_len"],
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(answer.outputs[0].token_ids) for answer in engine.generate(requests, params, use_tqdm=False)]

    return f"vLLM {vllm.__version__}, {arguments['dtype']}, cores {BINDING}", generate


if __name__ == "__main__":
    serve(load)
