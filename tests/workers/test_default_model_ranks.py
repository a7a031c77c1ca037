"""The default model over three ranks: 9 heads and 3 KV heads are what tensor parallel 3 divides and 2 does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.workers.harness import Session
from tests.workers.launch_harness import config_of
from tests.workers.parallel_harness import LEAST_GAP
from tests.workers.test_engine_process import Answer
from tests.workers.tiered_engine import BLOCK_TOKENS, Store, node_store
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import ProcessEngineClient
from tournant.workers.engine_process import build_engine
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.families import describe
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.rank_launch import LocalRanks

TEXT = (
    "Water boils at a lower temperature on a high mountain than at the sea, because the pressure of the air is lower "
    "there. Iron rusts when it is wet. The three states of matter are solid,"
)
NUM_NEW = 6
POOL_BLOCKS = 24
KV_HEADS, HEAD_BYTES = 3, BLOCK_TOKENS * 30 * 2 * 64 * 4  # of a block: layers, K and V, head size, fp32
CONFIG = {"quantization": "dequantize", "deterministic": True, "device": "cpu"}


def answer_of_one_process(files: ModelFiles, prompt: list[int]) -> list[int]:
    """Far from answering anything else: see `without_near_ties`."""
    config = EngineConfig(dtype="float32", num_threads=1, kv_cache_bytes=POOL_BLOCKS * KV_HEADS * HEAD_BYTES, **CONFIG)  # type: ignore[arg-type]
    session = Session(build_engine(config, describe(files, config), 1)[0])
    request = session.submit(prompt, max_tokens=NUM_NEW, logprobs=2)
    session.drain()
    tops = [item.top for output in session.outputs[request] for item in output.logprobs or []]
    assert len(tops) == NUM_NEW
    assert min(best - second for (_, best), (_, second) in tops) > LEAST_GAP
    return session.tokens(request)


async def asked(client: ProcessEngineClient, prompt: list[int]) -> tuple[list[int], tuple[int, ...]]:
    """Its answer, and tokens that came from device, host, NVMe."""
    answer = Answer(client, prompt, max_tokens=NUM_NEW)
    await answer.done.wait()
    return answer.tokens, tuple(answer.outputs[0].cached_by_tier or ())


async def forgotten(client: ProcessEngineClient) -> None:
    """Until everything is below and nothing on the device."""
    while client.stats.kv_used or client.stats.tiers.dirty_blocks:
        assert await client.validate() == ""
        await asyncio.sleep(0.01)
    assert await client.reset_prefix_cache()


async def scenario(files: ModelFiles, prompt: list[int], wanted: list[int], store: Store) -> None:
    whole = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    config = config_of(3, 1, kv_cache_bytes=POOL_BLOCKS * HEAD_BYTES, **CONFIG)
    lower = OffloadConfig(str(store.socket), restore="always", lookup_ms=10_000, restore_ms=60_000)
    client = await ProcessEngineClient.start(config, files, offload=lower, launcher=LocalRanks())
    try:
        assert client.info.pool_tokens == POOL_BLOCKS * BLOCK_TOKENS
        assert await asked(client, prompt) == (wanted, (0, 0, 0))
        await forgotten(client)
        assert await asked(client, prompt) == (wanted, (0, whole, 0))
        store.process.kill()
        while client.stats.tiers.attached:
            assert await client.validate() == ""
            await asyncio.sleep(0.01)
        assert await client.reset_prefix_cache()
        assert await asked(client, prompt) == (wanted, (0, 0, 0)), "without a store"
    finally:
        await client.close()


@pytest.mark.timeout(300)
def test_three_ranks_answer_like_one_process_from_host_and_without_a_store(tmp_path: Path) -> None:
    files = resolve_model(None, "float32")
    prompt = Tokenizer.from_folder(files.folder).encode(TEXT)
    assert len(prompt) > 2 * BLOCK_TOKENS
    wanted = answer_of_one_process(files, prompt)
    with node_store(tmp_path, nvme=False, host_bytes=POOL_BLOCKS * KV_HEADS * HEAD_BYTES) as store:
        asyncio.run(scenario(files, prompt, wanted, store))
