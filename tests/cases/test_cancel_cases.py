"""Case 65: hundreds of clients that go away at once, over real sockets and an engine whose steps the test makes."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.fake_server import COMPLETIONS, Server
from tests.deploy.fleet import served
from tests.deploy.sockets import ask, serving
from tournant.deploy.tokenizer import Tokenizer

MOST_STREAMS = 500
FILES = 4 * MOST_STREAMS
ROUND_LIMIT_S = 30.0  # only against a test that never ends
BODY = {"prompt": "hi", "temperature": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}


@pytest.fixture
def _many_sockets() -> Iterator[None]:
    """Both ends of every connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"this process may open {hard} files at most, and needs {FILES}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES if soft == resource.RLIM_INFINITY else max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def close_all_at_once(server: Server, port: int, streams: int) -> None:
    """One round; the engine goes on all the while."""
    before, aborted = asyncio.all_tasks(), len(server.engine.aborted)
    opened = await asyncio.gather(*(ask(port, COMPLETIONS, BODY) for _ in range(streams)))
    while len(server.engine.running) < streams:
        await asyncio.sleep(0)
    server.engine.step()
    for reader, _ in opened:
        assert b"200 OK" in await reader.readline()
    for _, writer in opened:
        writer.transport.abort()
    while server.engine.running or server.app.num_open or asyncio.all_tasks() - before:
        if server.engine.running and server.engine.running[0].made < BODY["max_tokens"] - 1:
            server.engine.step()
        await asyncio.sleep(0.01)
    assert len(server.engine.aborted) == aborted + streams  # none of them ran to its end
    assert (server.frontend.num_outstanding, server.frontend.gate.num_pending) == (0, 0)
    reader, writer = await ask(port, COMPLETIONS, BODY | {"max_tokens": 2, "stream": False})
    while not server.engine.running:
        await asyncio.sleep(0)
    server.engine.step(2)
    answer = await reader.read()
    assert b"200 OK" in answer
    assert b'"completion_tokens": 2' in answer or b'"completion_tokens":2' in answer
    writer.close()


@pytest.mark.case(65)
@pytest.mark.usefixtures("_many_sockets")
@pytest.mark.parametrize(
    ("ingress", "streams", "rounds"),
    [
        ("direct", MOST_STREAMS, 3),
        ("resilient", 20, 25),
        pytest.param("direct", MOST_STREAMS, 20, marks=pytest.mark.soak),
        pytest.param("resilient", MOST_STREAMS, 10, marks=pytest.mark.soak),
    ],
)
def test_case_65_streams_closed_at_once_leave_nothing(
    tiny_model: Path, ingress: str, streams: int, rounds: int
) -> None:
    asyncio.run(asyncio.wait_for(run_rounds(tiny_model, ingress, streams, rounds), ROUND_LIMIT_S * rounds))


async def run_rounds(tiny_model: Path, ingress: str, streams: int, rounds: int) -> None:
    info = {"max_num_seqs": MOST_STREAMS, "max_queued_requests": 0, "pool_tokens": 1 << 20}
    async with (
        served(Tokenizer.from_folder(tiny_model), "x" * 200, ingress, info=info) as server,
        serving(server.app) as port,
    ):
        for _ in range(rounds):
            await close_all_at_once(server, port, streams)
