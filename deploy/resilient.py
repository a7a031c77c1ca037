"""The deployments of `ingress: resilient`: engines that serve streams, and an ingress that serves HTTP over them all.

Owns what Serve needs to know of both (health, endings). A request lives in the ingress; the engine that works on it may
die, drain or be replaced, and another one goes on (generation.py). What is lost with an ingress are its connections.

Invariants:
 1. An engine that ends on purpose says so first: it drains, within the time that Serve gives it, hands back what is not
    over, and only then ends.
 2. A replica is named to frontends only when the roll-out lets it serve, and no longer than it does.
 3. The ingress answers by the weights that most engines have; its tokenizer changes with them, at one moment.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from tournant.cluster.engine_members import Member, State
from tournant.cluster.engines_actor import EngineAnnouncer, EnginesClient, EngineWatch
from tournant.cluster.index_feed import shared_feed
from tournant.cluster.metrics import OUTSTANDING, REQUEST_SPECS, WEIGHTS_EPOCH, MetricsRegistry, PrometheusBackend
from tournant.cluster.shard_actors import node_address
from tournant.cluster.weights_actor import WeightsClient
from tournant.cluster.weights_rollout import Weights
from tournant.deploy.config import DEPLOYMENT_NAME, INGRESS_NAME, parse_config
from tournant.deploy.engine_host import EngineHost, TwoBackends, log_to_stderr
from tournant.deploy.engine_pool import EnginePool
from tournant.deploy.engine_swap import EngineSwap
from tournant.deploy.engine_wake import EngineWake, engines_come, first_engine
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.handle_methods import HandleMethods
from tournant.deploy.http_routes import AsgiApp
from tournant.deploy.http_server import HttpOptions
from tournant.deploy.http_side import HttpSide
from tournant.deploy.kv_choice import KVChoice
from tournant.deploy.live_config import take_up, with_user_config
from tournant.deploy.resume import MAX_RESUMES
from tournant.deploy.served_weights import ServedWeights
from tournant.deploy.startup import model_finder, start_engine_swap
from tournant.deploy.tokenizer import Tokenizer
from tournant.deploy.weights_loop import Change, WeightsLoop, stream_change
from tournant.workers.engine_server import EngineServer
from tournant.workers.errors import ConfigError, EngineDeadError, ModelFormatError
from tournant.workers.messages import EngineStats
from tournant.workers.model_files import name_of, resolve_model
from tournant.workers.stream_client import StreamEngineClient

LOOK_S, READY_S = 10.0, 1800.0  # an ingress waits for the first engine, and looks whether any comes
RETRY_S = 1.0
TOKEN_BYTES = 32
logger = logging.getLogger("tournant.resilient")


class EngineReplica(EngineHost):
    """One engine and its streams; arguments as of `EngineHost`."""

    async def __init__(self, args: Mapping[str, Any], store_folder: str | None = None) -> None:  # type: ignore[misc]
        """Load everything and serve. Raises ConfigError, ModelFormatError, StoreUnavailable and UpdateUnavailable; no
        engine is left then.
        """
        super().__init__(args, store_folder)
        self._args = self._config  # without what `user_config` changes
        self._engine: EngineSwap | None = None
        self._server: EngineServer | None = None
        self._announcer: EngineAnnouncer | None = None
        self._make_change: Callable[[float], Change]
        self._change: Change
        self._ending = False
        config, context = self._config, serve.get_replica_context()
        self._name = config.served_model_name or name_of(config.model)
        self._metrics = MetricsRegistry(self._name, TwoBackends(PrometheusBackend()))
        if config.engine.num_ranks > 1:
            config = await asyncio.to_thread(self._prepare_ranks)
        replica = context.replica_id.unique_id
        following = self._following = WeightsLoop(
            replica, WeightsClient(context.app_name, config.model), lambda weights: self._change(weights)
        )
        try:
            weights = await following.join()
            _, engine = await start_engine_swap(config, weights.model, self._find_store, self._launcher)
            self._engine = engine
            member = await self._serve_streams(engine, weights, replica)
            await following.started(engine.files.weights_id.hex())
            self._announcer = EngineAnnouncer(EnginesClient(context.app_name), member)
            self._tell()
        except BaseException:
            await self._end(0.0)
            raise

    async def _serve_streams(self, engine: EngineSwap, weights: Weights, replica: str) -> Member:
        """Listen. Returns what frontends are to know."""
        config, token, host = self._config, secrets.token_bytes(TOKEN_BYTES), await asyncio.to_thread(node_address)
        server = self._server = EngineServer(engine, replica, token, weights.epoch, model=weights.model)
        self._make_change = lambda drain_s: stream_change(server, engine, model_finder(config), drain_s, self._tell)
        self._change = self._make_change(config.weights_drain_s)
        if self._following is not None:
            self._following.on_epoch = self._note_epoch
        port = await server.start(host)
        node = str(ray.get_runtime_context().get_node_id())
        return Member(replica, host, port, token, node, engine.files.weights_id.hex(), weights.epoch)

    def _note_epoch(self, epoch: int) -> None:
        if self._server is not None:
            self._server.call(epoch, self._server.model)
            self._tell()

    def _tell(self) -> None:
        """Frontends hear what this engine is now."""
        if self._announcer is not None and self._server is not None and self._engine is not None:
            state: State = "draining" if self._server.draining else "serving"
            weights_id = self._engine.files.weights_id.hex()
            self._announcer.change(state=state, weights_id=weights_id, epoch=self._server.epoch)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve once this replica is ready, and when `user_config` changes.

        Raises ConfigError for what cannot change without a restart; nothing has changed then.
        """
        self._config = with_user_config(self._args, user_config, DEPLOYMENT_NAME)
        take_up(self._config, None)
        self._change = self._make_change(self._config.weights_drain_s)

    async def check_health(self) -> None:
        """Called by Serve: raises EngineDeadError unless the engine can generate or is being ended on purpose, and when
        this replica cannot follow changes of weights any more.
        """
        engine, server = self._engine, self._server
        if engine is None or server is None:
            raise EngineDeadError("the engine is not ready yet")
        self._metrics.record_engine(engine.stats, engine.alive, 0, server.epoch)  # what is outstanding an ingress tells
        if self._ending:
            return
        if self._following is not None and self._following.lost:
            raise EngineDeadError(self._following.lost)
        if not engine.alive:
            raise EngineDeadError("the engine cannot generate")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve five times in a look-back: the load, as autoscaling.py has it."""
        return self._load(self._engine)

    async def describe(self) -> dict[str, Any]:
        """Facts as `EngineHost._describe` has them."""
        if self._engine is None or self._server is None:
            raise EngineDeadError("the engine is not ready yet")
        weights_id = self._engine.info.namespace.weights_id.hex()
        return await self._describe(self._engine, ServedWeights(weights_id, self._server.epoch))

    async def end_engine(self) -> None:
        """End the engine now; what runs fails. For `tournant serve`, which then lets the node store end."""
        await self._end(0.0)

    async def _end(self, drain_s: float) -> None:
        """Serve nothing new, hand back what is not over after drain_s, and end the engine."""
        self._ending = True
        try:
            if self._server is not None:
                self._server.begin_drain(drain_s, for_good=True)
                self._tell()
                await self._server.drained()
            if self._following is not None:
                await self._following.stop()
            if self._announcer is not None:
                await self._announcer.stop()
            if self._server is not None:
                self._server.close("the replica ended")
        finally:
            if self._engine is not None:
                await self._engine.close()

    async def __del__(self) -> None:
        """Called by Serve, which awaits it for graceful_shutdown_timeout_s, when this replica ends."""
        await self._end(self._config.weights_drain_s)


class IngressMetrics(MetricsRegistry):
    """Of requests alone: engines are counted where they are, so that sums over all processes are right."""

    specs = REQUEST_SPECS

    def record_engine(self, stats: EngineStats, alive: bool, outstanding: int, epoch: int = 0) -> None:
        """Take how many answers are outstanding, and the epoch of the weights."""
        self._record[OUTSTANDING](outstanding, ())
        self._record[WEIGHTS_EPOCH](epoch, ())


@serve.ingress()
class Ingress(HandleMethods):
    """The way in: HTTP and handles over all engines. args: of a ServiceConfig; replicas: the engines' deployment."""

    def __init__(self, args: Mapping[str, Any], replicas: DeploymentHandle[Any]) -> None:
        self._args = self._config = parse_config(args)  # the one without what `user_config` changes
        self._replicas = replicas
        self._frontend: Frontend | None = None
        self._rollout: WeightsClient
        self._pool: EnginePool
        self._http: HttpSide | None = None
        self._watch: EngineWatch
        self._wake: EngineWake
        self._following: asyncio.Task[None]
        self._news = asyncio.Event()
        self._ready = asyncio.Event()
        log_to_stderr(self._config.log_level)

    async def __serve_build_asgi_app__(self) -> AsgiApp:
        """Called by Serve once after construction; waits for the first engine while any comes: until then nobody is to
        be sent here.
        """
        config, context = self._config, serve.get_replica_context()
        name = config.served_model_name or name_of(config.model)
        prometheus = PrometheusBackend()
        self._metrics = IngressMetrics(name, TwoBackends(prometheus))
        self._rollout = WeightsClient(context.app_name, config.model)
        frontend_id = context.replica_id.unique_id

        async def connect(member: Member) -> StreamEngineClient:
            return await StreamEngineClient.connect(member.host, member.port, member.token, frontend_id)

        choice = KVChoice(shared_feed(context.app_name, config.kv_store.directory_shards))

        def named(members: Sequence[Member]) -> None:
            choice.keep(member.replica for member in members)
            self._pool.set_members(members)

        self._pool = EnginePool(connect, choice)
        self._pool.on_change = self._news.set
        self._wake = EngineWake(lambda: self._replicas.describe.remote())
        self._pool.on_wait = self._wake.want
        self._wake.want()  # before there has been an engine nothing can be taken, and an idle one may go again
        self._following = asyncio.get_running_loop().create_task(self._follow_weights())
        self._watch = EngineWatch(EnginesClient(context.app_name), named)
        come = partial(engines_come, context.app_name, self._replicas.deployment_name)
        if not await first_engine(self._ready, come, LOOK_S, READY_S):
            logger.warning("no engine is ready, and none comes; requests are answered with 503 until one does")
        http = HttpOptions((name,), config.max_body_bytes, send_request_id=False)
        self._http = HttpSide(config.access, self._present, http, self._metrics, prometheus, self._rollout)
        return self._http.app

    def _present(self) -> Frontend | None:
        """The frontend, if there has been an engine; one is asked for otherwise."""
        if self._frontend is None:
            self._wake.want()
        return self._frontend

    @property
    def frontend(self) -> Frontend:
        """The frontend over all engines. Raises EngineDeadError before the first one is ready."""
        frontend = self._present()
        if frontend is None:
            raise EngineDeadError("no engine is ready yet")
        return frontend

    async def _follow_weights(self) -> None:
        """Answer by the weights that most engines have."""
        while True:
            await self._news.wait()
            self._news.clear()
            found = self._pool.preferred()
            frontend = self._frontend
            if found is None or (frontend is not None and found == (self._pool.weights_id, frontend.epoch)):
                continue
            try:
                await self._take_up(*found)
            except (ConfigError, ModelFormatError, EngineDeadError, OSError, TimeoutError) as error:
                logger.error("the weights %s cannot be taken up: %s", found[0].hex()[:12], error)
                await asyncio.sleep(RETRY_S)
                self._news.set()

    async def _take_up(self, weights_id: bytes, epoch: int) -> None:
        """Use weights for all requests from now on."""
        frontend, pool = self._frontend, self._pool
        if frontend is not None and weights_id == pool.weights_id:
            frontend.epoch = epoch
            return
        tokenizer = await asyncio.to_thread(self._load_tokenizer, weights_id, pool.model_of(weights_id))
        if frontend is None:
            options = FrontendOptions(
                self._config.request_timeout_s,
                self._config.engine.enable_prefix_caching,
                tiers=bool(self._config.kv_store.host_bytes),
                max_resumes=MAX_RESUMES,
                max_queued_tokens=self._config.max_queued_tokens,
            )
            pool.use(weights_id)
            self._frontend = frontend = Frontend(tokenizer, pool, options, self._metrics.record_request)
            frontend.epoch = epoch
            self._ready.set()
            return

        async def swap() -> Tokenizer:
            pool.use(weights_id)
            frontend.epoch = epoch
            return tokenizer

        await frontend.change_weights(swap, None)

    def _load_tokenizer(self, weights_id: bytes, model: str | None) -> Tokenizer:
        """In a thread. Raises ConfigError when the files here are not those of the engines."""
        files = resolve_model(model, self._config.weights_dtype, self._config.cache_path)
        if files.weights_id != weights_id:
            raise ConfigError(
                f"{model!r} is {files.weights_id.hex()[:12]} here and {weights_id.hex()[:12]} where engines loaded it; "
                "give every node the same files"
            )
        return Tokenizer.from_folder(files.folder)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve once this ingress has begun, and when `user_config` changes; errors as of `EngineReplica`."""
        self._config = with_user_config(self._args, user_config, INGRESS_NAME)
        take_up(self._config, self._frontend)

    async def check_health(self) -> None:
        """Called by Serve: raises EngineDeadError when this ingress cannot follow the engines any more."""
        if self._following.done():
            raise EngineDeadError("the ingress does not follow the weights of its engines any more")

    async def describe(self) -> dict[str, Any]:
        """Facts of one of the engines, see `EngineHost`; num_resumed: answers that went on in another engine here;
        admin_address: where operators are served, None = not by this ingress.
        """
        facts: dict[str, Any] = await self._replicas.describe.remote()
        admin_address = None if self._http is None else self._http.admin_address
        return facts | {"num_resumed": self._pool.num_resumed, "admin_address": admin_address}

    async def end_engine(self) -> None:
        """End all engines now; what runs fails."""
        await self._replicas.broadcast("end_engine").results_async()

    async def __del__(self) -> None:
        """Called by Serve, which awaits it, when this replica ends, built or not; requests over HTTP are over then."""
        if self._http is not None:
            await self._http.close()
        self._following.cancel()
        await self._wake.stop()
        await self._watch.stop()
        await self._pool.close()
