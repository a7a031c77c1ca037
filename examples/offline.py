"""Generate offline: no Ray, no server."""

from __future__ import annotations

import argparse

from tournant.deploy.llm import LLM
from tournant.workers.sampling_params import SamplingParams

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder, .gguf file or hub id; SmolLM2-135M-Instruct, if left out")
    with LLM(parser.parse_args().model) as llm:
        params = SamplingParams(temperature=0, max_tokens=40)
        for output in llm.generate(["The sky is blue because", "Once upon a time"], params):
            print(output.prompt, "->", output.outputs[0].text)
        for output in llm.chat([{"role": "user", "content": "What is the capital of Germany?"}], params):
            print(output.outputs[0].text)
