"""What an operator may do over HTTP: change the weights of the service, see how that gets on, empty the prefix cache.

Owns what the routes answer, and who may ask where no key tells: clients on the same machine, and of those none that
speaks for somebody else, so no proxy and no web page in a browser. What happens then is the roll-out's
(cluster/weights_rollout.py) and the frontend's.
"""

from __future__ import annotations

from typing import Protocol

from tournant.cluster.weights_rollout import Status, UpdateNameTaken, UpdateRunning, UpdateUnavailable
from tournant.deploy.access_config import is_loopback
from tournant.deploy.http_client import WEIGHTS_PATH
from tournant.deploy.http_exchange import SANE_REQUEST_ID, Exchange
from tournant.deploy.http_routes import FrontendProvider, Handler, Routes, need_frontend
from tournant.deploy.openai_schema import ApiError, WeightsBody, invalid, parse_body

RETRY_S = 1
RESET_PATH = "/reset_prefix_cache"
FOR_OTHERS = (b"forwarded", b"x-forwarded-for", b"origin")  # headers that proxies and browsers send


class WeightsService(Protocol):
    """Who knows of weights: `cluster.weights_actor.WeightsClient`."""

    async def update(self, model: str | None, tag: str) -> int:
        """Begin an update and return its epoch. Errors: as of `Rollout.update`."""

    async def status(self) -> Status:
        """What everybody does. Raises UpdateUnavailable."""


class AdminRoutes:
    """See the module. weights: None = nobody can change them; max_body_bytes: as for every other route; loopback_only:
    no key is asked for.
    """

    def __init__(
        self, provider: FrontendProvider, weights: WeightsService | None, max_body_bytes: int, *, loopback_only: bool
    ) -> None:
        self._provider = provider
        self._weights = weights
        self._max_body_bytes = max_body_bytes
        self._loopback_only = loopback_only

    @property
    def routes(self) -> Routes:
        """Handlers by path and method."""
        found = {RESET_PATH: {"POST": self._reset}}
        if self._weights is not None:
            weights = WeightsRoutes(self._weights, self._max_body_bytes)
            found[WEIGHTS_PATH] = {"GET": weights.status, "POST": weights.update}
        if not self._loopback_only:
            return found
        return {
            path: {method: _only_here(handler) for method, handler in handlers.items()}
            for path, handlers in found.items()
        }

    async def _reset(self, exchange: Exchange) -> None:
        await exchange.respond_json({"success": await need_frontend(self._provider).reset_prefix_cache()})


class WeightsRoutes:
    """Handlers of WEIGHTS_PATH."""

    def __init__(self, weights: WeightsService, max_body_bytes: int) -> None:
        self._weights = weights
        self._max_body_bytes = max_body_bytes

    async def status(self, exchange: Exchange) -> None:
        """What everybody does."""
        try:
            status = await self._weights.status()
        except UpdateUnavailable as error:
            raise _unavailable(error) from error
        await exchange.respond_json(status.to_plain())

    async def update(self, exchange: Exchange) -> None:
        """Begin an update, or name the one that began by the same `idempotency-key`."""
        body = parse_body(WeightsBody, await exchange.body(self._max_body_bytes))
        try:
            epoch = await self._weights.update(body.model, _tag(exchange))
        except UpdateRunning as error:
            raise ApiError(409, str(error), None, "update_running") from error
        except UpdateNameTaken as error:
            raise ApiError(409, str(error), "idempotency-key", "update_name_taken") from error
        except UpdateUnavailable as error:
            raise _unavailable(error) from error
        await exchange.respond_json({"epoch": epoch, "status_url": WEIGHTS_PATH}, 202)


def _unavailable(error: UpdateUnavailable) -> ApiError:
    return ApiError(503, str(error), None, "update_unavailable", (("retry-after", str(RETRY_S)),))


def _tag(exchange: Exchange) -> str:
    """What makes a repeated request the same update."""
    key = exchange.header(b"idempotency-key")
    if not key:
        return exchange.request_id
    if not SANE_REQUEST_ID.match(key):
        raise invalid("idempotency-key must be 1 to 128 letters, digits and . _ : -", "idempotency-key")
    return key.decode()


def _only_here(handler: Handler) -> Handler:
    async def checked(exchange: Exchange) -> None:
        _check_client(exchange)
        await handler(exchange)

    return checked


def _check_client(exchange: Exchange) -> None:
    """Raises ApiError 403 unless the client is on this machine and speaks for itself."""
    for_others = [name.decode() for name in FOR_OTHERS if exchange.has_header(name)]
    if for_others or not is_loopback(exchange.host):
        who = f"a request with the header {for_others[0]}" if for_others else repr(exchange.host or "an unknown client")
        raise ApiError(
            403,
            f"{exchange.path} is only for clients on the machine that it runs on, without a proxy or browser between, "
            f"not for {who}; ask from there, give operators a port of their own (access.admin_port), or call the "
            "service's handle",
            None,
            "not_loopback",
        )
