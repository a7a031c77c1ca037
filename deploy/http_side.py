"""Everything that a process of the service serves over HTTP: the API, and the operators' routes where they have a port.

Owns the server of that port; Serve's proxy serves the API. Several replicas on one node may be given the same port,
also for as long as a new one takes over from an old one: one of them listens, the others as soon as it has ended.

Invariants:
 1. Without their key the operators' routes answer clients on the same machine alone, and without a port of their own
    they are beside the API, for those clients (admin_routes.py).
 2. After `close` nothing listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress

import uvicorn

from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.deploy.access import Access
from tournant.deploy.access_config import AccessConfig
from tournant.deploy.admin_routes import AdminRoutes, WeightsService
from tournant.deploy.http_exchange import Exchange
from tournant.deploy.http_routes import FrontendProvider, RoutedApp
from tournant.deploy.http_server import HttpOptions, build_http_app, uvicorn_config
from tournant.deploy.status_routes import HEALTH, StatusRoutes

RETRY_S = 1.0  # for a port that another one has
GRACE_S = 2

logger = logging.getLogger("tournant.admin")


def build_admin_app(
    frontend_provider: FrontendProvider,
    options: HttpOptions,
    metrics: MetricsRegistry,
    prometheus: PrometheusBackend,
    weights: WeightsService | None,
    access: Access,
) -> RoutedApp:
    """The operators' routes with `/health`, `/version` and `/metrics`; arguments as of `build_http_app`."""
    needs_key = access.admin_needs_key
    admin = AdminRoutes(frontend_provider, weights, options.max_body_bytes, loopback_only=not needs_key)

    async def guard(exchange: Exchange) -> None:
        await access.check_admin(exchange.header(b"authorization"))

    return RoutedApp(
        {**StatusRoutes(frontend_provider, metrics, prometheus).routes, **admin.routes},
        metrics,
        options.max_concurrent_requests,
        guard=guard if needs_key else None,
        public=(HEALTH,),
    )


class HttpSide:
    """See the module; arguments as of `build_http_app`. To be made on a running event loop.

    app: the API, for Serve. Reads the files that `config` names; raises ConfigError.
    """

    def __init__(
        self,
        config: AccessConfig,
        frontend_provider: FrontendProvider,
        options: HttpOptions,
        metrics: MetricsRegistry,
        prometheus: PrometheusBackend,
        weights: WeightsService | None = None,
    ) -> None:
        access = Access(config)
        self.app = build_http_app(frontend_provider, options, metrics, prometheus, weights, access)
        self.admin_address: tuple[str, int] | None = None  # where it listens now
        self._task: asyncio.Task[None] | None = None
        self._server: uvicorn.Server | None = None
        if config.admin_port is not None:
            admin = build_admin_app(frontend_provider, options, metrics, prometheus, weights, access)
            self._task = asyncio.get_running_loop().create_task(self._run(admin, config.admin_host, config.admin_port))

    async def _run(self, app: RoutedApp, host: str, port: int) -> None:
        listening = await _listen(host, port)
        self.admin_address = (host, listening.getsockname()[1])
        logger.info("operators are served at http://%s:%d", *self.admin_address)
        self._server = _Server(uvicorn_config(app, *self.admin_address))
        self._server.config.timeout_graceful_shutdown = GRACE_S
        try:
            await self._server.serve(sockets=[listening])
        finally:
            self.admin_address = None
            listening.close()

    async def close(self) -> None:
        """Serve operators no more. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        if self._server is not None and self._server.started:
            self._server.should_exit = True
        else:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _listen(host: str, port: int) -> socket.socket:
    """A socket at this address, as soon as nobody else has it."""
    told = False
    while True:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            listening = socket.create_server(address[:2], family=family, backlog=128)
            listening.setblocking(False)
            return listening
        except OSError as error:
            if not told:
                logger.warning(
                    "port %d of %s for operators cannot be had (%s); it is tried again until another replica on this "
                    "node, or whoever has it, gives it up",
                    port,
                    host,
                    error.strerror or error,
                )
            told = True
        await asyncio.sleep(RETRY_S)
