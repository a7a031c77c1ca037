"""The Serve application, and the replica that holds one engine, its frontend and its HTTP API, and serves them itself.

Owns what Serve needs to know (limits, health, endings). With `ingress: direct`, replica and HTTP are one process, the
engine its child; requests reach the ASGI application without a hop through a handle. The deployments of
`ingress: resilient` are resilient.py's.

Invariants:
 1. Serve's own queue limits lie far above the frontend's, so that overload is answered by the frontend (503).
 2. What crosses a handle is plain: dicts, lists, strings, numbers, and the errors of errors.py.
 3. A replica that cannot generate, or is lost to the roll-out of weights, fails its health check and is replaced; its
    engine ends with it. One that is being ended fails none: Serve would log it as a fault.
 4. A replica starts with the weights that the roll-out names, whatever is configured, and is called by what is
    configured, whatever weights it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.cluster.weights_actor import WeightsClient
from tournant.cluster.weights_rollout import Weights
from tournant.deploy.config import DEPLOYMENT_NAME, INGRESS_NAME, ServiceConfig, parse_config, refuse_address
from tournant.deploy.engine_host import EngineHost, TwoBackends
from tournant.deploy.engine_swap import EngineSwap
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.handle_methods import HandleMethods
from tournant.deploy.http_routes import AsgiApp
from tournant.deploy.http_server import MAX_OPEN_REQUESTS, HttpOptions
from tournant.deploy.http_side import HttpSide
from tournant.deploy.live_config import take_up, with_user_config
from tournant.deploy.resilient import EngineReplica, Ingress
from tournant.deploy.startup import model_finder, start_engine_swap
from tournant.deploy.tokenizer import Tokenizer
from tournant.deploy.weights_loop import Change, WeightsLoop, weights_change
from tournant.workers.config import EngineConfig
from tournant.workers.errors import EngineDeadError
from tournant.workers.model_files import name_of

HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 30.0
GRACEFUL_SHUTDOWN_S = 10.0  # for the ending itself
FOR_BOTH = (
    "health_check_period_s",
    "health_check_timeout_s",
    "graceful_shutdown_timeout_s",
    "graceful_shutdown_wait_loop_s",
)
SPARE_REQUESTS = 1024  # room in Serve's limits for requests that never reach an engine


@serve.ingress()
class Replica(EngineHost, HandleMethods):
    """One replica of the service; arguments as of `EngineHost`."""

    def __init__(self, args: Mapping[str, Any], store_folder: str | None = None) -> None:
        EngineHost.__init__(self, args, store_folder)
        self._args = self._config  # without what `user_config` changes
        self._frontend: Frontend | None = None
        self._http: HttpSide | None = None
        self._make_change: Callable[[float], Change]
        self._rollout: WeightsClient
        self._change: Change

    async def __serve_build_asgi_app__(self) -> AsgiApp:
        """Called by Serve once after construction: load everything and return the HTTP application.

        Raises ConfigError, ModelFormatError, StoreUnavailable and UpdateUnavailable; no engine is left then.
        """
        config, context = self._config, serve.get_replica_context()
        if config.engine.num_ranks > 1:
            config = await asyncio.to_thread(self._prepare_ranks)
        self._rollout = WeightsClient(context.app_name, config.model)
        following = WeightsLoop(context.replica_id.unique_id, self._rollout, lambda weights: self._change(weights))
        self._following = following
        try:
            weights = await following.join()
            tokenizer, engine = await start_engine_swap(config, weights.model, self._find_store, self._launcher)
            app = self._serve_engine(config, weights, tokenizer, engine)
            await following.started(engine.files.weights_id.hex())
        except BaseException:
            await self._end()
            raise
        return app

    def _serve_engine(
        self, config: ServiceConfig, weights: Weights, tokenizer: Tokenizer, engine: EngineSwap
    ) -> AsgiApp:
        """Everything above the engine, and what changes it. weights: those it runs."""
        self._name = config.served_model_name or name_of(config.model)
        prometheus = PrometheusBackend()
        self._metrics = MetricsRegistry(self._name, TwoBackends(prometheus))
        options = FrontendOptions(
            config.request_timeout_s,
            config.engine.enable_prefix_caching,
            tiers=self._store_socket is not None,
            max_queued_tokens=config.max_queued_tokens,
        )
        frontend = self._frontend = Frontend(tokenizer, engine, options, self._metrics.record_request)
        frontend.epoch = weights.epoch

        def note_epoch(epoch: int) -> None:
            frontend.epoch = epoch

        if self._following is not None:
            self._following.on_epoch = note_epoch
        self._make_change = partial(weights_change, frontend, engine, model_finder(config))
        self._change = self._make_change(config.weights_drain_s)
        http = HttpOptions((self._name,), config.max_body_bytes, send_request_id=False)
        self._http = HttpSide(config.access, lambda: frontend, http, self._metrics, prometheus, self._rollout)
        return self._http.app

    @property
    def frontend(self) -> Frontend:
        """The frontend of the running engine. Raises EngineDeadError before it is ready."""
        if self._frontend is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._frontend

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve once this replica is ready, and when `user_config` changes.

        Raises ConfigError for what cannot change without a restart; nothing has changed then.
        """
        self._config = with_user_config(self._args, user_config)
        take_up(self._config, self.frontend)
        self._change = self._make_change(self._config.weights_drain_s)

    async def check_health(self) -> None:
        """Called by Serve: raises EngineDeadError unless the engine can generate or is being ended on purpose, and when
        this replica cannot follow changes of weights any more.
        """
        frontend, engine = self.frontend, self.frontend.engine
        self._metrics.record_engine(engine.stats, engine.alive, frontend.num_outstanding, frontend.epoch)
        if self._following is not None and self._following.lost and not frontend.stopping:
            raise EngineDeadError(self._following.lost)
        if not frontend.healthy and not frontend.stopping:
            raise EngineDeadError("the engine cannot generate")

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Called by Serve once this replica is ready: for routers, tokens of a block, blocks of the device, and how
        many requests it takes before it refuses more.
        """
        info = self.frontend.engine.info
        return {
            "block_tokens": info.block_tokens,
            "pool_blocks": info.pool_tokens // info.block_tokens,
            "max_requests": info.max_num_seqs + info.max_queued_requests,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve five times in a look-back: the load, as autoscaling.py has it."""
        return self._load(None if self._frontend is None else self._frontend.engine)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve every few seconds, and sent to every router when it changes: so only what changes seldom."""
        return {"draining": self._frontend is None or self._frontend.stopping}

    async def describe(self) -> dict[str, Any]:
        """Facts as `EngineHost._describe` has them; admin_address: where operators are served, None = not by this
        replica.
        """
        facts = await self._describe(self.frontend.engine, self.frontend.served_weights)
        return facts | {"admin_address": None if self._http is None else self._http.admin_address}

    async def end_engine(self) -> None:
        """End the engine now; what runs fails. For `tournant serve`, which then lets the node store end."""
        await self._end()

    async def _end(self) -> None:
        """Say to the roll-out that this replica ends, then end its engine."""
        try:
            if self._http is not None:
                await self._http.close()
            if self._following is not None:
                await self._following.stop()
        finally:
            if self._frontend is not None:
                await self._frontend.stop()

    async def __del__(self) -> None:
        """Called by Serve, which awaits it, when this replica ends."""
        await self._end()


def gpus_wanted(device: str, in_cluster: float) -> int:
    """GPUs to ask of Ray for a replica, which hides all others from it: `auto` takes one where the cluster has any."""
    return int(device == "cuda" or (device == "auto" and in_cluster >= 1))


def bundle_of_rank(engine: EngineConfig, gpus_in_cluster: float) -> dict[str, float]:
    """What Ray is asked for one rank: a GPU, or, where CPUs stand in for GPUs, the cores of `num_threads`."""
    if gpus_wanted(engine.device, gpus_in_cluster):
        return {"CPU": 1, "GPU": 1}
    return {"CPU": 1 if engine.num_ranks == 1 else engine.num_threads or 1}


def placement(engine: EngineConfig) -> dict[str, Any]:
    """What Serve is told of where a replica and its ranks are to be.

    One bundle is one rank: no rank then depends on what shares its bundle, each sees one GPU, and a stage may be larger
    than any node. Ranks of one stage exchange every layer's sums, so without further stages all bundles must be on one
    node, if some node of the cluster is large enough for that; stages send each other little, so with several it is
    enough that Ray packs bundles onto few nodes, and `RayRanks` keeps a stage together on what it gets.
    """
    started = ray.is_initialized()
    bundle = bundle_of_rank(engine, ray.cluster_resources().get("GPU", 0) if started else 0)
    options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
    if engine.num_ranks == 1:
        return {"ray_actor_options": options}
    fits = not started or any(
        all(node["Resources"].get(name, 0) >= engine.num_ranks * amount for name, amount in bundle.items())
        for node in ray.nodes()
        if node["Alive"]
    )
    return {
        "ray_actor_options": options,
        "placement_group_bundles": [bundle] * engine.num_ranks,
        "placement_group_strategy": "STRICT_PACK" if fits and engine.pipeline_parallel_size == 1 else "PACK",
    }


def serve_options(
    config: ServiceConfig,
    deployment_options: Mapping[str, Any] | None = None,
    ingress_options: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """What Serve is told about each deployment, by its name; arguments as of `make_app`."""
    engine = config.engine
    capacity = engine.max_num_seqs + engine.max_queued_requests
    options: dict[str, Any] = {
        "num_replicas": config.num_replicas,
        "max_ongoing_requests": 4 * capacity + SPARE_REQUESTS,
        "max_queued_requests": 4 * capacity + SPARE_REQUESTS,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": config.request_timeout_s + GRACEFUL_SHUTDOWN_S,  # requests end before it does
        "graceful_shutdown_wait_loop_s": 0.2,
        **placement(engine),
    }
    if "autoscaling_config" in (deployment_options or {}):
        del options["num_replicas"]  # Serve takes one of them
    if config.ingress == "direct":
        return {DEPLOYMENT_NAME: options | dict(deployment_options or {})}
    ingress = {key: value for key, value in options.items() if key in FOR_BOTH}
    ingress |= {"max_queued_requests": -1, "max_surge_percent": 100}  # a new one is there before an old one goes
    ingress["max_ongoing_requests"] = MAX_OPEN_REQUESTS + SPARE_REQUESTS  # how many engines come is not known here
    options["graceful_shutdown_timeout_s"] = config.weights_drain_s + GRACEFUL_SHUTDOWN_S
    return {
        DEPLOYMENT_NAME: options | dict(deployment_options or {}),
        INGRESS_NAME: ingress | dict(ingress_options or {}),
    }


def make_app(
    config: ServiceConfig,
    deployment_options: Mapping[str, Any] | None = None,
    store_folder: str | None = None,
    ingress_options: Mapping[str, Any] | None = None,
) -> Application:
    """The application for a configuration. deployment_options: overrides of what Serve is told about the replica;
    ingress_options: the same about the ingress, if that is a deployment of its own; store_folder: as `EngineHost` says.
    """
    options = serve_options(config, deployment_options, ingress_options)
    replica = Replica if config.ingress == "direct" else EngineReplica
    app: Application = serve.deployment(name=DEPLOYMENT_NAME, **options[DEPLOYMENT_NAME])(replica).bind(
        config.to_args(), store_folder
    )
    if config.ingress == "resilient":
        app = serve.deployment(name=INGRESS_NAME, **options[INGRESS_NAME])(Ingress).bind(config.to_args(), app)
    return app


def build_app(args: dict[str, Any]) -> Application:
    """What a Serve file names as `import_path`. args: the fields of a ServiceConfig. Raises ConfigError."""
    return make_app(parse_config(refuse_address(args)))
