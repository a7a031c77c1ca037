"""The gate: who waits, who comes in, and what becomes of those inside when the engine is changed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_engine import FakeEngineClient, make_info
from tests.helpers.tiny_model import build_tiny_model
from tournant.deploy.admission_gate import AdmissionGate
from tournant.deploy.errors import GenerationFailed, RequestError
from tournant.deploy.frontend import Frontend
from tournant.deploy.tokenizer import Tokenizer
from tournant.kvstore.block import Namespace
from tournant.workers.errors import EngineDeadError, Overloaded
from tournant.workers.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class Visitor:
    """A guest that keeps a list of what happens to it."""

    gate: AdmissionGate
    delivered: bool = False
    refuses: Exception | None = None
    seen: list[str] = field(default_factory=list)

    def withdraw(self) -> None:
        self.seen.append("withdrawn")

    def submit_again(self) -> None:
        self.seen.append("again")
        if self.refuses is not None:
            raise self.refuses

    def fail(self, error: GenerationFailed) -> None:
        self.seen.append(f"{error.kind}: {error}")
        self.gate.leave(self)


class Swap:
    """A swap that waits until it is told to go on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.error = error

    async def __call__(self) -> None:
        self.begun.set()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error


async def enter(gate: AdmissionGate, log: list[str], name: str, num_answers: int = 1, timeout_s: float = 60) -> None:
    async with gate.entry(num_answers, timeout_s):
        log.append(name)


@async_test
async def test_who_comes_while_the_gate_is_closed_waits_in_order_and_too_many_are_refused() -> None:
    gate, swap, log = AdmissionGate(), Swap(), []
    await enter(gate, log, "before")
    changing = asyncio.create_task(gate.change(swap, 1.0, max_waiting=3))
    await swap.begun.wait()
    waiting = [asyncio.create_task(enter(gate, log, name, count)) for name, count in (("a", 2), ("b", 1))]
    await settle()
    assert (gate.closed, gate.num_pending) == (True, 3)
    with pytest.raises(Overloaded, match=r"3 answers wait for that, of at most 3; try again"):
        await enter(gate, log, "c")
    waiting[0].cancel()
    await settle()
    assert gate.num_pending == 1
    assert log == ["before"]
    swap.may_end.set()
    await asyncio.gather(changing, *waiting, return_exceptions=True)
    await enter(gate, log, "after")
    assert (log, gate.closed, gate.num_pending) == (["before", "b", "after"], False, 0)


@async_test
async def test_waiting_ends_at_the_requests_own_limit() -> None:
    gate, swap = AdmissionGate(), Swap()
    changing = asyncio.create_task(gate.change(swap, 1.0, max_waiting=3))
    await swap.begun.wait()
    with pytest.raises(GenerationFailed, match=r"longer than its limit of 0.01 s") as caught:
        await enter(gate, [], "a", timeout_s=0.01)
    assert caught.value.kind == "timeout"
    swap.may_end.set()
    await changing
    assert gate.num_pending == 0


@async_test
async def test_the_engine_is_changed_when_nobody_is_inside_or_on_the_way_in() -> None:
    gate, swap = AdmissionGate(), Swap()
    encoded = asyncio.Event()
    guest = Visitor(gate, delivered=True)

    async def come() -> None:
        async with gate.entry(1, 60):
            await encoded.wait()
            gate.enter(guest)

    coming = asyncio.create_task(come())
    await settle()
    changing = asyncio.create_task(gate.change(swap, 60, max_waiting=3))
    await settle()
    assert not swap.begun.is_set()
    encoded.set()
    await coming
    await settle()
    assert not swap.begun.is_set()
    gate.leave(guest)
    await swap.begun.wait()
    swap.may_end.set()
    await changing
    assert guest.seen == []


@async_test
@pytest.mark.parametrize("error", [None, EngineDeadError("no")])
async def test_past_the_deadline_guests_begin_again_or_end_by_what_they_have_delivered(error: Exception | None) -> None:
    gate, swap = AdmissionGate(), Swap(error)
    guests = [
        Visitor(gate),
        Visitor(gate, delivered=True),
        Visitor(gate, refuses=RequestError("too long")),
        Visitor(gate),
    ]
    for guest in guests:
        gate.enter(guest)
    changing = asyncio.create_task(gate.change(swap, 0.01, max_waiting=3))
    await swap.begun.wait()
    gate.leave(guests[3])  # its client went away
    with pytest.raises(RuntimeError, match="changed already"):
        await gate.change(swap, 0.01, max_waiting=3)
    swap.may_end.set()
    (raised,) = await asyncio.gather(changing, return_exceptions=True)
    assert raised is error
    assert guests[0].seen == ["withdrawn", "again"]
    assert [line.split(":")[0] for line in guests[1].seen] == ["weights_changed"]
    assert guests[2].seen == ["withdrawn", "again", "weights_changed: after the weights were changed: too long"]
    assert guests[3].seen == ["withdrawn"]
    assert not gate.closed


