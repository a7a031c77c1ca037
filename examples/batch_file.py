"""Answer every line of a JSONL file with Ray Data, on as many machines as the cluster has. No service is needed.

`pip install 'ray[data]'`, then `python examples/batch_file.py prompts.jsonl answers --workers 4`. Each line of
prompts.jsonl is an object with "prompt"; the files in answers/ have the same objects, with "answer" and "tokens".
Each worker has an engine of its own, which takes its GPU where the cluster has any.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray

from tournant.deploy.llm import LLM
from tournant.workers.sampling_params import SamplingParams


class Answerer:
    """A worker: one engine, which lives for all its batches."""

    def __init__(self, model: str | None, max_tokens: int) -> None:
        self._llm = LLM(model)
        self._params = SamplingParams(temperature=0, max_tokens=max_tokens)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs = self._llm.generate(batch["prompt"].tolist(), self._params, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        tokens = [len(answer.token_ids) for answer in answers]
        return batch | {"answer": [answer.text for answer in answers], "tokens": tokens}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", help="a .jsonl file, or a folder of them; every machine reads it")
    parser.add_argument("answers", help="a folder, which every machine writes to")
    parser.add_argument("--model", help="folder, .gguf file or hub id; SmolLM2-135M-Instruct, if left out")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256, help="lines that an engine gets at once")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    ray.init(ignore_reinit_error=True)  # the cluster of RAY_ADDRESS, else a Ray of this program's own
    lines = ray.data.read_json(args.prompts, lines=True)
    answered = lines.map_batches(
        Answerer,
        fn_constructor_args=(args.model, args.max_tokens),
        batch_size=args.batch_size,
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        num_gpus=1 if ray.cluster_resources().get("GPU") else 0,
    )
    answered.write_json(args.answers)
