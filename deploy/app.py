"""The Serve application: a replica that holds one engine, its frontend and its HTTP API, and serves them itself.

Owns what Serve needs to know (limits, health, endings) and the methods of a handle. With `ingress: direct`, replica and
HTTP are one process, the engine its child; requests reach the ASGI application without a hop through a handle.

Invariants:
 1. Serve's own queue limits lie far above the frontend's, so that overload is answered by the frontend (429).
 2. What crosses a handle is plain: dicts, lists, strings, numbers, and the errors of errors.py.
 3. A replica that cannot generate fails its health check and is replaced; its engine ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.serve import Application

from tournant.cluster.metrics import MetricSpec, MetricsRegistry, PrometheusBackend, Recorder
from tournant.cluster.node_store_actor import find_store
from tournant.cluster.ray_metrics import RayBackend
from tournant.deploy.config import DEPLOYMENT_NAME, ServiceConfig, parse_config, refuse_address
from tournant.deploy.errors import RequestError
from tournant.deploy.frontend import Frontend, FrontendOptions, Prompt
from tournant.deploy.http_server import AsgiApp, HttpOptions, build_http_app
from tournant.deploy.startup import start_engine
from tournant.kvstore.admin import Status, StatusQuery
from tournant.kvstore.client import ask
from tournant.kvstore.errors import StoreRefused, StoreUnavailable
from tournant.workers.errors import EngineDeadError
from tournant.workers.sampling_params import SamplingParams

HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 30.0
GRACEFUL_SHUTDOWN_S = 10.0
SPARE_REQUESTS = 1024  # room in Serve's limits for requests that never reach an engine


class _TwoBackends:
    """Records every metric both for `/metrics` and in Ray."""

    def __init__(self, prometheus: PrometheusBackend) -> None:
        self._backends = (prometheus, RayBackend())

    def recorder(self, spec: MetricSpec, model_name: str) -> Recorder:
        first, second = (backend.recorder(spec, model_name) for backend in self._backends)

        def record(value: float, values: tuple[str, ...]) -> None:
            first(value, values)
            second(value, values)

        return record


@serve.ingress()
class Replica:
    """One replica of the service.

    args: of a ServiceConfig, as `ServiceConfig.to_args` gives them; store_folder: where the node store's socket is put,
    None = a temporary folder of this user.
    """

    def __init__(self, args: Mapping[str, Any], store_folder: str | None = None) -> None:
        self._config = parse_config(args)
        self._store_folder = store_folder
        self._store_socket: str | None = None
        self._frontend: Frontend | None = None
        self._name = ""
        _log_to_stderr(self._config.log_level)

    async def __serve_build_asgi_app__(self) -> AsgiApp:
        """Called by Serve once after construction: load everything and return the HTTP application.

        Raises ConfigError, ModelFormatError and StoreUnavailable; no engine is left then.
        """
        config = self._config
        files, tokenizer, engine = await start_engine(config, find_store=self._find_store)
        self._name = config.served_model_name or files.name
        prometheus = PrometheusBackend()
        self._metrics = MetricsRegistry(self._name, _TwoBackends(prometheus))
        options = FrontendOptions(
            config.request_timeout_s, config.engine.enable_prefix_caching, tiers=self._store_socket is not None
        )
        self._frontend = Frontend(tokenizer, engine, options, self._metrics.record_request)
        http = HttpOptions((self._name,), config.max_body_bytes, send_request_id=False)
        return build_http_app(lambda: self._frontend, http, self._metrics, prometheus)

    def _find_store(self) -> str | None:
        """The node store's socket, once the store runs; None where there is to be none."""
        engine = self._config.engine
        on_gpu = engine.device == "cuda" or (engine.device == "auto" and bool(ray.get_gpu_ids()))
        plan = self._config.kv_store.plan(on_gpu=on_gpu, prefix_caching=engine.enable_prefix_caching)
        if plan is not None:
            self._store_socket = find_store(plan, serve.get_replica_context().app_name, self._store_folder)
        return self._store_socket

    @property
    def frontend(self) -> Frontend:
        """The frontend of the running engine. Raises EngineDeadError before it is ready."""
        if self._frontend is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._frontend

    async def check_health(self) -> None:
        """Called by Serve: raises EngineDeadError unless the engine can generate."""
        frontend = self.frontend
        self._metrics.record_engine(frontend.engine.stats, frontend.engine.alive, frontend.num_outstanding)
        if not await frontend.healthy():
            raise EngineDeadError("the engine cannot generate")

    async def describe(self) -> dict[str, Any]:
        """Facts: model, device, dtype, whether quantised weights are multiplied as they are, engine_pid, the tokens of
        context, pool and longest sequence, and of the node store, if there is one, its socket and `admin.Status`.
        """
        info = self.frontend.engine.info
        return {
            "model": self._name,
            "device": info.device,
            "dtype": info.dtype,
            "native_weights": "native" in info.namespace.numerics.split("/"),
            "engine_pid": info.pid,
            "max_model_len": info.max_model_len,
            "pool_tokens": info.pool_tokens,
            "max_sequence_tokens": info.max_sequence_tokens,
            "kv_store": await self._describe_store(),
        }

    async def _describe_store(self) -> dict[str, Any] | None:
        socket = self._store_socket
        if socket is None:
            return None
        try:
            found = await asyncio.to_thread(ask, Path(socket), StatusQuery())
            return {"socket": socket, **asdict(cast(Status, found))}
        except (StoreUnavailable, StoreRefused) as error:
            return {"socket": socket, "error": str(error)}

    async def end_engine(self) -> None:
        """End the engine now; what runs fails. For `tournant serve`, which then lets the node store end."""
        await self.frontend.engine.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Whole answers to one prompt (text, token ids or chat messages) as a plain `Completion`.

        sampling: fields of SamplingParams. Raises RequestError for what can never be served, Overloaded,
        EngineDeadError, GenerationFailed. Cancelling the call stops the engine's work.
        """
        completion = await self.frontend.generate(
            prompt, _sampling(sampling), cache_salt=cache_salt, priority=priority, timeout_s=timeout_s
        )
        return asdict(completion)

    async def stream(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """As `generate`, piece by piece: plain dicts with index, text, token_ids, logprobs, finish_reason, stop_reason.

        Call it through `handle.options(stream=True)`. Leaving the iteration stops the engine's work.
        """
        stream = await self.frontend.stream(
            prompt, _sampling(sampling), cache_salt=cache_salt, priority=priority, timeout_s=timeout_s
        )
        try:
            async for delta in stream:
                if delta.error is not None:
                    raise delta.error
                yield {
                    "index": delta.index,
                    "text": delta.text,
                    "token_ids": delta.token_ids,
                    "logprobs": delta.logprobs and [(token_id, asdict(entry)) for token_id, entry in delta.logprobs],
                    "finish_reason": delta.finish_reason,
                    "stop_reason": delta.stop_reason,
                }
        finally:
            stream.cancel()

    async def __del__(self) -> None:
        """Called by Serve, which awaits it, when this replica ends."""
        if self._frontend is not None:
            await self._frontend.engine.close()


def _sampling(fields: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams.from_wire(fields)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error).replace("SamplingParams.__init__() got an", "sampling:")) from error


def _log_to_stderr(level: str) -> None:
    """Our own loggers of a Ray worker write to its standard error, which Ray collects."""
    logger = logging.getLogger("tournant")
    logger.setLevel(level.upper())
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


def gpus_wanted(device: str, in_cluster: float) -> int:
    """GPUs to ask of Ray for a replica, which hides all others from it: `auto` takes one where the cluster has any."""
    return int(device == "cuda" or (device == "auto" and in_cluster >= 1))


def make_app(
    config: ServiceConfig, deployment_options: Mapping[str, Any] | None = None, store_folder: str | None = None
) -> Application:
    """The application for a configuration. deployment_options: overrides of what Serve is told about the replica;
    store_folder: as `Replica` says.
    """
    engine = config.engine
    gpus_in_cluster = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0
    capacity = engine.max_num_seqs + engine.max_queued_requests
    options: dict[str, Any] = {
        "num_replicas": config.num_replicas,
        "max_ongoing_requests": 4 * capacity + SPARE_REQUESTS,
        "max_queued_requests": 4 * capacity + SPARE_REQUESTS,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": GRACEFUL_SHUTDOWN_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus_wanted(engine.device, gpus_in_cluster)},
    }
    options |= deployment_options or {}
    deployment = serve.deployment(name=DEPLOYMENT_NAME, **options)(Replica)
    app: Application = deployment.bind(config.to_args(), store_folder)
    return app


def build_app(args: dict[str, Any]) -> Application:
    """What a Serve file names as `import_path`. args: the fields of a ServiceConfig. Raises ConfigError."""
    return make_app(parse_config(refuse_address(args)))
