"""Cases about KV tiers, as a client of the running service sees them: M behind HTTP, its engine and its node store in
processes of their own, the SMALL device pool, and TIERS below it.

Every test ends with the accounting: no pin, no read, no copy; lent slots are the engine's standing credit.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cases.conftest import Ref, random_prompts
from tests.cases.full_disk import FullDiskStore
from tests.helpers.live_server import M_TOKEN_BYTES, SMALL_BLOCKS, LiveServer, live_server
from tests.kvstore.store_harness import folder_bytes
from tests.workers.harness import Session, make_engine
from tournant.deploy.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(400)  # of a machine that does much else

BLOCK_BYTES = 16 * M_TOKEN_BYTES
TIER_BLOCKS, NVME_BYTES = 128, 64 << 20
LONG = random_prompts(100, 480, seed=480)  # 30 blocks each: two of them fill the device pool
NUM_TOKENS = 8
WORDS = ["amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heron", "ivory", "jasper", "koala"]
PATIENCE_S = 100.0


@dataclass(frozen=True)
class Answer:
    """What a client got. Numbers are prompt tokens, by where they were found."""

    text: str
    device: int
    host: int
    nvme: int


@contextmanager
def tiered_server(
    model: Path | None,
    folder: Path,
    host_blocks: int = TIER_BLOCKS,
    *,
    block_bytes: int = BLOCK_BYTES,
    nvme_bytes: int = NVME_BYTES,
    engine: dict[str, Any] | None = None,
    access: dict[str, Any] | None = None,
    **advanced: Any,
) -> Iterator[LiveServer]:
    """M over TIERS; what is found below is loaded, whatever that costs."""
    kv_store: dict[str, Any] = {"host_bytes": host_blocks * block_bytes}
    if nvme_bytes:
        kv_store |= {"nvme_bytes": nvme_bytes, "nvme_folder": str(folder / "nvme")}
        advanced = {"segment_bytes": 4 << 20} | advanced
    if "faults" in advanced:
        advanced["allow_faults"] = True
    make_store = advanced.pop("make_store", None)
    options: dict[str, Any] = {} if make_store is None else {"make_store": make_store}
    options["access"] = access or {}
    advanced = {"restore": "always", "restore_ms": 60_000, "lookup_ms": 10_000} | advanced
    with live_server(model, engine=engine, advanced=advanced, kv_store=kv_store, **options) as server:
        yield server


def ask(
    server: LiveServer, prompts: list[list[int]], max_tokens: int = NUM_TOKENS, concurrency: int = 16
) -> list[Answer]:
    """Greedy answers to all prompts; every request must succeed."""

    def one(prompt: list[int]) -> Answer:
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        reply = server.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        assert found["choices"][0]["finish_reason"] == "length"
        return Answer(found["choices"][0]["text"], **found["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"])

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, prompts))


def assert_equal(answers: list[Answer], prompts: list[list[int]], ref: Ref, max_tokens: int = NUM_TOKENS) -> None:
    """Each is what M says with nothing cached, alone."""
    wrong = [
        f"prompt {number}: {answer}, not {ref(prompt, max_tokens)!r}"
        for number, (answer, prompt) in enumerate(zip(answers, prompts, strict=True))
        if answer.text != ref(prompt, max_tokens)
    ]
    assert not wrong, "\n".join(wrong)


def warm(server: LiveServer, prompts: list[list[int]], ref: Ref, at_once: int = 2) -> None:
    """Have all blocks of prompts below: only so many at a time as the device holds, or it would drop some first."""
    for start in range(0, len(prompts), at_once):
        some = prompts[start : start + at_once]
        assert_equal(ask(server, some), some, ref)
        server.settle()


def until(holds: Callable[[], bool], act: Callable[[], object] = lambda: None) -> None:
    """Act until it holds, for as long as anyone has patience."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it never came true"
        act()


