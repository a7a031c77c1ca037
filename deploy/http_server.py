"""The OpenAI-compatible HTTP API as an ASGI application.

Owns the API's routes and the translation between HTTP and `Frontend`. Schemas are openai_schema.py's, response bodies
openai_convert.py's, the way to a handler and back http_routes.py's, who may come in access.py's. `uvicorn_config`
serves it, and so does Ray Serve.

Invariants:
 1. A client that goes away stops its work in the engine at once, streamed or not.
 2. With keys configured every route needs one, but for those of `public_routes`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn

from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.deploy.access import Access, cache_salt
from tournant.deploy.admin_routes import AdminRoutes, WeightsService
from tournant.deploy.errors import RequestError
from tournant.deploy.frontend import Frontend
from tournant.deploy.generation import GenerationStream
from tournant.deploy.http_exchange import ClientGone, Exchange
from tournant.deploy.http_routes import ANY_ID, AsgiApp, FrontendProvider, RoutedApp, Routes, need_frontend
from tournant.deploy.large_bodies import parse_request
from tournant.deploy.openai_convert import ChatWriter, CompletionWriter, ResponseWriter
from tournant.deploy.openai_schema import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    invalid,
)
from tournant.deploy.quota import Tenant, TenantQuota, TenantRequest
from tournant.deploy.status_routes import HEALTH, METRICS, StatusRoutes
from tournant.deploy.tokenizing import MAX_TOKENIZE_BYTES, TokenizePool, chat_arguments, detokenize, tokenize

MODELS = "/v1/models"
MODEL = f"{MODELS}/{ANY_ID}"
MAX_OPEN_REQUESTS = 16384
MAX_CHARS_PER_TOKEN = 64  # on average over a prompt; usual texts have four
SESSION_BYTES = 16  # whatever clients call their conversations


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """What an operator chooses about the HTTP side.

    served_model_name: names that requests may use, the first one is listed; max_body_bytes: longer bodies get 413;
    max_concurrent_requests: requests that may be open at once, whatever they do, before 503.
    send_request_id: put x-request-id into responses; Ray Serve does so itself.
    """

    served_model_name: tuple[str, ...]
    max_body_bytes: int = 8 << 20
    max_concurrent_requests: int = MAX_OPEN_REQUESTS
    send_request_id: bool = True
    created: int = field(default_factory=lambda: int(time.time()))


def build_http_app(
    frontend_provider: FrontendProvider,
    options: HttpOptions,
    metrics: MetricsRegistry,
    prometheus: PrometheusBackend,
    weights: WeightsService | None = None,
    access: Access | None = None,
) -> RoutedApp:
    """The ASGI application. frontend_provider: the frontend to use now, None while there is none (503).

    metrics, prometheus: what `/metrics` brings up to date and shows; the frontend must feed the same registry.
    weights: changes them, None = nobody can, and there is no route for it. access: None = everybody may come in. Routes
    of operators are here unless access has a port of their own for them.
    """
    api = ApiRoutes(frontend_provider, options)
    routes = {**api.routes, **StatusRoutes(frontend_provider, metrics, prometheus).routes}
    if access is None or access.config.admin_port is None:
        routes |= AdminRoutes(frontend_provider, weights, options.max_body_bytes, loopback_only=True).routes

    async def guard(exchange: Exchange) -> None:
        if access is not None:
            exchange.tenant = await access.tenant(exchange.header(b"authorization"))

    return RoutedApp(
        routes,
        metrics,
        options.max_concurrent_requests,
        send_request_id=options.send_request_id,
        guard=guard if access is not None and access.needs_key else None,
        public=public_routes(access),
    )


def public_routes(access: Access | None) -> tuple[str, ...]:
    """Paths that need no key, whatever is configured."""
    return (HEALTH, METRICS) if access is not None and access.config.public_metrics else (HEALTH,)


def uvicorn_config(app: AsgiApp, host: str, port: int) -> uvicorn.Config:
    """How uvicorn serves the application: httptools and uvloop where they are installed, our own access log."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=30,
    )


