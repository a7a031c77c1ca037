"""A real server inside the test process: uvicorn on a free port, a frontend, and an engine in its own process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.deploy.config import ServiceConfig, parse_config
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.http_server import HttpOptions, build_http_app, uvicorn_config
from tournant.deploy.startup import start_engine
from tournant.workers.engine_client import ProcessEngineClient

START_TIMEOUT_S = 90.0
REST_TIMEOUT_S = 1.0
M_TOKEN_BYTES = 2 * 2 * 2 * 64 * 4  # layers, K and V, KV heads, head size, fp32: bytes of a token of model M
SMALL_BLOCKS = 64  # of 16 tokens: the device pool that CASES.md calls SMALL


class LiveServer:
    """Runs until `stop`. `url` is its root; `client` an OpenAI client that never retries."""

    def __init__(self, config: ServiceConfig, name: str = "m") -> None:
        self.config = config
        self.name = name
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S) or self._failed is not None:
            raise RuntimeError("the server did not start") from self._failed
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failed = error
            self._started.set()
            raise

    async def _serve(self) -> None:
        _, tokenizer, self.engine = await start_engine(self.config)
        self.prometheus = PrometheusBackend()
        metrics = MetricsRegistry(self.name, self.prometheus)
        options = FrontendOptions(self.config.request_timeout_s, self.config.engine.enable_prefix_caching)
        self.frontend = Frontend(tokenizer, self.engine, options, metrics.record_request)
        app = build_http_app(lambda: self.frontend, HttpOptions((self.name,)), metrics, self.prometheus)
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
        """Within a second nothing runs or waits, no block is held, every invariant of the engine holds."""
        deadline = time.monotonic() + REST_TIMEOUT_S
        while True:
            wrong = self.call(self.engine.validate())
            assert wrong == "", wrong
            if self.frontend.num_outstanding == 0 and self._holds_nothing():
                return
            assert time.monotonic() < deadline, f"still held: {self.engine.stats}, {self.frontend.num_outstanding}"

    def _holds_nothing(self) -> bool:
        return bool(self.call(self.engine.reset_prefix_cache()))  # True only when no block is referenced

    def stop(self) -> None:
        """End the server and its engine."""
        self.http.close()
        self.client.close()
        self._server.should_exit = True
        self._thread.join(30)


@contextmanager
def live_server(
    model: Path, name: str = "m", engine: dict[str, Any] | None = None, **fields: Any
) -> Iterator[LiveServer]:
    """A server on a model: fp32, deterministic, one thread, the SMALL pool of M unless `engine` says otherwise."""
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "deterministic": True,
        "kv_cache_bytes": SMALL_BLOCKS * 16 * M_TOKEN_BYTES,
    }
    settings: dict[str, Any] = {"engine": defaults | (engine or {}), "advanced": {"num_threads": 1}, **fields}
    settings["model"] = None if model is None else str(model)
    server = LiveServer(parse_config(settings), name)
    try:
        yield server
    finally:
        server.stop()


def sse_events(text: str) -> list[str]:
    """The data of every event of a server-sent stream, in order."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
