"""A real server inside the test process: uvicorn on a free port, a frontend, an engine in its own process, and a node
store in another one where the configuration has tiers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import httpx
import openai
import uvicorn

from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.cluster.node_store import StorePlan
from tournant.deploy.access import Access
from tournant.deploy.config import ServiceConfig, parse_config
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.http_server import HttpOptions, build_http_app, uvicorn_config
from tournant.deploy.startup import OwnStore, start_engine
from tournant.kvstore.admin import Status, StatusQuery
from tournant.kvstore.client import ask
from tournant.kvstore.slots import SlotState
from tournant.workers.engine_client import ProcessEngineClient

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 240.0
REST_TIMEOUT_S = 1.0
TIERS_REST_TIMEOUT_S = 10.0  # two processes more, on a machine that may be busy
M_TOKEN_BYTES = 2 * 2 * 2 * 64 * 4  # layers, K and V, KV heads, head size, fp32: bytes of a token of model M
SMALL_BLOCKS = 64  # of 16 tokens: the device pool that CASES.md calls SMALL


class NodeStore(Protocol):
    """What a server needs of its store; see `OwnStore`."""

    def socket(self) -> str: ...

    def close(self) -> None: ...


class LiveServer:
    """Runs until `stop`. `url` is its root; `client` an OpenAI client that never retries.

    make_store: makes the node store, if the configuration has one.
    """

    def __init__(
        self, config: ServiceConfig, name: str = "m", make_store: Callable[[StorePlan], NodeStore] = OwnStore
    ) -> None:
        self.config = config
        self.name = name
        self._make_store = make_store
        self._start()

    def _start(self) -> None:
        plan = self.config.kv_store.plan(on_gpu=False)
        self.store = None if plan is None else self._make_store(plan)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S) or self._failed is not None:
            if self.store is not None:
                self.store.close()
            raise RuntimeError("the server did not start") from self._failed
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S)
        self.http = httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S)
        self._standing_credit = 0 if self.store is None else self._lent_pages(self.store_status())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failed = error
            self._started.set()
            raise

    async def _serve(self) -> None:
        find_store = None if self.store is None else self.store.socket
        _, tokenizer, self.engine = await start_engine(self.config, find_store=find_store)
        self.prometheus = PrometheusBackend()
        metrics = MetricsRegistry(self.name, self.prometheus)
        options = FrontendOptions(
            self.config.request_timeout_s, self.config.engine.enable_prefix_caching, tiers=self.store is not None
        )
        self.frontend = Frontend(tokenizer, self.engine, options, metrics.record_request)
        access = Access(self.config.access)
        http = HttpOptions((self.name,))
        app = build_http_app(lambda: self.frontend, http, metrics, self.prometheus, access=access)
        self._server = uvicorn.Server(uvicorn_config(app, "127.0.0.1", 0))  # type: ignore[arg-type]
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._loop.call_soon(self._started.set)
        await self._server.serve([self._listener])
        await self.engine.close()

    def call(self, awaitable: Awaitable[Any]) -> Any:
        """Run something on the server's event loop and return its result."""

        async def body() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(body(), self._loop).result(60)

    @property
    def engine_client(self) -> ProcessEngineClient:
        """The frontend's client, for looking inside."""
        return self.engine

    def assert_at_rest(self) -> None:
        """Within a second nothing runs or waits, no block is held, every invariant of the engine holds; and nothing of
        the store is, see `settle`.
        """
        if self.store is not None:
            self.settle()
        deadline = time.monotonic() + REST_TIMEOUT_S
        while True:
            self._check_engine()
            if self.frontend.num_outstanding == 0 and self._holds_nothing():
                return
            assert time.monotonic() < deadline, f"still held: {self.engine.stats}, {self.frontend.num_outstanding}"

    def _check_engine(self) -> None:
        wrong = self.call(self.engine.validate())
        assert wrong == "", wrong

    def _holds_nothing(self) -> bool:
        return bool(self.call(self.engine.reset_prefix_cache()))  # True only when no block is referenced

    # ---- tiers

    def store_status(self) -> Status:
        """Counters and gauges of the node store."""
        if self.store is None:
            raise ValueError("this server has no tiers")
        return cast(Status, ask(Path(self.store.socket()), StatusQuery(), STOP_TIMEOUT_S))

    def settle(self) -> None:
        """Wait until everything that was computed is below, and check what is then to be so: no copy goes on, no pin
        and no read is left, lent slots are the engine's standing credit.
        """
        deadline = time.monotonic() + TIERS_REST_TIMEOUT_S
        while True:
            self._check_engine()  # makes the engine tell its numbers, too
            stats, status = self.engine.stats, self.store_status()
            # a block that is used, copied or dirty is pressure
            is_settled = self.frontend.num_outstanding == stats.num_restoring == stats.tiers.pressure == 0
            pages = {SlotState(state): count for state, count in status.pages}
            copies = pages[SlotState.LOADING] + pages[SlotState.DRAINING] + pages[SlotState.QUARANTINED]
            is_clean = status.pinned_pages == status.open_reads == copies == 0
            if is_settled and is_clean and pages[SlotState.LENT] == self._standing_credit:
                assert sum(pages.values()) <= status.host_pages
                return
            assert time.monotonic() < deadline, f"not at rest: {self._standing_credit=}, {pages}, {status}, {stats}"

    def forget_device(self) -> None:
        """Everything is below, and nothing on the device."""
        self.settle()
        assert self._holds_nothing()

    @staticmethod
    def _lent_pages(status: Status) -> int:
        return dict(status.pages)[SlotState.LENT]

    # ---- endings

    def stop(self) -> None:
        """End the server and its engine, then its store, after it has copied down what is only in RAM."""
        self.http.close()
        self.client.close()
        self._server.should_exit = True
        self._thread.join(STOP_TIMEOUT_S)
        if self.store is not None:
            self.store.close()

    def kill(self) -> None:
        """End engine and store at once, as a loss of both processes would, then the rest."""
        if not isinstance(self.store, OwnStore):
            raise ValueError("this server has no store of its own")
        pid = self.store._keeper.pid
        self.engine.process.kill()
        if pid is None:
            raise ValueError("the store does not run")
        os.kill(pid, signal.SIGKILL)
        self.store.close()  # now, or it would start another one
        self.stop()

    def restart(self, *, kill: bool = False) -> None:
        """Begin again on what is on disk; `url` and both clients are new."""
        if kill:
            self.kill()
        else:
            self.stop()
        self._start()


@contextmanager
def live_server(
    model: Path | None,
    name: str = "m",
    engine: dict[str, Any] | None = None,
    advanced: dict[str, Any] | None = None,
    make_store: Callable[[StorePlan], NodeStore] = OwnStore,
    **fields: Any,
) -> Iterator[LiveServer]:
    """A server on a model: fp32, deterministic, one thread, the SMALL pool of M unless `engine` says otherwise."""
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "deterministic": True,
        "kv_cache_bytes": SMALL_BLOCKS * 16 * M_TOKEN_BYTES,
    }
    settings: dict[str, Any] = {
        "engine": defaults | (engine or {}),
        "advanced": {"num_threads": 1} | (advanced or {}),
        **fields,
    }
    settings["model"] = None if model is None else str(model)
    server = LiveServer(parse_config(settings), name, make_store)
    try:
        yield server
    finally:
        server.stop()


def sse_events(text: str) -> list[str]:
    """The data of every event of a server-sent stream, in order."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
