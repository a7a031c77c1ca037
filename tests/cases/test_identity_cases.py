"""Cases about whose KV a block is: weights that change under one name, models of one shape, tenants."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cases.conftest import random_prompts
from tests.cases.test_tier_cases import NUM_TOKENS, Answer, tiered_server
from tests.deploy.keys import write_secret
from tests.helpers.live_server import M_TOKEN_BYTES, LiveServer
from tests.helpers.tiny_model import build_tiny_model
from tests.workers.harness import Session, make_engine
from tests.workers.test_engine_process import run
from tests.workers.tiered_engine import node_store, tiered
from tournant.cluster.weights_rollout import Weights
from tournant.deploy.config import parse_config
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.generation import CachedTokens
from tournant.deploy.startup import start_engine_swap
from tournant.deploy.weights_loop import Change, weights_change
from tournant.workers.model_files import resolve_model
from tournant.workers.sampling_params import SamplingParams

LONG = random_prompts(4, 100, seed=21)
WHOLE = 96  # tokens of each that are whole blocks
BODY = {"model": "m", "prompt": LONG[0], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
KEY_OF = {tenant: f"the-key-of-tenant-{tenant}" for tenant in "abcd"}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of M's shape, with other weights."""
    return build_tiny_model(tmp_path_factory.mktemp("twin"), seed=1)


def answers_alone(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """REF of a model."""
    session = Session(make_engine(model, enable_prefix_caching=False))
    return [session.ask([prompt], max_tokens=NUM_TOKENS)[0] for prompt in prompts]


class Served:
    """A frontend over an engine whose weights can be changed, as a replica has them."""

    def __init__(self, frontend: Frontend, change: Change) -> None:
        self.frontend = frontend
        self.change = change

    async def ask(self) -> tuple[list[list[int]], list[CachedTokens | None]]:
        """Answers to LONG, and where their cached tokens lay."""
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        found = [await self.frontend.generate(prompt, params) for prompt in LONG]
        return [one.answers[0].token_ids for one in found], [one.usage.cached_by_tier for one in found]

    async def forget_device(self) -> None:
        """Everything is below, and nothing on the device."""
        engine: Any = self.frontend.engine
        while engine.stats.kv_used or engine.stats.tiers.dirty_blocks:
            assert await engine.engine.validate() == ""
        assert await self.frontend.reset_prefix_cache()


async def serve(folder: Path, socket: str, act: Callable[[Served], Any]) -> None:
    args = {
        "model": str(folder),
        "kv_store": {"host_bytes": 1 << 20},
        "engine": {
            "device": "cpu",
            "dtype": "float32",
            "deterministic": True,
            "kv_cache_bytes": 64 * 16 * M_TOKEN_BYTES,
        },
        "advanced": {"num_threads": 1, "restore": "always", "restore_ms": 60_000, "lookup_ms": 10_000},
    }
    tokenizer, engine = await start_engine_swap(parse_config(args), str(folder), lambda: socket)
    try:
        frontend = Frontend(tokenizer, engine, FrontendOptions(tiers=True))
        await act(Served(frontend, weights_change(frontend, engine, partial(resolve_model, dtype="float32"), 5.0)))
    finally:
        await engine.close()


def put(weights: Path, folder: Path) -> None:
    """Other bytes under the same name."""
    shutil.copy(weights / "model.safetensors", folder / "new")
    os.replace(folder / "new", folder / "model.safetensors")


@pytest.mark.case(21)
def test_case_21_other_weights_under_the_same_name(tiny_model: Path, twin: Path, tmp_path: Path) -> None:
    """A file is replaced and the weights updated: nothing of the old ones is used, and all of it once they are back."""
    old, new = answers_alone(tiny_model, LONG), answers_alone(twin, LONG)
    assert all(a != b for a, b in zip(old, new, strict=True))
    nothing, all_from = [CachedTokens(0, 0, 0)] * len(LONG), lambda **tier: [CachedTokens(**tier)] * len(LONG)
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)

    async def scenario(served: Served) -> None:
        assert await served.ask() == (old, nothing)
        assert await served.ask() == (old, all_from(device=WHOLE, host=0, nvme=0))
        put(twin, folder)
        await served.change(Weights(1, str(folder), "the new file"))
        assert await served.ask() == (new, nothing)
        assert served.frontend.served_weights.epoch == 1
        await served.forget_device()
        assert await served.ask() == (new, all_from(device=0, host=WHOLE, nvme=0))
        put(tiny_model, folder)
        await served.change(Weights(2, str(folder), "the old file"))
        assert await served.ask() == (old, all_from(device=0, host=WHOLE, nvme=0))

    with node_store(tmp_path, nvme=False) as store:
        run(lambda: serve(folder, str(store.socket), scenario))


@pytest.mark.case(23)
def test_case_23_two_models_of_one_shape_share_a_store(tiny_model: Path, twin: Path, tmp_path: Path) -> None:
    models = (tiny_model, twin)
    with node_store(tmp_path, nvme=False) as store:
        sessions = [tiered(model, store.socket) for model in models]
        for session, model in zip(sessions, models, strict=True):
            session.attach()
            assert session.ask_window(LONG, max_tokens=NUM_TOKENS) == answers_alone(model, LONG)
            tiers = session.engine.stats().tiers
            assert (tiers.lookups, tiers.host_hit_tokens) == (len(LONG), 0)
            session.forget_device()
        for session, model in zip(sessions, models, strict=True):
            assert session.ask_window(LONG, max_tokens=NUM_TOKENS) == answers_alone(model, LONG)
            assert session.engine.stats().tiers.host_hit_tokens == len(LONG) * WHOLE
            session.close()


def as_salt(tenant: str) -> dict[str, Any]:
    """A request of a tenant that is the salt it comes with."""
    return {"json": BODY | {"cache_salt": tenant}}


def as_key(tenant: str) -> dict[str, Any]:
    """A request of a tenant whose key it comes with."""
    return {"json": BODY, "headers": {"authorization": f"Bearer {KEY_OF[tenant]}"}}


@pytest.mark.case(23)
@pytest.mark.parametrize("request_of", [as_salt, as_key])
def test_case_23_two_tenants_share_a_store(
    tiny_model: Path, tmp_path: Path, request_of: Callable[[str], dict[str, Any]]
) -> None:
    access = {}
    if request_of is as_key:
        listed = [{"name": name, "keys": [key]} for name, key in KEY_OF.items()]
        access = {"api_keys_file": str(write_secret(tmp_path / "keys", {"tenants": listed}))}
    with tiered_server(tiny_model, tmp_path, nvme_bytes=0, access=access) as server:
        ask_as = partial(answer_to, server, request_of)
        first = ask_as("a")
        assert ask_as("b").text == first.text
        assert (first.device, first.host) == (0, 0)
        assert ask_as("c").device == 0
        assert ask_as("a").device == WHOLE
        server.forget_device()
        assert [(ask_as(tenant).host, ask_as(tenant).device) for tenant in "dba"] == [
            (0, WHOLE),
            (WHOLE, WHOLE),
            (WHOLE, WHOLE),
        ]
        server.assert_at_rest()


def answer_to(server: LiveServer, request_of: Callable[[str], dict[str, Any]], tenant: str) -> Answer:
    reply = server.http.post("/v1/completions", **request_of(tenant))
    assert reply.status_code == 200, reply.text
    found = reply.json()
    tiers = found["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return Answer(found["choices"][0]["text"], **tiers)