class ApiRoutes:
    """Handlers of the API. Arguments as of `build_http_app`."""

    def __init__(self, frontend_provider: FrontendProvider, options: HttpOptions) -> None:
        self._provider = frontend_provider
        self._options = options
        self._anybody = TenantQuota(Tenant(""), time.monotonic)  # where there are no keys
        self._tokenizing = TokenizePool()

    @property
    def routes(self) -> Routes:
        """Handlers by path and method."""
        return {
            MODELS: {"GET": self._models},
            MODEL: {"GET": self._model},
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
        }

    def _frontend(self) -> Frontend:
        return need_frontend(self._provider)

    def _begin(self, exchange: Exchange) -> TenantRequest:
        """Count a request with its tenant's. Raises QuotaExceeded."""
        return (self._anybody if exchange.tenant is None else exchange.tenant).begin()

    def _check_model(self, name: str | None) -> str:
        """The name to answer under. Raises ApiError 404 for a model that is not served here."""
        names = self._options.served_model_name
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist; this server has {', '.join(names)}",
                "model",
                "model_not_found",
            )
        return name or names[0]

    # ------------------------------------------------------------ generation

    async def _chat(self, exchange: Exchange) -> None:
        body = await parse_request(ChatBody, await exchange.body(self._options.max_body_bytes))
        frontend, model, params = self._frontend(), self._check_model(body.model), body.sampling()
        salt = cache_salt(_tenant(exchange), body.cache_salt)
        usage, continuous = _usage_wanted(body)
        with self._begin(exchange) as use:
            async with frontend.entry(params.n):
                token_ids = await _encode_chat(frontend, body)
                use.take_prompt(len(token_ids))
                stream = frontend.submit(
                    token_ids,
                    params,
                    cache_salt=salt,
                    priority=body.priority or 0,
                    join_deltas=not continuous,
                    session=_session(exchange, body),
                )
            use.accept()
            with stream:
                writer = ChatWriter(
                    f"chatcmpl-{exchange.request_id}",
                    model,
                    int(time.time()),
                    stream.tokenizer,
                    stream,
                    usage,
                    continuous,
                )
                await _answer(exchange, stream, writer, bool(body.stream), use)

    async def _completions(self, exchange: Exchange) -> None:
        body = await parse_request(CompletionBody, await exchange.body(self._options.max_body_bytes))
        frontend, model, params = self._frontend(), self._check_model(body.model), body.sampling()
        prompts, salt = body.prompts(), cache_salt(_tenant(exchange), body.cache_salt)
        usage, continuous = _usage_wanted(body)
        with self._begin(exchange) as use:
            async with frontend.entry(len(prompts) * params.n):
                tokenizer = frontend.tokenizer
                special = body.add_special_tokens is not False
                _check_chars(sum(len(prompt) for prompt in prompts if isinstance(prompt, str)), len(prompts), frontend)
                token_lists = [
                    await tokenizer.encode_async(prompt, special) if isinstance(prompt, str) else prompt
                    for prompt in prompts
                ]
                use.take_prompt(sum(map(len, token_lists)))
                stream = frontend.submit_many(
                    token_lists,
                    params,
                    cache_salt=salt,
                    priority=body.priority or 0,
                    join_deltas=not continuous,
                    session=_session(exchange, body),
                )
            use.accept()
            with stream:
                echo = None
                if body.echo:
                    echo = [
                        prompt if isinstance(prompt, str) else tokenizer.decode(prompt, False) for prompt in prompts
                    ]
                writer = CompletionWriter(
                    f"cmpl-{exchange.request_id}", model, int(time.time()), tokenizer, stream, usage, continuous, echo
                )
                await _answer(exchange, stream, writer, bool(body.stream), use)

    # ------------------------------------------------------------ the rest

    async def _models(self, exchange: Exchange) -> None:
        cards = [self._card(name) for name in self._options.served_model_name]
        await exchange.respond_json({"object": "list", "data": cards})

    async def _model(self, exchange: Exchange) -> None:
        await exchange.respond_json(self._card(self._check_model(exchange.path[len(MODELS) + 1 :])))

    def _card(self, name: str) -> dict[str, Any]:
        frontend = self._frontend()
        info, weights = frontend.engine.info, frontend.served_weights
        return {
            "id": name,
            "object": "model",
            "created": self._options.created,
            "owned_by": "tournant",
            "root": self._options.served_model_name[0],
            "parent": None,
            "max_model_len": info.max_model_len,
            "max_sequence_tokens": info.max_sequence_tokens,
            "weights_id": weights.weights_id,
            "epoch": weights.epoch,
        }

    async def _tokenize(self, exchange: Exchange) -> None:
        data = await exchange.body(min(self._options.max_body_bytes, MAX_TOKENIZE_BYTES))
        with self._begin(exchange) as use:
            body = await parse_request(TokenizeBody, data)
            self._check_model(body.model)
            frontend = self._frontend()
            make = partial(tokenize, frontend.tokenizer, body, frontend.engine.info.max_model_len)
            answer = await self._tokenizing.run(len(data), make)
            use.accept()
            await exchange.respond(200, answer)

    async def _detokenize(self, exchange: Exchange) -> None:
        data = await exchange.body(min(self._options.max_body_bytes, MAX_TOKENIZE_BYTES))
        with self._begin(exchange) as use:
            body = await parse_request(DetokenizeBody, data)
            self._check_model(body.model)
            answer = await self._tokenizing.run(len(data), partial(detokenize, self._frontend().tokenizer, body))
            use.accept()
            await exchange.respond(200, answer)