@pytest.mark.case(1)
def test_case_1_blocks_go_down_only_once_their_kernels_are_over(tiny_model: Path, tmp_path: Path, ref: Ref) -> None:
    prompts = LONG[:64]
    late = {"kernel_delay_ms": 5}
    with tiered_server(tiny_model, tmp_path, faults=late, num_in_flight=2) as server:
        assert_equal(ask(server, prompts), prompts, ref)
        server.forget_device()
        prompts = prompts[::-1]  # those that were used last first, or each would push the next one out
        again = ask(server, prompts)
        assert_equal(again, prompts, ref)
        assert sum(answer.host for answer in again) > 500
        assert sum(answer.nvme for answer in again) > 2000
        server.assert_at_rest()


@pytest.mark.case(3)
def test_case_3_one_prompt_among_many(tiny_model: Path, tmp_path: Path, ref: Ref) -> None:
    fixed = LONG[0]
    prompts = [prompt[: 20 + 7 * (number % 17)] for number, prompt in enumerate(random_prompts(500, 140, seed=3))]
    for place in range(0, 550, 11):
        prompts.insert(place, fixed)
    assert prompts.count(fixed) == 50
    with tiered_server(tiny_model, tmp_path) as server:
        answers = ask(server, prompts, concurrency=64)
        copies = [answer for answer, prompt in zip(answers, prompts, strict=True) if prompt is fixed]
        assert_equal(copies, [fixed] * 50, ref)
        assert sum(answer.host + answer.nvme for answer in copies) > 0
        assert_equal(answers[1:550:11], prompts[1:550:11], ref)
        server.assert_at_rest()


@pytest.mark.case(5)
def test_case_5_a_session_returns_after_its_kv_went_to_disk(tmp_path: Path) -> None:
    """SmolLM2 with a cap of 1 GiB. 60 short requests, not 400, push the session out of a device pool of 80 blocks and a
    host pool of 80; each names a code word of its own, which must show up in no other answer.
    """
    block_bytes = 16 * 30 * 2 * 3 * 64 * 2  # tokens, layers, K and V, KV heads, head size, bfloat16
    words = [f"{name}-{number}" for number, name in enumerate(WORDS * 6, start=11)][:61]
    notes = [f"Note {number}: shelf {number % 7} holds {3 * number + 1} boxes of tea." for number in range(58)]
    notes.insert(20, f"The secret code word of this session is {words[0]}. Remember {words[0]}.")
    session, question = " ".join(notes), "What is the secret code word of this session? Answer with the code word only."
    engine = {"dtype": "bfloat16", "kv_cache_bytes": 80 * block_bytes}
    options: dict[str, Any] = {"block_bytes": block_bytes, "nvme_bytes": 1 << 30, "segment_bytes": 64 << 20}
    with tiered_server(None, tmp_path, 80, engine=engine, **options) as server:
        first = chat(server, f"{session}\n{question}")
        assert words[0] in first.text.lower()
        server.settle()
        shorts = [f"The secret code word of this session is {word}. {question}" for word in words[1:]]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(partial(chat, server), shorts))
        server.settle()
        again = chat(server, f"{session}\n{question}")
        assert again.text == first.text
        assert (again.device, again.host) == (16, 0)  # the system prompt that all requests begin with
        assert again.nvme >= 60 * 16
        for own, answer in zip(words, [again, *answers], strict=True):
            assert [word for word in words if word != own and word in answer.text.lower()] == []
        assert sum(own in answer.text.lower() for own, answer in zip(words[1:], answers, strict=True)) > 30
        server.assert_at_rest()


