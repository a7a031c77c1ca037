"""Talk to a running server (`make serve`) with the openai client."""

from __future__ import annotations

import argparse

from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--model", help="as the server calls it; the first one that it lists, if left out")
parser.add_argument("--api-key", default="none", help="needed where the service has keys")
args = parser.parse_args()

client = OpenAI(base_url=args.url, api_key=args.api_key)
model = args.model or client.models.list().data[0].id


def question(text: str) -> list[ChatCompletionUserMessageParam]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


answer = client.chat.completions.create(
    model=model, messages=question("What is the capital of Germany?"), temperature=0, max_completion_tokens=50
)
print(answer.choices[0].message.content)

stream = client.chat.completions.create(
    model=model, messages=question("Write a short poem."), max_completion_tokens=100, stream=True
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
