"""Talk to a running server (`make serve`) with the openai client."""

from __future__ import annotations

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "What is the capital of Germany?"}], temperature=0, max_tokens=50
)
print(answer.choices[0].message.content)

stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Write a short poem."}], stream=True, max_tokens=100
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
