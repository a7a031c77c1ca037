"""What an operator may do over HTTP: so far, change the weights of the service and see how that gets on.

Owns who may do so and what the routes answer; what happens then is the roll-out's (cluster/weights_rollout.py). There
are no keys yet, so only clients on the same machine are let in, and of those none that speaks for somebody else: no
proxy, and no web page in a browser.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from tournant.cluster.weights_rollout import Status, UpdateRunning, UpdateUnavailable
from tournant.deploy.http_client import WEIGHTS_PATH
from tournant.deploy.http_exchange import SANE_REQUEST_ID, Exchange
from tournant.deploy.openai_schema import ApiError, WeightsBody, invalid, parse_body

RETRY_S = 1
FOR_OTHERS = (b"forwarded", b"x-forwarded-for", b"origin")  # headers that proxies and browsers send

Handler = Callable[[Exchange], Awaitable[None]]


class WeightsService(Protocol):
    """Who knows of weights: `cluster.weights_actor.WeightsClient`."""

    async def update(self, model: str | None, tag: str) -> int:
        """Begin an update and return its epoch. Raises UpdateRunning, UpdateUnavailable."""

    async def status(self) -> Status:
        """What everybody does. Raises UpdateUnavailable."""


class AdminRoutes:
    """See the module. max_body_bytes: as for every other route."""

    def __init__(self, weights: WeightsService, max_body_bytes: int) -> None:
        self._weights = weights
        self._max_body_bytes = max_body_bytes

    @property
    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        """Handlers by path and method."""
        return {WEIGHTS_PATH: {"GET": self._status, "POST": self._update}}

    async def _status(self, exchange: Exchange) -> None:
        _check_client(exchange)
        try:
            status = await self._weights.status()
        except UpdateUnavailable as error:
            raise _unavailable(error) from error
        await exchange.respond_json(status.to_plain())

    async def _update(self, exchange: Exchange) -> None:
        _check_client(exchange)
        body = parse_body(WeightsBody, await exchange.body(self._max_body_bytes))
        try:
            epoch = await self._weights.update(body.model, _tag(exchange))
        except UpdateRunning as error:
            raise ApiError(409, str(error), None, "update_running") from error
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


def _check_client(exchange: Exchange) -> None:
    """Raises ApiError 403 unless the client is on this machine and speaks for itself."""
    for_others = [name.decode() for name in FOR_OTHERS if exchange.header(name)]
    if for_others or not _is_loopback(exchange.host):
        who = f"a request with the header {for_others[0]}" if for_others else repr(exchange.host or "an unknown client")
        raise ApiError(
            403,
            f"{exchange.path} is only for clients on the machine that it runs on, without a proxy or browser between, "
            f"not for {who}; run `tournant weights` there, or call the service's handle",
            None,
            "not_loopback",
        )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
