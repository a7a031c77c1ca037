"""Call the service from Python on a Ray cluster: whole answers, a stream, and many prompts at a time.

Needs the service on that cluster: `serve deploy deploy/configs/local.yaml`, or, from Python,
`serve.run(tournant.deploy.app.build_app({}), name="tournant")`.
"""

from __future__ import annotations

import argparse

from tournant.deploy.client import connect

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--app", default="tournant", help="the application's name")
parser.add_argument("--address", help="of the cluster, as Ray's; found by Ray, if left out")
args = parser.parse_args()

client = connect(args.app, args.address)

completion = client.chat([{"role": "user", "content": "What is the capital of Germany?"}], temperature=0, max_tokens=50)
print(completion.text, f"({completion.prompt_tokens} + {completion.completion_tokens} tokens)")

for piece in client.stream("Once upon a time", temperature=0.8, seed=1, max_tokens=50):
    print(piece.text, end="", flush=True)
print()

prompts = [f"{number} times {number} is" for number in range(20)]
for outcome in client.batch(prompts, max_in_flight=8, temperature=0, max_tokens=8):
    print(prompts[outcome.number], "->", outcome.error or outcome.text)
