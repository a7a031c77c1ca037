"""The HTTP application over a fake engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.deploy.asgi_client import Call, fetch
from tests.deploy.fake_engine import FakeEngineClient, make_info
from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.deploy.access import Access
from tournant.deploy.admin_routes import WeightsService
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.http_routes import RoutedApp
from tournant.deploy.http_server import HttpOptions, build_http_app
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.engine_client import EngineClient

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What is it?"}]
ASK = {"messages": MESSAGES, "temperature": 0}
PROMPT = {"prompt": "hi", "temperature": 0}


@dataclass
class Server:
    """An application over a fake engine."""

    app: RoutedApp
    engine: FakeEngineClient
    frontend: Frontend


def make(
    tokenizer: Tokenizer,
    *texts: str,
    options: FrontendOptions | None = None,
    weights: WeightsService | None = None,
    info: dict[str, object] | None = None,
    http: dict[str, Any] | None = None,
    access: Access | None = None,
    **engine: Any,
) -> Server:
    answers = [list(text.encode()) for text in texts]
    client = FakeEngineClient(
        lambda request, index: answers[index % len(answers)], make_info(**(info or {})), **({"auto": True} | engine)
    )
    return over(client, client, tokenizer, options, weights, http, access)


def over(
    client: EngineClient,
    engine: FakeEngineClient,
    tokenizer: Tokenizer,
    options: FrontendOptions | None = None,
    weights: WeightsService | None = None,
    http: dict[str, Any] | None = None,
    access: Access | None = None,
) -> Server:
    """The same over any way to a fake engine."""
    backend = PrometheusBackend()
    metrics = MetricsRegistry("m", backend)
    frontend = Frontend(tokenizer, client, options, metrics.record_request)
    named = HttpOptions(**({"served_model_name": ("m", "alias")} | (http or {})))
    return Server(build_http_app(lambda: frontend, named, metrics, backend, weights, access), engine, frontend)


def content(events: Sequence[dict[str, Any]], index: int = 0) -> str:
    """Text of one answer of a stream, of either API."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def error_of(
    server: Server, path: str, body: object, method: str = "POST", headers: dict[str, str] | None = None
) -> tuple[Call, dict[str, Any]]:
    """A whole request and the error it must end in."""
    call = await fetch(server.app, method, path, body, headers)
    return call, call.error