def chat(server: LiveServer, text: str) -> Answer:
    """A short greedy answer to one message."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 20, "temperature": 0}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    tiers = found["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return Answer(found["choices"][0]["message"]["content"], **tiers)


@pytest.mark.case(7)
@pytest.mark.case(9)
def test_case_7_and_9_a_warm_disk_after_a_restart_and_after_kill_9(tiny_model: Path, tmp_path: Path, ref: Ref) -> None:
    prompts = LONG[:50]
    full = 50 * 464  # the last block holds the last token, which is computed
    with tiered_server(tiny_model, tmp_path) as server:
        warm(server, prompts, ref)
        server.restart()
        again = ask(server, prompts)
        assert_equal(again, prompts, ref)
        assert sum(answer.nvme for answer in again) > 0.9 * full
        server.settle()
        server.restart(kill=True)
        again = ask(server, prompts)
        assert_equal(again, prompts, ref)
        assert sum(answer.nvme for answer in again) > 0.8 * full, "what was only in RAM is lost, no more"
        server.assert_at_rest()


@pytest.mark.case(9)
def test_case_9_without_persistence_a_restart_begins_with_an_empty_folder(
    tiny_model: Path, tmp_path: Path, ref: Ref
) -> None:
    prompts = LONG[:6]
    with tiered_server(tiny_model, tmp_path, nvme_persist=False) as server:
        warm(server, prompts, ref)
        assert server.store_status().nvme_used_bytes > 0
        server.restart()
        assert server.store_status().nvme_used_bytes == 0
        assert not list((tmp_path / "nvme").glob("segment-*"))
        again = ask(server, prompts[:1])
        assert_equal(again, prompts[:1], ref)
        assert (again[0].device, again[0].host, again[0].nvme) == (0, 0, 0)
        server.assert_at_rest()


@pytest.mark.case(11)
def test_case_11_a_host_pool_smaller_than_a_prompt(tiny_model: Path, tmp_path: Path, ref: Ref) -> None:
    with tiered_server(tiny_model, tmp_path, 4, nvme_bytes=0) as server:
        assert_equal(ask(server, LONG), LONG, ref)
        assert server.store_status().lost > 100
        server.assert_at_rest()


@pytest.mark.case(13)
def test_case_13_pins_end_while_blocks_are_copied_up(tiny_model: Path, tmp_path: Path, ref: Ref) -> None:
    """Twenty blocks take 300 ms to load, a pin lives for 100, and what others compute needs the room."""
    prompts = [prompt[:336] for prompt in LONG[:24]]
    options: dict[str, Any] = {"faults": {"load_delay_ms": 15}, "pin_us": 100_000}
    with tiered_server(tiny_model, tmp_path, 64, nvme_bytes=0, **options) as server:

        def both_ways() -> None:
            for turn in (prompts, prompts[::-1]):
                assert_equal(ask(server, turn), turn, ref)

        until(lambda: server.engine_client.stats.tiers.lost_blocks > 20, both_ways)
        assert server.store_status().expired_reads > 0
        assert server.engine_client.stats.tiers.corrupt_blocks == 0, "nothing was wrong with the store's bytes"
        server.assert_at_rest()


@pytest.mark.case(15)
def test_case_15_ten_times_the_cap(tiny_model: Path, tmp_path: Path, ref: Ref) -> None:
    """The cap is 3 MiB here, and the host pool a third of that."""
    cap, segment = 3 << 20, 256 << 10
    options: dict[str, Any] = {"nvme_bytes": cap, "segment_bytes": segment}
    eager = {"host_copy_start": 0.02, "host_copy_stop": 0.01, "host_copy_parallel": 0.9}
    sizes: list[int] = []
    with tiered_server(tiny_model, tmp_path, 32, **options, **eager) as server:

        def more() -> None:
            turn = LONG[10 * len(sizes) % 100 :][:10]
            assert_equal(ask(server, turn), turn, ref)
            sizes.append(folder_bytes(tmp_path / "nvme"))

        until(lambda: server.store_status().written_bytes > 10 * cap, more)
        status = server.store_status()
        assert max(*sizes, status.nvme_used_bytes) <= cap + segment
        assert status.write_errors == 0
        again: list[Answer] = []

        def reads_back() -> None:
            """Two prompts, of which the host pool holds one."""
            warm(server, LONG[:2], ref, at_once=1)
            server.forget_device()
            again[:] = ask(server, LONG[1::-1], concurrency=1)
            assert_equal(again, LONG[1::-1], ref)

        until(lambda: sum(answer.nvme for answer in again) > 0, reads_back)
        assert folder_bytes(tmp_path / "nvme") <= cap + segment
        server.assert_at_rest()


@pytest.mark.case(15)
def test_case_15_another_program_fills_the_disk(tiny_model: Path, tmp_path: Path, ref: Ref) -> None:
    """Nobody's request fails; the tier can be read while nothing can be written, and is written to again afterwards.

    Whoever fills the disk takes what the store gives back, too: one segment, however often it tries to write.
    """
    options = {"make_store": partial(FullDiskStore, tmp_path), "disk_retry_us": 50_000, "segment_bytes": 1 << 20}
    known, new = LONG[:20], LONG[20:30]
    with tiered_server(tiny_model, tmp_path, **options) as server:
        warm(server, known, ref)
        (tmp_path / "full").touch()
        warm(server, new[:5], ref)
        until(lambda: server.store_status().write_errors > 20)
        written = server.store_status().written
        warm(server, new[5:], ref)  # now the host pool has nothing else
        again = ask(server, known[10:])
        assert_equal(again, known[10:], ref)
        assert sum(answer.nvme for answer in again) > 0
        server.settle()
        assert server.store_status().written == written
        (tmp_path / "full").unlink()
        until(lambda: server.store_status().written > written, lambda: warm(server, LONG[40:42], ref))
        server.assert_at_rest()


@pytest.mark.case(19)
def test_case_19_quantised_kv_with_a_full_pool(tiny_model: Path, tmp_path: Path) -> None:
    form = {"kv_cache_dtype": "fp8_e5m2"}
    heads = random_prompts(6, 160, seed=19)
    prompts = [heads[number % 6] + tail for number, tail in enumerate(random_prompts(32, 30, seed=20))]
    session = Session(make_engine(tiny_model, enable_prefix_caching=False, **form))
    tokenizer = Tokenizer.from_folder(tiny_model)
    wanted = [tokenizer.decode(session.ask([prompt], max_tokens=80)[0]) for prompt in prompts]
    engine = form | {"kv_cache_bytes": SMALL_BLOCKS * BLOCK_BYTES // 4}
    with tiered_server(tiny_model, tmp_path, block_bytes=BLOCK_BYTES // 4, engine=engine) as server:
        assert server.engine_client.info.pool_tokens == SMALL_BLOCKS * 16
        assert server.engine_client.info.namespace.kv_form == "fp8_e5m2"
        for _ in range(2):
            answers = ask(server, prompts, 80, concurrency=24)
            assert [answer.text for answer in answers] == wanted
        assert server.engine_client.stats.num_preemptions > 10
        assert sum(answer.host + answer.nvme for answer in answers) > 1000
        server.assert_at_rest()


@pytest.mark.case(35)
def test_case_35_a_thousand_requests_cancelled_after_their_lookup(tiny_model: Path, tmp_path: Path, ref: Ref) -> None:
    """Prompts of three blocks and a bit, so that the device has few of them and many are looked up at once."""
    known = random_prompts(200, 50, seed=35)
    ahead = {"prefetch_requests": 48, "prefetch_share": 1.0}
    late = {"load_delay_ms": 2, "kernel_delay_ms": 1}
    with tiered_server(tiny_model, tmp_path, faults=late, num_in_flight=2, **ahead) as server:
        warm(server, known, ref, 12)
        server.forget_device()
        done, lookups = server.engine_client.stats.generation_tokens, server.engine_client.stats.tiers.lookups
        for turn in range(20):
            ask_and_leave(server, [known[(50 * turn + number) % 200] for number in range(50)])
        server.settle()
        assert server.engine_client.stats.tiers.lookups >= lookups + 400
        assert server.engine_client.stats.generation_tokens < done + 50 * 1000 / 2, "most were not cancelled"
        before = server.store_status().evicted
        warm(server, LONG[:30], ref)
        assert server.store_status().evicted > before + 30 * 29 - TIER_BLOCKS
        assert_equal(ask(server, known), known, ref)
        server.assert_at_rest()


def ask_and_leave(server: LiveServer, prompts: list[list[int]]) -> None:
    """Send 50 requests, and close their connections once the engine has looked up 20 of them: of those that the device
    lacks, which are more than 30.
    """
    before = server.engine_client.stats.tiers.lookups
    address = server.http.base_url.host, server.http.base_url.port
    with ExitStack() as connections:
        for prompt in prompts:
            connection = connections.enter_context(socket.create_connection(address))
            body = f'{{"model":"m","prompt":{prompt},"max_tokens":50,"stream":true,"ignore_eos":true}}'.encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)

        def refresh() -> None:
            server.call(server.engine_client.validate())

        until(lambda: server.engine_client.stats.tiers.lookups >= before + 20, refresh)
