"""Call the service from Python through a Serve handle, whole and streamed.

Starts the service on the Ray cluster it finds, else on a Ray of its own. Where it runs already, take
`handle = serve.get_app_handle("tournant")`.
"""

from __future__ import annotations

from ray import serve

from tournant.deploy.app import build_app

handle = serve.run(build_app({}), name="tournant")
messages = [{"role": "user", "content": "What is the capital of Germany?"}]

completion = handle.generate.remote(messages, temperature=0.0, max_tokens=50).result()
print(completion["answers"][0]["text"], completion["usage"])

for delta in handle.options(stream=True).stream.remote(messages, temperature=0.0, max_tokens=50):
    print(delta["text"], end="", flush=True)
print()
