"""Streams over real sockets: what a frontend gets of an engine, and how every kind of end ends both sides."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_engine import FakeEngineClient, make_info
from tournant.workers import engine_server
from tournant.workers.engine_server import MAX_STRANGERS, EngineServer
from tournant.workers.engine_stream import EngineFacts, StreamLimits, hello
from tournant.workers.errors import EngineDeadError
from tournant.workers.messages import (
    FRAME_HEADER,
    LOST_DEAD,
    LOST_MOVED,
    EngineRequest,
    EngineStats,
    FrameBuffer,
    RequestOutput,
    StepMessage,
    pack_frame,
    request_to_wire,
    step_to_wire,
)
from tournant.workers.sampling_params import SamplingParams
from tournant.workers.stream_client import StreamEngineClient

TOKEN = b"t" * 32
HOST = "127.0.0.1"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
QUICK = StreamLimits(beat_s=0.05, silence_s=0.3, hello_s=0.3)


def counting(request: EngineRequest, index: int) -> list[int]:
    """Answer number i of a prompt that begins with t says t + i, t + i + 1, ..."""
    return [(request.token_ids[0] + index + place) % 500 for place in range(300)]


class Heard:
    """What a sink hears of one request."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.news = asyncio.Event()

    def __call__(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self.news.set()

    async def ended(self, count: int = 1) -> list[RequestOutput]:
        """Its last outputs, once so many answers are over."""
        while len(found := [output for output in self.outputs if output.finish_reason is not None]) < count:
            self.news.clear()
            await self.news.wait()
        return found

    async def tokens(self, count: int) -> list[int]:
        """Its tokens, once there are so many."""
        while len(found := [token for output in self.outputs for token in output.token_ids]) < count:
            self.news.clear()
            await self.news.wait()
        return found


async def until(true: Callable[[], bool]) -> None:
    """Let the loop go on until something holds."""
    while not true():
        await asyncio.sleep(0.001)


class Site:
    """An engine behind a server."""

    def __init__(self, limits: StreamLimits | None = None, **engine: Any) -> None:
        self.engine = FakeEngineClient(counting, **{"auto": True} | engine)
        self.server = EngineServer(self.engine, "r1", TOKEN, 3, limits)
        self.port = 0

    async def connect(self, limits: StreamLimits | None = None, token: bytes = TOKEN) -> StreamEngineClient:
        return await StreamEngineClient.connect(HOST, self.port, token, "f1", limits, timeout_s=10)


@asynccontextmanager
async def site(limits: StreamLimits | None = None, **engine: Any) -> AsyncIterator[Site]:
    place = Site(limits, **engine)
    place.port = await place.server.start(HOST)
    try:
        yield place
    finally:
        place.server.close("the test is over")
        await settle()


def ask(client: StreamEngineClient, first: int = 10, **fields: Any) -> tuple[int, Heard]:
    heard = Heard()
    request_id = client.new_request_id()
    client.submit(EngineRequest(request_id, [first, 1, 2], fields.pop("params", GREEDY), **fields), heard)
    return request_id, heard


@async_test
async def test_many_requests_share_one_stream() -> None:
    async with site(info=make_info(max_num_seqs=400)) as place:
        client = await place.connect()
        assert client.facts == EngineFacts(place.engine.info, 3, "r1", None)
        heard = [ask(client, first)[1] for first in range(200)]
        assert client.prefill_tokens == 600
        assert client.num_answers == 200
        for first, one in enumerate(heard):
            await one.ended()
            assert [token for output in one.outputs for token in output.token_ids] == [first + i for i in range(8)]
        assert (client.num_answers, client.prefill_tokens, place.server.num_answers) == (0, 0, 0)


@async_test
async def test_a_step_is_one_frame_for_each_frontend() -> None:
    async with site(auto=False) as place:
        reader, writer = await asyncio.open_connection(HOST, place.port)
        frames = FrameBuffer()

        async def next_step() -> list[Any]:
            while True:
                for message in frames.feed(await reader.read(1 << 16)):
                    if message[0] == "step" and message[3]:
                        return message

        writer.write(pack_frame(hello(TOKEN, "f2")))
        for number in (1, 2, 3):
            writer.write(pack_frame(request_to_wire(EngineRequest(number, [number], replace(GREEDY, n=2)))))
        other = await place.connect()
        _, heard = ask(other, 50)
        await until(lambda: len(place.engine.running) == 7)
        place.engine.step()
        message = await next_step()
        assert sorted((output[0], output[1]) for output in message[3]) == [(i, j) for i in (1, 2, 3) for j in (0, 1)]
        assert await heard.tokens(1) == [50]
        writer.close()
        await until(lambda: len(place.engine.running) == 1)  # who goes away takes its requests with it
        await other.close()
        await until(lambda: not place.engine.running)


@async_test
async def test_resumed_answers_keep_their_number_and_their_place() -> None:
    async with site() as place:
        client = await place.connect()
        heard = Heard()
        request = EngineRequest(5, [10, 1, 2, 12, 13], GREEDY, num_output=2, first_index=2, weights_id=b"w" * 32)
        client.submit(request, heard)
        (end,) = await heard.ended()
        assert (end.index, end.finish_reason) == (2, "length")
        assert await heard.tokens(6) == [14, 15, 16, 17, 18, 19]
        assert [replace(found, request_id=5) for found in place.engine.submitted] == [request]


@async_test
async def test_requests_and_answers_are_stopped() -> None:
    async with site(auto=False) as place:
        client = await place.connect()
        whole, heard = ask(client)
        parted, of_two = ask(client, params=replace(GREEDY, n=2))
        await until(lambda: len(place.engine.running) == 3)
        client.abort([whole, 999])
        client.abort_answer(parted, 0)
        client.abort_answer(parted, 7)
        await until(lambda: len(place.engine.running) == 1)
        assert place.server.num_answers == client.num_answers == 1
        place.engine.step(8)
        (end,) = await of_two.ended()
        assert end.index == 1
        assert heard.outputs == []
        assert place.server.num_answers == client.num_answers == 0


@async_test
async def test_an_engine_that_dies_is_lost_at_once_and_refuses_new_streams() -> None:
    async with site(auto=False) as place:
        client = await place.connect()
        _, heard = ask(client)
        await until(lambda: bool(place.engine.running))
        place.engine.die()
        (end,) = await heard.ended()
        assert (end.finish_reason, end.lost) == ("error", LOST_DEAD)
        assert await client.wait_ended() == end.error == "the engine of replica r1 is gone"
        await until(lambda: not client.alive)
        with pytest.raises(EngineDeadError, match="engine of replica r1 is gone"):
            ask(client)
        with pytest.raises(EngineDeadError, match="has no engine now"):
            await place.connect()


@async_test
async def test_an_idle_engine_that_dies_is_noticed() -> None:
    async with site(QUICK, auto=False) as place:
        client = await place.connect()
        place.engine.alive = False
        await until(lambda: not client.alive)
        assert "is gone" in client.ended


@async_test
async def test_a_connection_that_breaks_loses_what_is_open_with_the_client_already_dead() -> None:
    async with site(auto=False) as place:
        client = await place.connect()
        seen: list[tuple[bool, str | None]] = []
        client.submit(EngineRequest(1, [1], replace(GREEDY, n=2)), lambda o: seen.append((client.alive, o.lost)))
        changes: list[bool] = []
        client.on_change = lambda: changes.append(client.alive)
        await until(lambda: len(place.engine.running) == 2)
        for stream in list(place.server._streams):
            stream._transport.abort()  # type: ignore[union-attr]
        await until(lambda: bool(changes))
        assert seen == [(False, LOST_DEAD)] * 2
        assert changes == [False]
        await until(lambda: not place.engine.running)


@async_test
async def test_a_drain_lets_finish_and_hands_back_what_is_left() -> None:
    async with site(auto=False) as place:
        client = await place.connect()
        _, short = ask(client, params=replace(GREEDY, max_tokens=1))
        await until(lambda: len(place.engine.running) == 1)
        draining = asyncio.ensure_future(place.server.drain(30.0))
        await until(lambda: client.draining)
        with pytest.raises(EngineDeadError, match="drains"):
            ask(client)
        place.engine.step()
        await draining
        (end,) = await short.ended()
        assert end.finish_reason == "length"
        place.server.serve_again(4)
        await until(lambda: client.serving)
        assert client.facts.epoch == 4

        _, long = ask(client)
        await until(lambda: len(place.engine.running) == 1)
        place.engine.step(2)
        await place.server.drain(0.0)
        (end,) = await long.ended()
        assert (end.lost, end.finish_reason) == (LOST_MOVED, "error")
        assert await long.tokens(2) == [10, 11]
        assert not place.engine.running
        late = await place.connect()
        assert late.draining
        place.server.begin_drain(0.0, for_good=True)
        place.server.serve_again(5)
        assert place.server.draining


@async_test
async def test_other_weights_are_announced_and_requests_for_others_are_not_begun() -> None:
    async with site(auto=False) as place:
        client = await place.connect()
        changed = asyncio.Event()
        client.on_change = changed.set
        old = client.info.namespace.weights_id
        place.engine.info = make_info(namespace=replace(client.info.namespace, weights_id=b"n" * 32), writer_id=2)
        _, heard = ask(client, weights_id=old)  # sent before it hears of the change
        (end,) = await heard.ended()
        assert end.lost == LOST_MOVED
        assert place.engine.submitted == []
        place.server.serve_again(5)
        await changed.wait()
        assert (client.info.namespace.weights_id, client.facts.epoch) == (b"n" * 32, 5)


@async_test
async def test_more_than_the_engine_holds_is_handed_back() -> None:
    async with site(auto=False, info=make_info(max_num_seqs=2, max_queued_requests=1)) as place:
        first, second = await place.connect(), await place.connect()
        ask(first, params=replace(GREEDY, n=3))
        await until(lambda: len(place.engine.running) == 3)
        _, heard = ask(second)
        (end,) = await heard.ended()
        assert (end.lost, "is full" in (end.error or "")) == (LOST_MOVED, True)


@async_test
async def test_the_prefix_cache_is_reset() -> None:
    async with site() as place:
        client = await place.connect()
        assert await client.reset_prefix_cache() is True
        place.engine.reset_result = False
        assert await client.reset_prefix_cache() is False


@async_test
async def test_numbers_of_an_idle_engine_arrive() -> None:
    async with site(QUICK) as place:
        client = await place.connect()
        place.engine.stats = EngineStats(num_waiting=7, num_steps=2)
        await until(lambda: client.stats.num_waiting == 7)


@async_test
async def test_a_frontend_that_does_not_read_is_cut_off_and_what_waits_for_it_is_bounded() -> None:
    limits = StreamLimits(max_unsent_bytes=1 << 16)
    async with site(limits, auto=False, per_step=64) as place:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, (HOST, place.port))
        with contextlib.closing(raw):
            params = replace(GREEDY, logprobs=20, max_tokens=1 << 20)
            raw.send(pack_frame(hello(TOKEN, "slow")))
            raw.send(pack_frame(request_to_wire(EngineRequest(1, [1], params))))
            await until(lambda: len(place.engine.running) == 1)
            (stream,) = place.server._streams
            most = 0
            while place.engine.running:
                place.engine.step()
                await settle()
                if not stream.ended:
                    most = max(most, stream._transport.get_write_buffer_size())  # type: ignore[union-attr]
            assert "does not read" in stream.ended
            assert most <= limits.max_unsent_bytes + (1 << 16)
            assert place.server.num_answers == 0


