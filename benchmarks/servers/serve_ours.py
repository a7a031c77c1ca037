"""Our HTTP app under the name "m": over a real engine in its own process ({"config": ...}), or over the null engine of
null_engine.py with the tokenizer of a model ({"folder": ...})."""

from __future__ import annotations

import json
import sys
from typing import Any

from host import Hosted, host
from null_engine import NullEngineClient

from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.deploy.config import parse_config
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.http_server import HttpOptions, build_http_app, uvicorn_config
from tournant.deploy.startup import start_engine
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.engine_client import EngineClient

NULL_TOKENS = 64


def null_engine(tokenizer: Tokenizer) -> NullEngineClient:
    """A null engine that says tokens whose text is complete, so that each of them is an event."""
    plain = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token).isalpha()]
    return NullEngineClient(plain[-NULL_TOKENS:], tokenizer.vocab_size)


async def build(arguments: dict[str, Any]) -> Hosted:
    """The HTTP app as the service builds it."""
    engine: EngineClient
    if "config" in arguments:
        _, tokenizer, engine = await start_engine(parse_config(arguments["config"]))
    else:
        tokenizer = Tokenizer.from_folder(arguments["folder"])
        engine = null_engine(tokenizer)
    prometheus = PrometheusBackend()
    metrics = MetricsRegistry("m", prometheus)
    frontend = Frontend(tokenizer, engine, FrontendOptions(), metrics.record_request)
    app = build_http_app(lambda: frontend, HttpOptions(("m",)), metrics, prometheus)
    return Hosted(uvicorn_config(app, "127.0.0.1", 0), f"{engine.info.dtype}, ", engine.close)


if __name__ == "__main__":
    host(build, uvicorn_loop="config" not in json.loads(sys.argv[1]))  # a real engine: the loop Serve gives a replica
