"""An ASGI application made of a table of routes: who is let in, which handler answers, what a client is told of errors.

Owns the way of every request from the server to a handler and to an answer; handlers are http_server.py's and
admin_routes.py's. It is a bare ASGI callable, without a framework's layers, because the streaming path runs for every
token.

Invariants:
 1. Every request gets a response or, once a stream has begun, a last event; every error is OpenAI's error object.
 2. The guard is asked before anything is told about a path, but for those that are public.
 3. Nothing of a prompt or an answer is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from tournant.cluster.metrics import MetricsRegistry
from tournant.deploy.errors import GenerationFailed, PromptTooLong, QuotaExceeded, RequestError
from tournant.deploy.frontend import Frontend
from tournant.deploy.http_exchange import CLIENT_GONE, ClientGone, Exchange, Receive, Scope, Send
from tournant.deploy.openai_schema import ApiError, invalid
from tournant.workers.errors import EngineDeadError, Overloaded

RETRY_SOON = (("retry-after", "1"),)
FAILURE_STATUS = {"engine_dead": 503, "engine_error": 500, "timeout": 504, "weights_changed": 503}
ANY_ID = "{id}"  # at the end of a path: whatever follows, slashes included

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
FrontendProvider = Callable[[], Frontend | None]
Handler = Callable[[Exchange], Awaitable[None]]
Routes = Mapping[str, Mapping[str, Handler]]  # by path and method
Guard = Callable[[Exchange], Awaitable[None]]  # raises ApiError for whoever may not come in

logger = logging.getLogger(__name__)


class RoutedApp:
    """See the module. guard: asked for every path that is not public; max_concurrent_requests: open at once, whatever
    they do, before 503; send_request_id: put x-request-id into responses.
    """

    def __init__(
        self,
        routes: Routes,
        metrics: MetricsRegistry,
        max_concurrent_requests: int,
        *,
        send_request_id: bool = True,
        guard: Guard | None = None,
        public: Iterable[str] = (),
    ) -> None:
        self.routes = routes
        self.num_open = 0  # requests
        self._metrics = metrics
        self._max_concurrent_requests = max_concurrent_requests
        self._send_request_id = send_request_id
        self._guard = guard
        self._public = frozenset(public)
        self._prefixes = [(path.removesuffix(ANY_ID), path) for path in routes if path.endswith(ANY_ID)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        exchange = Exchange(scope, receive, send, send_request_id=self._send_request_id)
        self.num_open += 1
        try:
            await self._serve(exchange)
        except ClientGone:
            exchange.finished = False
        finally:
            self.num_open -= 1
            self._metrics.record_http(exchange.route, exchange.status or CLIENT_GONE)
            exchange.log()

    async def _serve(self, exchange: Exchange) -> None:
        """Run the handler and turn whatever it raises into an answer."""
        try:
            if self.num_open > self._max_concurrent_requests:
                raise Overloaded(f"{self.num_open} requests are open, of at most {self._max_concurrent_requests}")
            path = self._path(exchange)
            if self._guard is not None and path not in self._public:
                await self._guard(exchange)
            await self._handler(exchange, path)(exchange)
        except ClientGone:
            raise
        except Exception as error:
            failure = api_error(error)
            if failure.status == 500:
                logger.error("request %s failed", exchange.request_id, exc_info=error)
            await exchange.fail(failure)

    def _path(self, exchange: Exchange) -> str:
        """The path as the table has it, "" where it does not."""
        path = next((found for prefix, found in self._prefixes if exchange.path.startswith(prefix)), exchange.path)
        if path not in self.routes:
            return ""
        exchange.route = path
        return path

    def _handler(self, exchange: Exchange, path: str) -> Handler:
        if not path:
            raise ApiError(404, f"there is no {exchange.path[:100]!r} here; the API is under /v1", None, "not_found")
        handlers = self.routes[path]
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in handlers:
            allowed = ", ".join(handlers)
            message = f"{path} allows {allowed}, not {exchange.method[:20]}"
            raise ApiError(405, message, None, "method_not_allowed", (("allow", allowed),))
        return handlers[method]


def need_frontend(provider: FrontendProvider) -> Frontend:
    """The frontend to use now. Raises ApiError 503 while there is none."""
    frontend = provider()
    if frontend is None:
        raise ApiError(503, "the engine is not ready yet; try again soon", None, "not_ready", RETRY_SOON)
    return frontend


def api_error(error: Exception) -> ApiError:
    """What a client is told about an exception. Raises ClientGone when there is no client any more."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return invalid(str(error), error.param, "context_length_exceeded")
        case RequestError():
            return invalid(str(error), error.param)
        case QuotaExceeded():
            return ApiError(429, str(error), None, "quota_exceeded", (("retry-after", str(error.retry_after_s)),))
        case Overloaded():
            return ApiError(503, str(error), None, "overloaded", (("retry-after", str(error.retry_after_s)),))
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
