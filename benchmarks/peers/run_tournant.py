"""Tournant as a contestant: its engine inside this process, no prefix cache, everything else as it is by default.

In float32, which is asked for to compare tokens exactly, quantised matrices are dequantised.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from job_loop import Generate, serve

from tournant.workers.config import EngineConfig
from tournant.workers.engine_process import build_engine
from tournant.workers.messages import EngineRequest
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.families import describe
from tournant.workers.sampling_params import SamplingParams


def load(arguments: dict[str, Any]) -> tuple[str, Generate]:
    """The engine of a model folder in a dtype."""
    config = EngineConfig(
        device="cpu",
        dtype=arguments["dtype"],
        quantization="dequantize" if arguments["dtype"] == "float32" else "auto",
        enable_prefix_caching=False,
        num_threads=arguments["threads"],
    )
    model = describe(ModelFiles(Path(arguments["folder"]), "model", bytes(32)), config)
    engine, info = build_engine(config, model, writer_id=1)

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            if refused := engine.add_request(EngineRequest(index, prompt, params)):
                raise RuntimeError(f"refused: {refused[0].error}")
        tokens: list[list[int]] = [[] for _ in prompts]
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
        return tokens

    return f"tournant, {info.dtype}, weights {engine.runner.namespace.numerics.rpartition('/')[2]}", generate


if __name__ == "__main__":
    serve(load)
