"""The Serve application: a replica that holds one engine, its frontend and its HTTP API, and serves them itself.

Owns what Serve needs to know (limits, health, endings) and the methods of a handle. With `ingress: direct`, replica and
HTTP are one process, the engine its child; requests reach the ASGI application without a hop through a handle.

Invariants:
 1. Serve's own queue limits lie far above the frontend's, so that overload is answered by the frontend (429).
 2. What crosses a handle is plain: dicts, lists, strings, numbers, and the errors of errors.py.
 3. A replica that cannot generate, or is lost to the roll-out of weights, fails its health check and is replaced; its
    engine ends with it. One that is being ended fails none: Serve would log it as a fault.
 4. A replica starts with the weights that the roll-out names, whatever is configured, and is called by what is
    configured, whatever weights it has.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.serve import Application
from ray.util.placement_group import get_current_placement_group

from tournant.cluster.metrics import MetricSpec, MetricsRegistry, PrometheusBackend, Recorder
from tournant.cluster.node_store_actor import find_store
from tournant.cluster.ray_metrics import RayBackend
from tournant.cluster.shard_actors import RayRanks, leader_facts, leader_threads, node_address
from tournant.cluster.weights_actor import WeightsClient
from tournant.cluster.weights_rollout import Weights
from tournant.deploy.config import DEPLOYMENT_NAME, ServiceConfig, parse_config, refuse_address
from tournant.deploy.engine_swap import EngineSwap
from tournant.deploy.errors import RequestError
from tournant.deploy.frontend import Frontend, FrontendOptions, Prompt
from tournant.deploy.http_server import AsgiApp, HttpOptions, build_http_app
from tournant.deploy.openai_schema import MAX_MODEL_CHARS
from tournant.deploy.startup import start_engine_swap
from tournant.deploy.tokenizer import Tokenizer
from tournant.deploy.weights_loop import Change, WeightsLoop, weights_change
from tournant.kvstore.admin import Status, StatusQuery
from tournant.kvstore.client import ask
from tournant.kvstore.errors import StoreRefused, StoreUnavailable
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError, EngineDeadError
from tournant.workers.model_files import name_of, resolve_model
from tournant.workers.rank_launch import RankLauncher
from tournant.workers.replica_engine import ReplicaEngine
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
        self._group = get_current_placement_group()
        self._make_ranks: Callable[..., RayRanks]
        self._find_there: Callable[[], str] | None = None  # the store of the node where it is called
        self._ranks: RayRanks | None = None  # of the latest engine, if it has several
        self._rollout: WeightsClient
        self._following: WeightsLoop | None = None
        self._change: Change
        _log_to_stderr(self._config.log_level)

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
        self._metrics = MetricsRegistry(self._name, _TwoBackends(prometheus))
        options = FrontendOptions(
            config.request_timeout_s, config.engine.enable_prefix_caching, tiers=self._store_socket is not None
        )
        frontend = self._frontend = Frontend(tokenizer, engine, options, self._metrics.record_request)
        frontend.epoch = weights.epoch

        def note_epoch(epoch: int) -> None:
            frontend.epoch = epoch

        if self._following is not None:
            self._following.on_epoch = note_epoch
        resolve = partial(resolve_model, dtype=config.weights_dtype, cache_dir=config.cache_path)
        self._change = weights_change(frontend, engine, resolve, config.weights_drain_s)
        http = HttpOptions((self._name,), config.max_body_bytes, send_request_id=False)
        return build_http_app(lambda: frontend, http, self._metrics, prometheus, self._rollout)

    def _find_store(self) -> str | None:
        """The node store's socket, once the store runs; None where there is to be none."""
        engine = self._config.engine
        on_gpu = engine.device == "cuda" or (engine.device == "auto" and bool(ray.get_gpu_ids()))
        plan = self._config.store_plan(on_gpu=on_gpu)
        if plan is not None:
            self._find_there = partial(find_store, plan, serve.get_replica_context().app_name, self._store_folder)
            self._store_socket = self._find_there()
        return self._store_socket

    def _prepare_ranks(self) -> ServiceConfig:
        """What rank 0 is started with: threads that the operator has left open are this node's, shared by its ranks.

        Raises ConfigError without a placement group.
        """
        if self._group is None:
            raise ConfigError("a replica of several ranks needs a placement group; leave placement_group_bundles out")
        engine = self._config.engine
        threads = engine.num_threads
        self._make_ranks = partial(RayRanks, self._group, node_address(), threads)
        if threads is None:
            engine = replace(engine, num_threads=leader_threads(self._group, engine.num_ranks))
        return self._config.model_copy(update={"engine": engine})

    def _launcher(self) -> RankLauncher:
        """Of a new set of ranks."""
        self._ranks = self._make_ranks(find_store=self._find_there)
        return self._ranks

    @property
    def frontend(self) -> Frontend:
        """The frontend of the running engine. Raises EngineDeadError before it is ready."""
        if self._frontend is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._frontend

    async def check_health(self) -> None:
        """Called by Serve: raises EngineDeadError unless the engine can generate or is being ended on purpose, and when
        this replica cannot follow changes of weights any more.
        """
        frontend, engine = self.frontend, self.frontend.engine
        self._metrics.record_engine(engine.stats, engine.alive, frontend.num_outstanding, frontend.epoch)
        if self._following is not None and self._following.lost and not frontend.stopping:
            raise EngineDeadError(self._following.lost)
        if not await frontend.healthy() and not frontend.stopping:  # asked last: it may have begun meanwhile
            raise EngineDeadError("the engine cannot generate")

    async def describe(self) -> dict[str, Any]:
        """Facts: model, weights_id, epoch, device, dtype, whether quantised weights are multiplied as they are,
        writer_id, engine_pid, the tokens of context, pool and longest sequence, and of the node store, if there is one,
        its socket and `admin.Status`. Of an engine of several ranks: `RankFacts` of each, restarting, and last_end, why
        the set of ranks before this one ended.
        """
        info, weights = self.frontend.engine.info, self.frontend.served_weights
        return {
            "model": self._name,
            "weights_id": weights.weights_id,
            "epoch": weights.epoch,
            "device": info.device,
            "dtype": info.dtype,
            "native_weights": "native" in info.namespace.numerics.split("/"),
            "writer_id": info.writer_id,
            "engine_pid": info.pid,
            **self._describe_ranks(info.pid),
            "max_model_len": info.max_model_len,
            "pool_tokens": info.pool_tokens,
            "max_sequence_tokens": info.max_sequence_tokens,
            "kv_store": await self._describe_store(),
        }

    def _describe_ranks(self, leader_pid: int) -> dict[str, Any]:
        swap = self.frontend.engine
        engine = swap.engine if isinstance(swap, EngineSwap) else swap
        if self._ranks is None or not isinstance(engine, ReplicaEngine):
            return {"ranks": []}
        facts = [leader_facts(leader_pid), *self._ranks.facts()]
        return {
            "ranks": [asdict(rank) for rank in facts],
            "restarting": engine.restarting,
            "last_end": engine.last_end,
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
        await self._end()

    async def _end(self) -> None:
        """Say to the roll-out that this replica ends, then end its engine."""
        try:
            if self._following is not None:
                await self._following.stop()
        finally:
            if self._frontend is not None:
                await self._frontend.stop()

    async def update_weights(self, model: str | None, tag: str | None = None) -> int:
        """Begin to give all replicas, one after another, other weights; returns the epoch that the update has.

        model: as in the configuration; tag: names the update, so that this can be called again. Requests go on. Raises
        UpdateRunning while another update is not over, UpdateUnavailable when none can be begun now.
        """
        if model is not None and (not isinstance(model, str) or not 1 <= len(model) <= MAX_MODEL_CHARS):
            raise RequestError(
                f"model is {model!r:.100}; it must be text of 1 to {MAX_MODEL_CHARS} characters", "model"
            )
        return await self._rollout.update(model, tag or uuid.uuid4().hex)

    async def weights_status(self) -> dict[str, Any]:
        """`Status.to_plain` of the roll-out. Raises UpdateUnavailable."""
        return (await self._rollout.status()).to_plain()

    async def generate(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Whole answers to one prompt (text, token ids or chat messages) as a plain `Completion`, with weights_id,
        epoch and system_fingerprint of what they were made by.

        sampling: fields of SamplingParams. Raises RequestError for what can never be served, Overloaded,
        EngineDeadError, GenerationFailed. Cancelling the call stops the engine's work.
        """
        completion = await self.frontend.generate(
            prompt, _sampling(sampling), cache_salt=cache_salt, priority=priority, timeout_s=timeout_s
        )
        plain = asdict(completion) | completion.served_by.to_plain()
        del plain["served_by"]
        if (tiers := completion.usage.cached_by_tier) is not None:
            plain["usage"]["cached_by_tier"] = tiers._asdict()
        return plain

    async def stream(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """As `generate`, piece by piece: plain dicts with index, text, token_ids, logprobs, finish_reason, stop_reason,
        weights_id, epoch and system_fingerprint.

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
                    **stream.served_by.to_plain(),
                }
        finally:
            stream.cancel()

    async def __del__(self) -> None:
        """Called by Serve, which awaits it, when this replica ends."""
        await self._end()


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


def make_app(
    config: ServiceConfig, deployment_options: Mapping[str, Any] | None = None, store_folder: str | None = None
) -> Application:
    """The application for a configuration. deployment_options: overrides of what Serve is told about the replica;
    store_folder: as `Replica` says.
    """
    engine = config.engine
    capacity = engine.max_num_seqs + engine.max_queued_requests
    options: dict[str, Any] = {
        "num_replicas": config.num_replicas,
        "max_ongoing_requests": 4 * capacity + SPARE_REQUESTS,
        "max_queued_requests": 4 * capacity + SPARE_REQUESTS,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": GRACEFUL_SHUTDOWN_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        **placement(engine),
    }
    options |= deployment_options or {}
    deployment = serve.deployment(name=DEPLOYMENT_NAME, **options)(Replica)
    app: Application = deployment.bind(config.to_args(), store_folder)
    return app


def build_app(args: dict[str, Any]) -> Application:
    """What a Serve file names as `import_path`. args: the fields of a ServiceConfig. Raises ConfigError."""
    return make_app(parse_config(refuse_address(args)))