HELLO = pack_frame(hello(TOKEN, "f"))
A_REQUEST = request_to_wire(EngineRequest(1, [1], GREEDY))


def changed(place: int, value: object) -> bytes:
    return pack_frame([*A_REQUEST[:place], value, *A_REQUEST[place + 1 :]])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(FRAME_HEADER.pack(5000), id="a hello that is too long"),
        pytest.param(pack_frame(hello(b"x" * 32, "f")), id="another token"),
        pytest.param(pack_frame(["hello", 1, "t" * 32, "f"]), id="a token that is text"),
        pytest.param(pack_frame(["hello", 2, TOKEN, "f"]), id="another version"),
        pytest.param(pack_frame(A_REQUEST), id="no hello"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
        pytest.param(HELLO + FRAME_HEADER.pack((64 << 20) + 1), id="a frame that is too long"),
        pytest.param(HELLO + FRAME_HEADER.pack(3) + b"\xc1\xc1\xc1", id="garbage"),
        pytest.param(HELLO + FRAME_HEADER.pack(1) + msgpack.packb(7), id="no message"),
        pytest.param(HELLO + pack_frame(["close"]), id="an unknown kind"),
        pytest.param(HELLO + HELLO, id="a second hello"),
        pytest.param(HELLO + pack_frame(["submit"]), id="a request without anything"),
        pytest.param(HELLO + pack_frame(A_REQUEST) * 2, id="a request twice"),
        pytest.param(HELLO + changed(1, "1"), id="an id that is text"),
        pytest.param(HELLO + changed(2, [1.5]), id="half a token"),
        pytest.param(HELLO + changed(2, {"a": 1}), id="tokens that are none"),
        pytest.param(HELLO + changed(3, {"colour": 1}), id="unknown sampling"),
        pytest.param(HELLO + changed(3, {"n": 1 << 40}), id="too many answers"),
        pytest.param(HELLO + changed(4, ["k"]), id="keys that are text"),
        pytest.param(HELLO + changed(4, [b"k"]), id="keys that are too short"),
        pytest.param(HELLO + changed(6, 7), id="a salt that is a number"),
        pytest.param(HELLO + pack_frame(["abort", [["x"]]]), id="an abort of nothing"),
        pytest.param(HELLO + pack_frame(["abort_answer", 1]), id="an abort without an index"),
    ],
)
@async_test
async def test_what_is_not_ours_ends_its_stream_alone(data: bytes) -> None:
    async with site() as place:
        good = await place.connect()
        reader, writer = await asyncio.open_connection(HOST, place.port)
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        writer.close()
        await until(lambda: len(place.server._streams) == 1 and not place.server._strangers)
        _, heard = ask(good, 60)
        assert await heard.tokens(8) == list(range(60, 68))