# ------------------------------------------------------------ with the frontend's streams


def fake(text: str, weights: bytes, **info: object) -> FakeEngineClient:
    namespace = Namespace(weights * 32, "fp32", "fp32", b"l" * 32)
    return FakeEngineClient(lambda request, index: list(text.encode()), make_info(namespace=namespace, **info))


async def exchange(frontend: Frontend, new: FakeEngineClient, tokenizer: Tokenizer, drain_s: float = 0.0) -> None:
    async def swap() -> Tokenizer:
        await frontend.engine.close()
        frontend.engine = new
        return tokenizer

    await frontend.change_weights(swap, drain_s)


@async_test
async def test_answers_are_of_one_engine_alone(tokenizer: Tokenizer) -> None:
    old, new = fake("old text", b"o"), fake("new text", b"n")
    frontend = Frontend(tokenizer, old)
    prompt = list(range(40))
    unread, streamed, whole = (frontend.submit(prompt, GREEDY) for _ in range(3))
    collecting = asyncio.create_task(whole.collect())
    old.step(3)
    assert (await anext(streamed)).text == "old"
    assert unread.served_by.fingerprint == "tournant-6f6f6f6f6f6f-e0"
    frontend.epoch = 1
    await exchange(frontend, new, tokenizer)
    assert unread.served_by.to_plain() == {
        "system_fingerprint": "tournant-6e6e6e6e6e6e-e1",
        "weights_id": "6e" * 32,
        "epoch": 1,
    }
    assert streamed.served_by.epoch == 0
    assert len(old.submitted) == 3
    assert len(new.submitted) == 2
    assert {request.keys[0] for request in old.submitted}.isdisjoint(request.keys[0] for request in new.submitted)
    new.step(9)
    assert (await collecting).answers[0].text == "new text"
    assert (await unread.collect()).answers[0].text == "new text"
    with pytest.raises(
        GenerationFailed, match=r"^the weights are being changed and the answer was not complete"
    ) as caught:
        await streamed.collect()
    assert caught.value.kind == "weights_changed"
    assert (unread.usage.completion_tokens, frontend.num_outstanding, new.running) == (9, 0, [])


@async_test
async def test_running_answers_finish_on_their_engine_and_new_ones_wait(tokenizer: Tokenizer) -> None:
    old, new = fake("old", b"o"), fake("new", b"n")
    frontend = Frontend(tokenizer, old)
    running = await frontend.stream("a", GREEDY)
    changing = asyncio.create_task(exchange(frontend, new, tokenizer, drain_s=60))
    late = asyncio.create_task(frontend.generate("b", GREEDY))
    await settle()
    assert frontend.healthy
    old.step(4)
    assert (await running.collect()).answers[0].text == "old"
    await changing
    await settle()
    new.step(4)
    assert (await late).answers[0].text == "new"
    assert (len(old.submitted), len(new.submitted)) == (1, 1)


@async_test
async def test_what_the_new_engine_cannot_have_ends_with_a_reason(tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = Tokenizer.from_folder(build_tiny_model(tmp_path, add_bos=True))
    assert tokenizer.gives_ids_of(tokenizer)
    assert not other.gives_ids_of(tokenizer)
    for new, tokens, reason in (
        (fake("new", b"n", max_model_len=16), tokenizer, "together may have at most 16 tokens"),
        (fake("new", b"n"), other, "another tokenizer"),
    ):
        frontend = Frontend(tokenizer, fake("old", b"o"))
        stream = frontend.submit(list(range(40)), GREEDY)
        await exchange(frontend, new, tokens)
        assert frontend.tokenizer is tokens
        with pytest.raises(GenerationFailed, match=f"^after the weights were changed: .*{reason}"):
            await stream.collect()
        assert (frontend.num_outstanding, new.running) == (0, [])


@async_test
async def test_a_withdrawn_request_can_be_cancelled_and_times_out(tokenizer: Tokenizer) -> None:
    frontend = Frontend(tokenizer, fake("old", b"o"))
    cancelled = frontend.submit([1], GREEDY)
    late = frontend.submit([1], GREEDY, timeout_s=0.02)
    new = fake("new", b"n")

    async def swap() -> Tokenizer:
        cancelled.cancel()
        with pytest.raises(GenerationFailed, match="longer than its limit"):
            await late.collect()
        frontend.engine = new
        return tokenizer

    await frontend.change_weights(swap, 0.0)
    assert (frontend.num_outstanding, new.submitted) == (0, [])
