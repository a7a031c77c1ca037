"""What a server tells of itself: `/health`, `/version`, `/metrics`; the same beside the API and for operators.

Owns those answers. Who may ask is the application's (http_routes.py).
"""

from __future__ import annotations

from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST

from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.deploy.http_exchange import Exchange
from tournant.deploy.http_routes import RETRY_SOON, FrontendProvider, Routes, need_frontend
from tournant.deploy.openai_schema import ApiError

VERSION = version("tournant")
HEALTH, METRICS = "/health", "/metrics"


class StatusRoutes:
    """See the module. provider: of the frontend to ask; metrics, prometheus: what is brought up to date and shown."""

    def __init__(self, provider: FrontendProvider, metrics: MetricsRegistry, prometheus: PrometheusBackend) -> None:
        self._provider = provider
        self._metrics = metrics
        self._prometheus = prometheus

    @property
    def routes(self) -> Routes:
        """Handlers by path and method."""
        return {
            HEALTH: {"GET": self._health},
            "/version": {"GET": self._version},
            METRICS: {"GET": self._show_metrics},
        }

    async def _health(self, exchange: Exchange) -> None:
        frontend = need_frontend(self._provider)
        if not frontend.healthy:
            if frontend.stopping:
                raise ApiError(503, "the service is stopping", None, "stopping")
            raise ApiError(503, "the engine cannot generate", None, "unhealthy")
        if frontend.engine.restarting:
            raise ApiError(503, "the engine is being started anew; try again", None, "restarting", RETRY_SOON)
        await exchange.respond_json({"status": "ok"})

    async def _version(self, exchange: Exchange) -> None:
        await exchange.respond_json({"version": VERSION})

    async def _show_metrics(self, exchange: Exchange) -> None:
        frontend = self._provider()
        if frontend is not None:
            engine = frontend.engine
            self._metrics.record_engine(engine.stats, engine.alive, frontend.num_outstanding, frontend.epoch)
        await exchange.respond(200, self._prometheus.render(), CONTENT_TYPE_LATEST)