@async_test
async def test_who_says_nothing_is_sent_away() -> None:
    async with site(QUICK) as place:
        silent, _ = await asyncio.open_connection(HOST, place.port)
        while await silent.read(1 << 16):
            pass
        dumb, writer = await asyncio.open_connection(HOST, place.port)
        writer.write(HELLO)
        while await dumb.read(1 << 16):
            pass
        await until(lambda: not place.server._streams and not place.server._strangers)


async def heard_of(reader: asyncio.StreamReader) -> list[list[Any]]:
    """All that an engine says until it ends the stream."""
    frames, messages = FrameBuffer(), []
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            messages += frames.feed(data)
    return messages


@async_test
async def test_who_has_not_said_the_token_is_told_nothing() -> None:
    async with site(StreamLimits(beat_s=0.02, hello_s=10)) as place:
        stranger, _ = await asyncio.open_connection(HOST, place.port)
        client = await place.connect()
        await until(lambda: len(place.server._strangers) == 1)
        beats = next(iter(place.server._streams))
        await until(lambda: beats._step > 5)
        place.server.begin_drain(5.0)
        place.server.serve_again(4, "/secret")
        await until(lambda: client.facts.epoch == 4)
        place.server.close("the test is over")
        assert await heard_of(stranger) == []
        assert client.facts.model == "/secret"


