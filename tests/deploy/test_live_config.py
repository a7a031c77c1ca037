"""What `user_config` may change takes effect at once; everything else is refused, and nothing has changed then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.async_test import async_test
from tests.deploy.fake_engine import FakeEngineClient, make_info
from tournant.deploy.app import Replica
from tournant.deploy.config import ServiceConfig, parse_config
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.live_config import LIVE_KEYS, with_user_config
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.errors import ConfigError, Overloaded
from tournant.workers.sampling_params import SamplingParams

ARGS = {"request_timeout_s": 60.0, "engine": {"max_queued_requests": 8, "max_num_seqs": 2}}
ALL_LIVE = {
    "request_timeout_s": 5.0,
    "log_level": "warning",
    "engine": {"max_queued_requests": 3},
    "advanced": {"weights_drain_s": 1.0, "max_queued_tokens": 100},
}


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    logger = logging.getLogger("tournant")
    level = logger.level
    yield
    logger.setLevel(level)


def faults(args: dict[str, Any], user_config: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        with_user_config(parse_config(args), user_config)
    return str(caught.value).splitlines()


def test_live_keys_lie_over_args_and_all_others_stay() -> None:
    configured = parse_config({**ARGS, "model": "x"})
    changed = with_user_config(configured, ALL_LIVE)
    assert changed.to_args() == {
        "model": "x",
        "request_timeout_s": 5.0,
        "log_level": "warning",
        "engine": {"max_queued_requests": 3, "max_num_seqs": 2},
        "advanced": {"weights_drain_s": 1.0, "max_queued_tokens": 100},
    }
    assert with_user_config(configured, {}) == configured
    given = [key for key in ALL_LIVE if not isinstance(ALL_LIVE[key], dict)]
    given += [f"{section}.{key}" for section, keys in ALL_LIVE.items() if isinstance(keys, dict) for key in keys]
    assert sorted(given) == sorted(LIVE_KEYS)


@pytest.mark.parametrize(
    ("user_config", "line"),
    [
        (
            {"engine": {"max_num_seqs": 4}},
            f"user_config.engine.max_num_seqs cannot change here while the service runs; {', '.join(LIVE_KEYS)} can. A "
            "change of args replaces the replicas one after another",
        ),
        (
            {"request_timeout": 4},
            "user_config: unknown key request_timeout; did you mean request_timeout_s?",
        ),
        (
            {"max_queued_requests": 4},
            "user_config: unknown key max_queued_requests; did you mean engine.max_queued_requests?",
        ),
        ({"request_timeout_s": -1}, "user_config.request_timeout_s is -1; it must be greater than 0"),
        (
            {"engine": {"max_queued_requests": 9}},
            "user_config.engine.max_queued_requests is 9; without a restart it can be at most 8, as in args",
        ),
        ({"engine": 3}, "user_config.engine is 3; it must be a mapping of names to values"),
        ([1], "user_config is [1]; it must be a mapping of names to values"),
    ],
)
def test_a_fault_is_one_line_that_names_what_can_change(user_config: Any, line: str) -> None:
    assert faults(ARGS, user_config) == [line]


def test_all_faults_are_told_at_once() -> None:
    lines = faults(ARGS, {"model": "y", "kv_store": {"host_bytes": 0}, "zzz": 1, "advanced": [1]})
    assert len(lines) == 4


def test_what_serve_waits_for_cannot_grow_where_it_was_told_how_long() -> None:
    direct, resilient = parse_config(ARGS), parse_config({**ARGS, "ingress": "resilient"})
    assert with_user_config(direct, {"request_timeout_s": 90}).request_timeout_s == 90
    with pytest.raises(ConfigError, match=r"user_config.request_timeout_s is 90; .* at most 60"):
        with_user_config(resilient, {"request_timeout_s": 90}, "Ingress")
    with pytest.raises(ConfigError, match=r"user_config.advanced.weights_drain_s is 31; .* at most 30"):
        with_user_config(resilient, {"advanced": {"weights_drain_s": 31}}, "Replica")


def test_a_key_that_a_deployment_has_no_use_for_is_refused_there() -> None:
    resilient = parse_config({**ARGS, "ingress": "resilient"})
    assert with_user_config(resilient, {"request_timeout_s": 9}, "Ingress").request_timeout_s == 9
    with pytest.raises(
        ConfigError, match=r"request_timeout_s cannot change here .*; log_level, advanced.weights_drain_s"
    ):
        with_user_config(resilient, {"request_timeout_s": 9}, "Replica")
    with pytest.raises(ConfigError, match="max_queued_requests cannot change here"):
        with_user_config(resilient, {"engine": {"max_queued_requests": 1}}, "Ingress")


def replica_of(tokenizer: Tokenizer, config: ServiceConfig) -> tuple[Any, list[float]]:
    """A replica as it is when Serve tells it `user_config`, and the drain times of changes it has made since."""
    methods = {name: getattr(Replica.__mro__[1], name) for name in ("reconfigure", "frontend")}
    replica: Any = type("PlainReplica", (), methods)()  # its __del__ is awaited by Serve alone
    engine = FakeEngineClient(lambda request, index: [97], make_info(max_num_seqs=2, max_queued_requests=8))
    replica._args = replica._config = config
    replica._frontend = Frontend(tokenizer, engine, FrontendOptions(config.request_timeout_s, tiers=True))
    drains: list[float] = []
    replica._make_change = drains.append
    return replica, drains


@async_test
async def test_a_replica_follows_and_goes_back(tokenizer: Tokenizer) -> None:
    replica, drains = replica_of(tokenizer, parse_config(ARGS))
    await replica.reconfigure(ALL_LIVE)
    frontend = replica.frontend
    assert frontend.options.request_timeout_s == 5.0
    assert frontend.options.tiers  # what is not live stays
    assert logging.getLogger("tournant").level == logging.WARNING
    streams = [frontend.submit([97], SamplingParams()) for _ in range(5)]  # 2 that run and 3 that wait
    with pytest.raises(Overloaded, match="of at most 5"):
        frontend.submit([97], SamplingParams())
    await replica.reconfigure({"log_level": "error"})
    streams += [frontend.submit([97], SamplingParams()) for _ in range(5)]
    with pytest.raises(Overloaded, match="of at most 10"):
        frontend.submit([97], SamplingParams())
    assert frontend.options.request_timeout_s == 60.0
    assert logging.getLogger("tournant").level == logging.ERROR
    assert drains == [1.0, 30.0]
    for stream in streams:
        stream.cancel()


@async_test
async def test_what_is_refused_changes_nothing(tokenizer: Tokenizer) -> None:
    replica, drains = replica_of(tokenizer, parse_config(ARGS))
    before = replica.frontend.options
    with pytest.raises(ConfigError, match=r"model cannot change .*; log_level"):
        await replica.reconfigure({"request_timeout_s": 5.0, "model": "y"})
    assert (replica.frontend.options, replica._config, drains) == (before, parse_config(ARGS), [])
