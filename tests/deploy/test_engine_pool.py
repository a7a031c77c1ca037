"""The pool of engines: who gets a request, who waits, what is said of all engines together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_engine import FakeEngineClient, make_info
from tests.deploy.fleet import connect, continuing, fleet, in_turn, until
from tournant.cluster.engine_members import Member
from tournant.deploy.engine_pool import EnginePool, least_prefill
from tournant.kvstore.block import Namespace
from tournant.workers.errors import EngineDeadError
from tournant.workers.messages import LOST_WEIGHTS, EngineRequest, EngineStats, RequestOutput
from tournant.workers.sampling_params import SamplingParams
from tournant.workers.stream_client import StreamEngineClient

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
OLD, NEW = b"w" * 32, b"n" * 32
SAYS = continuing("abcdefgh")


def info_of(weights_id: bytes, **changes: Any) -> Any:
    return make_info(namespace=Namespace(weights_id, "fp32", "fp32", b"l" * 32), **changes)


def ask(pool: EnginePool, weights_id: bytes = b"", tokens: int = 3) -> tuple[int, list[RequestOutput]]:
    heard: list[RequestOutput] = []
    number = pool.new_request_id()
    pool.submit(EngineRequest(number, [1] * tokens, GREEDY, weights_id=weights_id), heard.append)
    return number, heard


def ended(heard: list[RequestOutput]) -> bool:
    return bool(heard) and heard[-1].finish_reason is not None


@async_test
async def test_requests_go_where_the_least_waits() -> None:
    async with fleet(SAYS, SAYS, SAYS) as found:
        engines = [found.sites[f"r{number}"].engine for number in range(3)]
        for tokens in (9, 5, 4, 3, 3):
            ask(found.pool, tokens=tokens)
        await until(lambda: sum(len(engine.running) for engine in engines) == 5)
        assert sorted([len(one.request.token_ids) for one in engine.running] for engine in engines) == [
            [4, 3],
            [5, 3],
            [9],
        ]
        assert least_prefill(EngineRequest(1, [1], GREEDY), found.pool.engines).prefill_tokens == 7


@async_test
async def test_it_says_what_holds_for_all_engines() -> None:
    async with fleet() as found:
        pool = found.pool
        assert (pool.alive, pool.restarting) == (True, True)
        with pytest.raises(EngineDeadError, match="no engine is ready"):
            pool.info  # noqa: B018
        waiting = asyncio.ensure_future(pool.wait_ready())
        await found.add("a", FakeEngineClient(SAYS, info_of(OLD, max_model_len=100, max_num_seqs=2)))
        await waiting
        await found.add("b", FakeEngineClient(SAYS, info_of(OLD, pool_tokens=90, max_num_seqs=3)))
        await found.add("c", FakeEngineClient(SAYS, info_of(NEW, max_model_len=10)), epoch=1)
        assert (pool.info.max_model_len, pool.info.pool_tokens, pool.info.max_num_seqs) == (100, 90, 5)
        assert pool.info.max_queued_requests == 16
        assert pool.restarting is False
        for name, running in (("a", 1), ("b", 4)):
            found.sites[name].engine.stats = EngineStats(num_running=running, num_waiting=2, num_steps=9)
        for site in found.sites.values():
            for stream in list(site.server._streams):
                stream._tick()
        await until(lambda: pool.stats.num_running == 5)
        assert (pool.stats.num_waiting, pool.stats.num_steps) == (4, 0)
        assert await pool.reset_prefix_cache() is True
        found.sites["b"].engine.reset_result = False
        assert await pool.reset_prefix_cache() is False
        for name in "abc":
            found.lose(name)
        await until(lambda: pool.restarting)
        assert pool.info.max_num_seqs == 5  # as it was: requests may still be checked and wait


@async_test
async def test_requests_wait_for_an_engine_and_may_go_away_meanwhile() -> None:
    async with fleet() as found:
        pool = found.pool
        _, heard = ask(pool)
        gone, nothing = ask(pool)
        assert pool.num_waiting == 2
        pool.abort([gone])
        assert pool.num_waiting == 1
        await found.add("a", FakeEngineClient(SAYS, auto=True))
        await until(lambda: ended(heard))
        assert [token for output in heard for token in output.token_ids] == list(b"abcd")
        assert nothing == []
        _, heard = ask(pool)
        await pool.close()
        assert (heard[-1].finish_reason, pool.alive) == ("error", False)
        with pytest.raises(EngineDeadError, match="closed"):
            ask(pool)


@async_test
async def test_a_stream_that_broke_is_opened_again_while_the_registry_names_its_engine() -> None:
    async with fleet(SAYS) as found:
        (engine,) = found.pool.engines
        first = engine.client
        assert first is not None
        for stream in list(found.sites["r0"].server._streams):
            stream._transport.abort()  # type: ignore[union-attr]
        await until(lambda: engine.serving and engine.client is not first)
        found.lose("r0")
        await until(lambda: engine.client is None)
        assert found.pool.engines == [engine]
        found.tell()
        await until(lambda: not found.pool.engines)


@async_test
async def test_a_replica_without_an_engine_is_one_line_however_often_it_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries: list[str] = []

    async def refused(member: Member) -> StreamEngineClient:
        tries.append(member.replica)
        if len(tries) <= 3:
            raise EngineDeadError(f"replica {member.replica} has no engine now")
        if len(tries) <= 6:
            raise EngineDeadError("no stream to the engine at 10.0.0.1:1: refused")
        return await connect(member)

    async with fleet(SAYS, connect=refused) as found:
        assert found.pool.engines[0].serving
    lines = [record.getMessage() for record in caplog.records if record.name == "tournant.engine_pool"]
    assert lines[:2] == [
        "replica r0 has no engine now",
        "replica r0: no stream to the engine at 10.0.0.1:1: refused",
    ]
    assert len(tries) == 7
    assert not any("no engine now" in line or "no stream" in line for line in lines[2:])


@async_test
async def test_an_engine_that_the_registry_forgot_is_used_as_long_as_its_stream_works() -> None:
    async with fleet(SAYS) as found:
        found.pool.set_members([])
        _, heard = ask(found.pool)
        await until(lambda: bool(found.sites["r0"].engine.running))
        found.sites["r0"].engine.step(4)
        await until(lambda: ended(heard))
        assert heard[-1].finish_reason == "length"
        found.lose("r0")
        await until(lambda: not found.pool.engines)


@async_test
async def test_one_that_drains_or_is_full_is_passed_over() -> None:
    choose = in_turn("r0", "r0", "r0")
    async with fleet(SAYS, SAYS, choose=choose, engine={"info": make_info(max_num_seqs=1, max_queued_requests=0)}) as f:
        engines = [f.sites[name].engine for name in ("r0", "r1")]
        ask(f.pool)
        ask(f.pool)
        await until(lambda: [len(engine.running) for engine in engines] == [1, 1])
        f.pool.abort([1, 2])
        await until(lambda: [len(engine.running) for engine in engines] == [0, 0])
        await f.sites["r0"].server.drain(0.0)
        await until(lambda: not f.pool.engines[0].serving)
        ask(f.pool)
        await until(lambda: len(engines[1].running) == 1)


@async_test
async def test_weights_are_those_that_most_engines_have_and_change_by_use_alone() -> None:
    async with fleet() as found:
        pool = found.pool
        changes: list[object] = []
        pool.on_change = lambda: changes.append(pool.preferred())
        assert pool.preferred() is None
        await found.add("a", FakeEngineClient(SAYS, info_of(OLD)))
        await found.add("b", FakeEngineClient(SAYS, info_of(OLD)))
        await found.add("c", FakeEngineClient(SAYS, info_of(NEW)), epoch=1)
        assert (pool.weights_id, pool.preferred()) == (OLD, (OLD, 0))
        site = found.sites["b"]
        site.engine.info = info_of(NEW, writer_id=5)
        await site.server.drain(0.0)
        site.server.serve_again(2)
        await until(lambda: pool.preferred() == (NEW, 2))
        assert pool.weights_id == OLD
        assert changes[-1] == (NEW, 2)
        ask(pool)
        await until(lambda: len(found.sites["a"].engine.running) == 1)
        pool.use(NEW)
        ask(pool)
        await until(lambda: len(found.sites["b"].engine.running) + len(found.sites["c"].engine.running) == 1)
        assert pool.info.namespace.weights_id == NEW


@async_test
async def test_a_request_waits_for_its_weights_until_nobody_has_them() -> None:
    async with fleet() as found:
        pool = found.pool
        await found.add("a", FakeEngineClient(SAYS, info_of(NEW)))
        old = await found.add("b", FakeEngineClient(SAYS, info_of(OLD)), told=True)
        found.lose("b")
        await until(lambda: [one.serving for one in pool.engines] == [True, False])
        _, heard = ask(pool, OLD)
        assert pool.num_waiting == 1  # the registry still names one, which may only have lost its stream
        await found.add("c", FakeEngineClient(SAYS, info_of(OLD), auto=True))
        await until(lambda: ended(heard))
        assert heard[-1].finish_reason == "length"
        found.lose("c")
        await until(lambda: not pool.engines[-1].serving)
        _, heard = ask(pool, OLD)
        await settle()
        assert heard == []
        found.tell()
        await until(lambda: ended(heard))
        assert (heard[-1].finish_reason, heard[-1].lost) == ("error", LOST_WEIGHTS)
        assert old.engine.submitted == []


@async_test
async def test_a_long_request_goes_where_it_fits() -> None:
    async with fleet() as found:
        await found.add("small", FakeEngineClient(SAYS, make_info(max_model_len=32)))
        await found.add("large", FakeEngineClient(SAYS, make_info(max_model_len=64)))
        for _ in range(2):
            ask(found.pool, tokens=40)
        await until(lambda: len(found.sites["large"].engine.running) == 2)


@async_test
async def test_a_wrong_choice_is_made_good_by_another_engine() -> None:
    """An engine that ends between the look and the call is passed over."""

    def stale(request: EngineRequest, engines: Any) -> Any:
        chosen = min(engines, key=lambda engine: engine.replica)
        if chosen.replica == "r0":
            chosen.client.draining = True
        return chosen

    async with fleet(SAYS, SAYS, choose=stale) as found:
        ask(found.pool)
        await until(lambda: len(found.sites["r1"].engine.running) == 1)
        assert found.sites["r0"].engine.submitted == []
