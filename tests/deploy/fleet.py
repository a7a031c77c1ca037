"""Several engines behind servers of this process, and a pool that is told of them; engines die, drain and change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.deploy.async_test import settle
from tests.deploy.fake_engine import FakeEngineClient, Script, make_info
from tests.deploy.fake_server import Server, make, over
from tournant.cluster.engine_members import Member
from tournant.deploy.engine_pool import EnginePool, least_prefill
from tournant.deploy.frontend import FrontendOptions
from tournant.deploy.resume import MAX_RESUMES
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.engine_client import EngineClient
from tournant.workers.engine_server import EngineServer
from tournant.workers.engine_stream import StreamLimits
from tournant.workers.messages import EngineRequest
from tournant.workers.stream_client import StreamEngineClient

HOST, TOKEN = "127.0.0.1", b"f" * 32


async def until(true: Callable[[], bool]) -> None:
    """Let the loop go on until something holds."""
    while not true():
        await asyncio.sleep(0.001)


async def connect(member: Member, limits: StreamLimits | None = None) -> StreamEngineClient:
    return await StreamEngineClient.connect(member.host, member.port, member.token, "f", limits, timeout_s=10)


def continuing(text: str) -> Script:
    """Answer number i says `text` from its character i on, one byte a token."""
    return lambda request, index: list(text.encode()[index:])


@dataclass
class Site:
    """A replica: an engine, its server, and what the registry is told."""

    engine: Any
    server: EngineServer
    member: Member


class Fleet:
    """Replicas by name, and the pool over them."""

    def __init__(self, **pool: Any) -> None:
        self.sites: dict[str, Site] = {}
        self.pool = EnginePool(pool.pop("connect", partial(connect, limits=None)), **({"first_wait_s": 0.01} | pool))

    async def add(self, name: str, engine: EngineClient, epoch: int = 0, told: bool = True) -> Site:
        """One more replica, which the pool hears of and is connected to if it is `told`."""
        server = EngineServer(engine, name, TOKEN, epoch)
        port = await server.start(HOST)
        weights_id = engine.info.namespace.weights_id.hex()
        site = self.sites[name] = Site(engine, server, Member(name, HOST, port, TOKEN, "node", weights_id, epoch))
        if told:
            self.tell()
            await until(lambda: any(one.replica == name and one.serving for one in self.pool.engines))
        return site

    def tell(self) -> None:
        """The registry names all replicas that there are."""
        self.pool.set_members(site.member for site in self.sites.values())

    def lose(self, name: str) -> Site:
        """A replica is gone, as by kill -9: its connections break. The registry does not know yet."""
        site = self.sites.pop(name)
        site.server.close("killed")
        for stream in list(site.server._streams):
            stream._transport.abort()  # type: ignore[union-attr]
        return site

    async def close(self) -> None:
        await self.pool.close()
        for site in self.sites.values():
            site.server.close("the test is over")
            await site.engine.close()
        await settle()


@asynccontextmanager
async def fleet(*scripts: Script, engine: dict[str, Any] | None = None, **pool: Any) -> AsyncIterator[Fleet]:
    """One fake engine for each script: r0, r1, ..."""
    found = Fleet(**pool)
    try:
        for number, script in enumerate(scripts):
            await found.add(f"r{number}", FakeEngineClient(script, **(engine or {})))
        yield found
    finally:
        await found.close()


@asynccontextmanager
async def served(tokenizer: Tokenizer, text: str, ingress: str, **engine: Any) -> AsyncIterator[Server]:
    """An application over a fake engine that the test steps, in the same process or behind a stream."""
    if ingress == "direct":
        yield make(tokenizer, text, auto=False, **engine)
        return
    info = make_info(**engine.pop("info", {}))
    async with fleet(lambda request, index: list(text.encode()), engine={"info": info, **engine}) as found:
        yield over(found.pool, found.sites["r0"].engine, tokenizer, FrontendOptions(max_resumes=MAX_RESUMES))


def in_turn(*names: str) -> Callable[..., Any]:
    """A `choose` that takes engines in this order, whatever they do; one of those there are when its turn's is not."""
    order = iter(names)

    def choose(request: EngineRequest, engines: Any) -> Any:
        name = next(order, None)
        return next((one for one in engines if one.replica == name), least_prefill(request, engines))

    return choose