@async_test
async def test_a_frontend_that_connects_as_a_drain_begins_hears_ready_first() -> None:
    async with site() as place:
        reader, writer = await asyncio.open_connection(HOST, place.port)
        await until(lambda: len(place.server._strangers) == 1)
        place.server.begin_drain(5.0)
        writer.write(HELLO)
        await until(lambda: len(place.server._streams) == 1)
        place.server.close("the test is over")
        assert [message[0] for message in await heard_of(reader)] == ["ready", "draining", "bye"]


@async_test
async def test_strangers_keep_no_frontend_out_and_the_oldest_go() -> None:
    async with site() as place:
        strangers = [await asyncio.open_connection(HOST, place.port) for _ in range(3 * MAX_STRANGERS)]
        await until(lambda: len(place.server._strangers) == MAX_STRANGERS)
        client = await place.connect()
        assert await heard_of(strangers[0][0]) == []
        last = strangers[-1][1]
        last.write(HELLO)
        await until(lambda: len(place.server._streams) == 2)
        assert client.alive


@async_test
async def test_one_frontend_too_many_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_server, "MAX_STREAMS", 1)
    async with site() as place:
        first = await place.connect()
        with pytest.raises(EngineDeadError, match="has streams to 1 frontends"):
            await place.connect()
        await first.close()
        await until(lambda: not place.server._streams)
        await place.connect()