async def _answer(
    exchange: Exchange, stream: GenerationStream, writer: ResponseWriter, streamed: bool, use: TenantRequest
) -> None:
    """Send all answers of a stream, which is cancelled when the client goes away."""
    watcher = asyncio.get_running_loop().create_task(exchange.watch_disconnect(stream.cancel))
    limit = min(stream.max_tokens)
    headers = [] if limit == stream.params.max_tokens else [("x-tournant-max-tokens", str(limit))]
    try:
        if streamed:
            await _send_stream(exchange, stream, writer, headers)
        else:
            completion = await stream.collect()
            await exchange.respond(200, writer.whole(completion), headers=headers)
    finally:
        watcher.cancel()
        usage = stream.usage
        use.take_generated(usage.completion_tokens)
        exchange.prompt_tokens, exchange.completion_tokens = usage.prompt_tokens, usage.completion_tokens


async def _send_stream(
    exchange: Exchange, stream: GenerationStream, writer: ResponseWriter, headers: list[tuple[str, str]]
) -> None:
    """Send events until the stream is over. An error before the first event is still an ordinary error response."""
    while deltas := await stream.next_deltas():
        events: list[str] = []
        for delta in deltas:
            if delta.error is not None:
                if events:
                    await exchange.send_events("".join(events), last=False)
                raise delta.error
            if not exchange.status:
                await exchange.start_events(headers)
            events.append(writer.chunk(delta))
        last = stream.drained
        if last:
            events.append(writer.end())
        await exchange.send_events("".join(events), last)
        if last:
            return
    raise ClientGone


def _tenant(exchange: Exchange) -> Tenant | None:
    return None if exchange.tenant is None else exchange.tenant.tenant


def _session(exchange: Exchange, body: GenerationBody) -> str:
    """What names a request's conversation, one of its tenant: x-session-id, else the body; "" = nothing does."""
    named = (exchange.header(b"x-session-id").decode("latin-1"), body.prompt_cache_key, body.user)
    found = next((name for name in named if isinstance(name, str) and name), None)
    if found is None:
        return ""
    tenant = _tenant(exchange)
    whose = "" if tenant is None else tenant.name
    return hashlib.blake2b(f"{whose}\0{found}".encode("utf-8", "surrogatepass"), digest_size=SESSION_BYTES).hexdigest()


def _check_chars(num_chars: int, num_prompts: int, frontend: Frontend) -> None:
    """Raises ApiError for prompts that cannot fit whatever their tokens are, before they are encoded."""
    limit = frontend.engine.info.max_sequence_tokens
    if num_chars > MAX_CHARS_PER_TOKEN * limit * num_prompts:
        raise invalid(
            f"the prompt is too long: it has {num_chars} characters, but prompt and answer together may have at most "
            f"{limit} tokens, of some characters each; shorten it",
            "prompt",
            "context_length_exceeded",
        )


async def _encode_chat(frontend: Frontend, body: ChatBody) -> list[int]:
    messages, options = chat_arguments(body)
    _check_chars(sum(len(message["content"]) for message in messages), 1, frontend)
    try:
        return await frontend.tokenizer.apply_chat_async(messages, **options)
    except ValueError as error:
        raise RequestError(str(error), "messages") from error


def _usage_wanted(body: GenerationBody) -> tuple[bool, bool]:
    """(usage at the end of a stream, usage in every event)."""
    options = body.stream_options
    if options is None:
        return False, False
    return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)
