"""What every replica with an engine has: its configuration, node store, ranks, and what it can tell of them.

Owns no engine and no way in: app.py puts a frontend and HTTP on the engine, resilient.py streams.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.util.placement_group import get_current_placement_group

from tournant.cluster.autoscaling import LoadMeter
from tournant.cluster.metrics import MetricSpec, MetricsRegistry, PrometheusBackend, Recorder
from tournant.cluster.node_store_actor import find_store
from tournant.cluster.ray_metrics import RayBackend
from tournant.cluster.shard_actors import RayRanks, leader_facts, leader_threads, node_address
from tournant.deploy.config import ServiceConfig, parse_config
from tournant.deploy.engine_swap import EngineSwap
from tournant.deploy.served_weights import ServedWeights
from tournant.deploy.weights_loop import WeightsLoop
from tournant.kvstore.admin import Status, StatusQuery
from tournant.kvstore.client import ask
from tournant.kvstore.errors import StoreRefused, StoreUnavailable
from tournant.workers.engine_client import EngineClient
from tournant.workers.errors import ConfigError
from tournant.workers.rank_launch import RankLauncher
from tournant.workers.replica_engine import ReplicaEngine


class TwoBackends:
    """Records every metric both for `/metrics` and in Ray."""

    def __init__(self, prometheus: PrometheusBackend) -> None:
        self._backends = (prometheus, RayBackend())

    def recorder(self, spec: MetricSpec, model_name: str) -> Recorder:
        first, second = (backend.recorder(spec, model_name) for backend in self._backends)

        def record(value: float, values: tuple[str, ...]) -> None:
            first(value, values)
            second(value, values)

        return record


class EngineHost:
    """See the module. args: of a ServiceConfig, as `ServiceConfig.to_args` gives them; store_folder: where the node
    store's socket is put, None = a temporary folder of this user.
    """

    def __init__(self, args: Mapping[str, Any], store_folder: str | None = None) -> None:
        self._config = parse_config(args)
        self._store_folder = store_folder
        self._store_socket: str | None = None
        self._name = ""
        self._metrics: MetricsRegistry
        self._group = get_current_placement_group()
        self._make_ranks: Callable[..., RayRanks]
        self._find_there: Callable[[], str] | None = None  # the store of the node where it is called
        self._ranks: RayRanks | None = None  # of the latest engine, if it has several
        self._following: WeightsLoop | None = None
        self._meter = LoadMeter()
        log_to_stderr(self._config.log_level)

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

    def _load(self, engine: EngineClient | None) -> dict[str, float]:
        """What Serve's autoscaling is told of the engine, see `LoadMeter`; nothing while it cannot generate."""
        if engine is None or not engine.alive or engine.restarting:
            return {}
        return self._meter.measure(engine.stats, time.monotonic())

    async def _describe(self, engine: EngineClient, weights: ServedWeights) -> dict[str, Any]:
        """Facts: model, weights_id, epoch, device, dtype, whether quantised weights are multiplied as they are,
        writer_id, engine_pid, the tokens of context, pool and longest sequence, and of the node store, if there is one,
        its socket and `admin.Status`. Of an engine of several ranks: `RankFacts` of each, restarting, and last_end, why
        the set of ranks before this one ended.
        """
        info = engine.info
        return {
            "model": self._name,
            "weights_id": weights.weights_id,
            "epoch": weights.epoch,
            "device": info.device,
            "dtype": info.dtype,
            "native_weights": "native" in info.namespace.numerics.split("/"),
            "writer_id": info.writer_id,
            "engine_pid": info.pid,
            **self._describe_ranks(engine),
            "max_model_len": info.max_model_len,
            "pool_tokens": info.pool_tokens,
            "max_sequence_tokens": info.max_sequence_tokens,
            "kv_store": await self._describe_store(),
        }

    def _describe_ranks(self, swap: EngineClient) -> dict[str, Any]:
        engine = swap.engine if isinstance(swap, EngineSwap) else swap
        if self._ranks is None or not isinstance(engine, ReplicaEngine):
            return {"ranks": []}
        facts = [leader_facts(swap.info.pid), *self._ranks.facts()]
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


def log_to_stderr(level: str) -> None:
    """Our own loggers of a Ray worker write to its standard error, which Ray collects."""
    logger = logging.getLogger("tournant")
    logger.setLevel(level.upper())
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