@async_test
async def test_both_ends_that_beat_stay_though_nothing_is_to_be_said() -> None:
    async with site(QUICK) as place:
        client = await place.connect(QUICK)
        numbers = list(place.server._streams)
        await until(lambda: numbers[0]._step > 20)  # several times the silence that would end it
        assert client.alive


@asynccontextmanager
async def engine_that_says(*frames: bytes, closes: bool = False) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for frame in frames:
            writer.write(frame)
        if closes:
            writer.close()
        while await reader.read(1 << 16):
            pass
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


READY = pack_frame(EngineFacts(make_info(), 0, "r").to_wire("ready"))
STEP = step_to_wire(StepMessage(1, 1, [], EngineStats()))


@pytest.mark.parametrize(
    "frames",
    [
        (),
        (pack_frame(["refused", "no"]),),
        (b"\xff" * 100,),
        (pack_frame(STEP),),
        (pack_frame(["ready", {"writer_id": 1}, 0, "r", None]),),
    ],
)
@async_test
async def test_an_engine_that_does_not_become_ready_is_given_up(frames: tuple[bytes, ...]) -> None:
    async with engine_that_says(*frames, closes=not frames) as port:
        with pytest.raises(EngineDeadError):
            await StreamEngineClient.connect(HOST, port, TOKEN, "f", QUICK)
    with pytest.raises(EngineDeadError, match="no stream to the engine"):
        await StreamEngineClient.connect(HOST, port, TOKEN, "f", QUICK)


@pytest.mark.parametrize(
    "frames",
    [
        (),
        (pack_frame(["bye", "so long"]),),
        (READY,),
        (pack_frame(["step", 1, 1, [[1]], STEP[4]]),),
        (pack_frame(["step", 1, 1, [[1, 0, [1], None, {"colour": 1}]], STEP[4]]),),
        (pack_frame(["draining", "soon"]),),
        (pack_frame(["reply", 1]),),
        (FRAME_HEADER.pack((64 << 20) + 1),),
    ],
)
@async_test
async def test_whatever_an_engine_says_wrong_or_not_at_all_loses_it(frames: tuple[bytes, ...]) -> None:
    async with engine_that_says(READY, *frames) as port:
        client = await StreamEngineClient.connect(HOST, port, TOKEN, "f", QUICK)
        heard = Heard()
        if client.alive:
            client.submit(EngineRequest(1, [1], GREEDY), heard)
            (end,) = await heard.ended()
            assert end.lost == LOST_DEAD
        await until(lambda: not client.alive)
        with pytest.raises(EngineDeadError):
            await client.reset_prefix_cache()
