"""The OpenAI-compatible HTTP API as an ASGI application.

Owns routes and the translation between HTTP and `Frontend`. Schemas are openai_schema.py's, response bodies
openai_convert.py's. It is a bare ASGI callable, without a framework's layers, because the streaming path runs for every
token: `uvicorn_config` serves it, and so does Ray Serve.

Invariants:
 1. Every request gets a response or, once a stream has begun, a last event; every error is OpenAI's error object.
 2. A client that goes away stops its work in the engine at once, streamed or not.
 3. Nothing of a prompt or an answer is logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST

from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.deploy.admin_routes import AdminRoutes, Handler, WeightsService
from tournant.deploy.errors import GenerationFailed, PromptTooLong, RequestError
from tournant.deploy.frontend import Frontend
from tournant.deploy.generation import GenerationStream
from tournant.deploy.http_exchange import CLIENT_GONE, ClientGone, Exchange, Receive, Scope, Send
from tournant.deploy.openai_convert import ChatWriter, CompletionWriter, ResponseWriter, token_string
from tournant.deploy.openai_schema import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Message,
    TokenizeBody,
    invalid,
    parse_body,
)
from tournant.workers.errors import EngineDeadError, Overloaded

VERSION = version("tournant")
MODELS, MODEL = "/v1/models", "/v1/models/{id}"
RETRY_SOON = (("retry-after", "1"),)
FAILURE_STATUS = {"engine_dead": 503, "engine_error": 500, "timeout": 504, "weights_changed": 503}

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
FrontendProvider = Callable[[], Frontend | None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """What an operator chooses about the HTTP side.

    served_model_name: names that requests may use, the first one is listed; max_body_bytes: longer bodies get 413;
    max_concurrent_requests: requests that may be open at once, whatever they do, before 429.
    send_request_id: put x-request-id into responses; Ray Serve does so itself.
    """

    served_model_name: tuple[str, ...]
    max_body_bytes: int = 8 << 20
    max_concurrent_requests: int = 16384
    send_request_id: bool = True
    created: int = field(default_factory=lambda: int(time.time()))


def build_http_app(
    frontend_provider: FrontendProvider,
    options: HttpOptions,
    metrics: MetricsRegistry,
    prometheus: PrometheusBackend,
    weights: WeightsService | None = None,
) -> AsgiApp:
    """The ASGI application. frontend_provider: the frontend to use now, None while there is none (503).

    metrics, prometheus: what `/metrics` brings up to date and shows; the frontend must feed the same registry.
    weights: changes them, None = nobody can, and there is no route for it.
    """
    return HttpApp(frontend_provider, options, metrics, prometheus, weights)


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


class HttpApp:
    """See `build_http_app`."""

    def __init__(
        self,
        frontend_provider: FrontendProvider,
        options: HttpOptions,
        metrics: MetricsRegistry,
        prometheus: PrometheusBackend,
        weights: WeightsService | None,
    ) -> None:
        self._provider = frontend_provider
        self._options = options
        self._metrics = metrics
        self._prometheus = prometheus
        self._open = 0
        self._routes: dict[str, Mapping[str, Handler]] = {
            MODELS: {"GET": self._models},
            MODEL: {"GET": self._model},
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
            "/health": {"GET": self._health},
            "/version": {"GET": self._version},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/metrics": {"GET": self._show_metrics},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
        }
        if weights is not None:
            self._routes |= AdminRoutes(weights, options.max_body_bytes).routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        exchange = Exchange(scope, receive, send, send_request_id=self._options.send_request_id)
        self._open += 1
        try:
            await self._serve(exchange)
        except ClientGone:
            exchange.finished = False
        finally:
            self._open -= 1
            self._metrics.record_http(exchange.route, exchange.status or CLIENT_GONE)
            exchange.log()

    async def _serve(self, exchange: Exchange) -> None:
        """Run the handler and turn whatever it raises into an answer."""
        try:
            if self._open > self._options.max_concurrent_requests:
                raise Overloaded(f"{self._open} requests are open, of at most {self._options.max_concurrent_requests}")
            await self._route(exchange)(exchange)
        except ClientGone:
            raise
        except Exception as error:
            failure = _api_error(error)
            if failure.status == 500:
                logger.error("request %s failed", exchange.request_id, exc_info=error)
            await exchange.fail(failure)

    def _route(self, exchange: Exchange) -> Handler:
        path = exchange.path
        if path.startswith(MODELS + "/"):
            path = MODEL
        if path not in self._routes:
            raise ApiError(404, f"there is no {exchange.path[:100]!r} here; the API is under /v1", None, "not_found")
        exchange.route = path
        handlers = self._routes[path]
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in handlers:
            allowed = ", ".join(handlers)
            raise ApiError(
                405,
                f"{path} allows {allowed}, not {exchange.method[:20]}",
                None,
                "method_not_allowed",
                (("allow", allowed),),
            )
        return handlers[method]

    def _frontend(self) -> Frontend:
        frontend = self._provider()
        if frontend is None:
            raise ApiError(503, "the engine is not ready yet; try again soon", None, "not_ready", RETRY_SOON)
        return frontend

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
        body = parse_body(ChatBody, await exchange.body(self._options.max_body_bytes))
        frontend, model, params = self._frontend(), self._check_model(body.model), body.sampling()
        usage, continuous = _usage_wanted(body)
        async with frontend.entry(params.n):
            token_ids = await _encode_chat(frontend, body)
            stream = frontend.submit(
                token_ids, params, cache_salt=body.cache_salt, priority=body.priority or 0, join_deltas=not continuous
            )
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
            await _answer(exchange, stream, writer, bool(body.stream))

    async def _completions(self, exchange: Exchange) -> None:
        body = parse_body(CompletionBody, await exchange.body(self._options.max_body_bytes))
        frontend, model, params = self._frontend(), self._check_model(body.model), body.sampling()
        prompts = body.prompts()
        usage, continuous = _usage_wanted(body)
        async with frontend.entry(len(prompts) * params.n):
            tokenizer = frontend.tokenizer
            special = body.add_special_tokens is not False
            token_lists = [
                await tokenizer.encode_async(prompt, special) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]
            stream = frontend.submit_many(
                token_lists, params, cache_salt=body.cache_salt, priority=body.priority or 0, join_deltas=not continuous
            )
        with stream:
            echo = None
            if body.echo:
                echo = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt, False) for prompt in prompts]
            writer = CompletionWriter(
                f"cmpl-{exchange.request_id}", model, int(time.time()), tokenizer, stream, usage, continuous, echo
            )
            await _answer(exchange, stream, writer, bool(body.stream))

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

    async def _health(self, exchange: Exchange) -> None:
        frontend = self._frontend()
        if not await frontend.healthy():
            if frontend.stopping:
                raise ApiError(503, "the service is stopping", None, "stopping")
            raise ApiError(503, "the engine cannot generate", None, "unhealthy")
        if frontend.engine.restarting:
            raise ApiError(503, "the engine is being started anew; try again", None, "restarting", RETRY_SOON)
        await exchange.respond_json({"status": "ok"})

    async def _version(self, exchange: Exchange) -> None:
        await exchange.respond_json({"version": VERSION})

    async def _tokenize(self, exchange: Exchange) -> None:
        body = parse_body(TokenizeBody, await exchange.body(self._options.max_body_bytes))
        self._check_model(body.model)
        frontend = self._frontend()
        tokenizer = frontend.tokenizer
        if body.prompt is not None:
            token_ids = await tokenizer.encode_async(body.prompt, body.add_special_tokens is not False)
        else:
            token_ids = await _encode_chat(frontend, body)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": frontend.engine.info.max_model_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = [token_string(tokenizer.token_bytes(token_id)) for token_id in token_ids]
        await exchange.respond_json(answer)

    async def _detokenize(self, exchange: Exchange) -> None:
        body = parse_body(DetokenizeBody, await exchange.body(self._options.max_body_bytes))
        self._check_model(body.model)
        tokenizer = self._frontend().tokenizer
        for token_id in body.tokens:
            if not 0 <= token_id < tokenizer.vocab_size:
                raise invalid(f"tokens has {token_id}; token ids are 0 to {tokenizer.vocab_size - 1}", "tokens")
        await exchange.respond_json({"prompt": tokenizer.decode(body.tokens, bool(body.skip_special_tokens))})

    async def _show_metrics(self, exchange: Exchange) -> None:
        frontend = self._provider()
        if frontend is not None:
            engine = frontend.engine
            self._metrics.record_engine(engine.stats, engine.alive, frontend.num_outstanding, frontend.epoch)
        await exchange.respond(200, self._prometheus.render(), CONTENT_TYPE_LATEST)

    async def _reset_prefix_cache(self, exchange: Exchange) -> None:
        await exchange.respond_json({"success": await self._frontend().reset_prefix_cache()})


async def _answer(exchange: Exchange, stream: GenerationStream, writer: ResponseWriter, streamed: bool) -> None:
    """Send all answers of a stream, which is cancelled when the client goes away."""
    watcher = asyncio.ensure_future(exchange.watch_disconnect(stream.cancel))
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


async def _encode_chat(frontend: Frontend, body: ChatBody | TokenizeBody) -> list[int]:
    messages: Sequence[Message] = body.messages or ()
    continues = bool(body.continue_final_message)
    generation_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    try:
        return await frontend.tokenizer.apply_chat_async(
            [message.to_template(place) for place, message in enumerate(messages)],
            add_generation_prompt=generation_prompt,
            continue_final_message=continues,
            template_kwargs=body.chat_template_kwargs,
        )
    except ValueError as error:
        raise RequestError(str(error), "messages") from error


def _usage_wanted(body: GenerationBody) -> tuple[bool, bool]:
    """(usage at the end of a stream, usage in every event)."""
    options = body.stream_options
    if options is None:
        return False, False
    return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)


def _api_error(error: Exception) -> ApiError:
    """What a client is told about an exception."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return invalid(str(error), error.param, "context_length_exceeded")
        case RequestError():
            return invalid(str(error), error.param)
        case Overloaded():
            return ApiError(429, str(error), None, "overloaded", (("retry-after", str(error.retry_after_s)),))
        case EngineDeadError():
            return ApiError(503, str(error), None, "engine_dead", RETRY_SOON)
        case GenerationFailed(kind="cancelled"):
            raise ClientGone from error
        case GenerationFailed():
            status = FAILURE_STATUS[error.kind]
            return ApiError(status, str(error), None, error.kind, RETRY_SOON if status == 503 else ())
    return ApiError(
        500,
        "something went wrong in the server; its log has the details under this request's id",
        None,
        "internal_error",
    )


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
