"""What an operator says about tiers: limits, names, and what becomes of it for the store and for the engine."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tournant.deploy.config import ADVANCED_KEYS, ENGINE_KEYS, parse_config
from tournant.deploy.kv_store_config import KV_ADVANCED_KEYS, KV_STORE_KEYS, KVStoreConfig, memory_limit_bytes
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.nvme_folder import locked
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.workers.errors import ConfigError
from tournant.workers.offload_config import Faults, OffloadConfig

GIB = 1 << 30
BOTH = {"host_bytes": "1GiB", "nvme_bytes": "4GiB", "nvme_folder": "/nvme"}


def kv_store(**sections: Any) -> KVStoreConfig:
    return parse_config(sections).kv_store


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"kv_store": {"host_byte": 1}}, "unknown key kv_store.host_byte; did you mean kv_store.host_bytes?"),
        ({"host_bytes": 1}, "unknown key host_bytes; did you mean kv_store.host_bytes?"),
        ({"kv_store": {"restore": 1}}, "unknown key kv_store.restore; did you mean advanced.restore?"),
        ({"advanced": {"evicton": "lru"}}, "unknown key advanced.evicton; did you mean advanced.eviction?"),
        ({"kv_store": [1]}, "kv_store is [1]; it must be a mapping of names to values"),
        ({"kv_store": {"host_bytes": "4 gigs"}}, "kv_store.host_bytes is '4 gigs'; write 1073741824, 512MiB or 1.5GiB"),
        ({"kv_store": {"host_bytes": True}}, "kv_store.host_bytes is True; it must be a size such as 4GiB, or 0"),
        ({"kv_store": {"host_bytes": -1}}, "kv_store.host_bytes is -1; it must be a size such as 4GiB, or 0"),
        (
            {"kv_store": {"host_bytes": 7}},
            "kv_store.host_bytes is 7; it must be 4096 to 17592186044416",
        ),
        ({"kv_store": {**BOTH, "nvme_folder": "nvme"}}, "must be an absolute path or begin with ~"),
        (
            {"kv_store": {"host_bytes": "1GiB", "nvme_bytes": "4GiB"}},
            f"kv_store.nvme_bytes is {4 * GIB}; it needs kv_store.nvme_folder",
        ),
        (
            {"kv_store": {"host_bytes": "1GiB", "nvme_folder": "/nvme"}},
            "kv_store.nvme_folder is '/nvme'; say with kv_store.nvme_bytes how much it may hold",
        ),
        ({"kv_store": {**BOTH, "host_bytes": 0}}, "kv_store.nvme_bytes is set; it needs kv_store.host_bytes above 0"),
        (
            {"kv_store": {"nvme_bytes": "4GiB", "nvme_folder": "/nvme"}, "engine": {"device": "cpu"}},
            "kv_store.nvme_bytes is set; it needs kv_store.host_bytes above 0",
        ),
        (
            {"kv_store": {**BOTH, "nvme_bytes": "1MiB"}},
            f"kv_store.nvme_bytes is {1 << 20}; it must be 0 or at least two segments of {64 << 20} bytes",
        ),
        (
            {"kv_store": BOTH, "engine": {"enable_prefix_caching": False}},
            f"kv_store.host_bytes is {GIB}, but engine.enable_prefix_caching is false",
        ),
        ({"advanced": {"pin_us": "1s"}}, "advanced.pin_us is '1s'; it must be a whole number"),
        ({"advanced": {"pin_us": 0}}, "advanced.pin_us is 0; it must be 1 to 86400000000"),
        ({"advanced": {"nvme_persist": 1}}, "advanced.nvme_persist is 1; it must be true or false"),
        ({"advanced": {"nvme_codec": "zip"}}, "advanced.nvme_codec is 'zip'; it must be one of "),
        ({"advanced": {"eviction": "lur"}}, "advanced.eviction is 'lur'; it must be one of lru, lfu"),
        ({"advanced": {"restore": "maybe"}}, "advanced.restore is 'maybe'; it must be one of auto, always, never"),
        (
            {"advanced": {"device_copy_start": 0.2}},
            "advanced.device_copy_stop is 0.5, advanced.device_copy_start 0.2, advanced.device_copy_parallel 0.9; ",
        ),
        ({"advanced": {"host_num_copiers": 0}}, "advanced.host_num_copiers is 0; it must be 1 to 1024"),
        ({"advanced": {"device_num_copiers": 0}}, "advanced.device_num_copiers is 0; it must be a whole number from"),
        ({"advanced": {"pin_us": 10**30}}, f"advanced.pin_us is {10**30}; it must be 1 to 86400000000"),
        ({"advanced": {"pin_us": 1 << 50_000}}, "advanced.pin_us is a number of 50001 bits; it must be 1 to"),
        ({"advanced": {"chunk_bytes": -4096}}, "advanced.chunk_bytes is -4096; it must be 0 to"),
        ({"advanced": {"host_copy_start": float("nan")}}, "advanced.host_copy_start is nan; it must be above 0 and at"),
        ({"advanced": {"nvme_kv_form": "a\0b"}}, "advanced.nvme_kv_form is 'a\\x00b'; it must be a name of 1 to 32"),
        ({"advanced": {"nvme_kv_form": "\ud800"}}, "advanced.nvme_kv_form is '\\ud800'; it must be a name of 1 to 32"),
        (
            {"kv_store": {**BOTH, "nvme_folder": "/a\0b"}},
            "kv_store.nvme_folder is '/a\\x00b'; no path has such letters",
        ),
        (
            {"kv_store": {**BOTH, "nvme_folder": "/\ud800"}},
            "kv_store.nvme_folder is '/\\ud800'; no path has such letters",
        ),
        (
            {"kv_store": {**BOTH, "nvme_folder": "~nobody-here/kv"}},
            "kv_store.nvme_folder is '~nobody-here/kv'; there is no such user: write the path out",
        ),
        ({"kv_store": {"host_bytes": 1 << 50_000}}, "kv_store.host_bytes is a number of 50001 bits; it must be a size"),
        ({"advanced": {"prefetch_blocks": 5, "max_keys": 4}}, "advanced.prefetch_blocks is 5; it must be 0 to 4"),
        ({"advanced": {"store_drain_s": -1}}, "advanced.store_drain_s is -1; it must be 0 to 86400 seconds"),
        ({"advanced": {"host_bytes_per_s": "fast"}}, "advanced.host_bytes_per_s is 'fast'; write"),
    ],
)
def test_a_fault_is_one_line_in_words_of_the_user(data: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    (told,) = str(caught.value).splitlines()
    assert line in told
    assert told.startswith(line[:10]) or line.startswith("must")


def test_every_field_has_one_key_that_is_like_no_other() -> None:
    named = len(KV_ADVANCED_KEYS) - 2  # the keys of faults
    hidden = 2 + 2  # host_bytes, nvme_bytes; store_socket, faults
    of_process = 3  # store_drain_s, store_idle_exit_s, store_directory_shards
    assert named == sum(len(fields(cls)) for cls in (StoreConfig, NvmeConfig, OffloadConfig)) - hidden + of_process
    assert not KV_ADVANCED_KEYS & (ADVANCED_KEYS | ENGINE_KEYS | KV_STORE_KEYS)
    assert {"host_copy_start", "device_copy_start", "nvme_order", "eviction", "restore"} <= KV_ADVANCED_KEYS
    assert not {"copy_start", "order"} & KV_ADVANCED_KEYS


def test_values_reach_the_store_and_the_engine() -> None:
    advanced = {
        "host_copy_start": 0.6,
        "device_copy_start": 0.8,
        "nvme_order": "fcfs",
        "segment_bytes": "32MiB",
        "host_bytes_per_s": "500MB",
        "credit_blocks": None,
        "store_drain_s": 3,
    }
    config = kv_store(kv_store=BOTH, advanced=advanced)
    plan = config.plan(on_gpu=False, limit_bytes=8 * GIB)
    assert plan is not None
    assert plan.store == StoreConfig(GIB, nvme_bytes=4 * GIB, copy_start=0.6, segment_bytes=32 << 20)
    assert (plan.nvme, plan.nvme_folder, plan.drain_s) == (NvmeConfig(order="fcfs"), "/nvme", 3)
    assert config.drain_s == 3
    assert config.offload("/s") == OffloadConfig("/s", copy_start=0.8, host_bytes_per_s=500_000_000)


@pytest.mark.parametrize(
    ("chosen", "on_gpu", "caching", "host_bytes"),
    [
        ({}, True, True, 2 * GIB),
        ({}, False, True, None),
        ({}, True, False, None),
        ({"host_bytes": 0}, True, True, None),
        ({"host_bytes": "1GB"}, False, True, 10**9 // 4096 * 4096),
        ({"host_bytes": "1GiB"}, True, True, GIB),
    ],
)
def test_the_pool_in_ram_is_a_quarter_of_memory_beside_a_gpu_and_none_on_a_cpu(
    chosen: dict[str, Any], on_gpu: bool, caching: bool, host_bytes: int | None
) -> None:
    plan = kv_store(kv_store=chosen).plan(on_gpu=on_gpu, prefix_caching=caching, limit_bytes=8 * GIB)
    assert (None if plan is None else plan.store.host_bytes) == host_bytes


def test_more_than_sixty_percent_of_memory_is_refused() -> None:
    config = kv_store(kv_store={"host_bytes": "6GiB"})
    assert config.plan(on_gpu=False, limit_bytes=10 * GIB) is not None
    with pytest.raises(ConfigError, match=r"it must be at most \d+, 60% of the memory limit"):
        config.plan(on_gpu=False, limit_bytes=10 * GIB - 100)


def test_an_nvme_tier_without_ram_is_refused_where_the_device_turns_out_to_be_a_cpu() -> None:
    config = kv_store(kv_store={"nvme_bytes": "4GiB", "nvme_folder": "/nvme"})
    assert config.plan(on_gpu=True, limit_bytes=8 * GIB) is not None
    with pytest.raises(ConfigError, match=r"it needs kv_store\.host_bytes above 0"):
        config.plan(on_gpu=False, limit_bytes=8 * GIB)


def at(folder: Path) -> KVStoreConfig:
    return kv_store(kv_store={**BOTH, "nvme_folder": str(folder)})


def test_a_folder_that_a_store_can_use_is_made_and_left_free(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "nvme"
    at(folder).check_folder()
    at(folder).check_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    used = rf"^kv_store.nvme_folder: {folder} is used by another process"
    with locked(folder), pytest.raises(ConfigError, match=used):
        at(folder).check_folder()
    kv_store(kv_store={"host_bytes": "1GiB"}).check_folder()


def test_a_folder_that_no_store_can_use_is_found_before_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    for folder, words in (
        (tmp_path / "file", "is a link or no folder"),
        (tmp_path / "file" / "below", "is a link or no folder"),
        (open_to_all, "has mode 0755 and owner"),
        (Path("/proc/1/nvme"), r"^kv_store.nvme_folder is '/proc/1/nvme': .*; name a folder that user \d+ can make"),
        (tmp_path / ("x" * 300), "File name too long; name a folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            at(folder).check_folder()
    monkeypatch.setattr("os.access", lambda *_, **__: False)  # root may write to every folder
    with pytest.raises(ConfigError, match="cannot be written to; name a folder on a disk that can"):
        at(tmp_path / "mine").check_folder()


def test_faults_are_for_tests_and_must_be_allowed() -> None:
    faults = {"save_delay_ms": 2, "flip_every_load": 3}
    for wrong, message in (
        ({"faults": faults}, r"advanced\.allow_faults must be true"),
        ({"faults": faults, "allow_faults": False}, r"advanced\.allow_faults must be true"),
        ({"faults": {"save_delay": 2}, "allow_faults": True}, "its keys can be kernel_delay_ms, save_delay_ms"),
        ({"faults": {"save_delay_ms": -2}, "allow_faults": True}, r"^advanced\.faults\.save_delay_ms is -2"),
        ({"faults": {"flip_every_load": 0.5}, "allow_faults": True}, r"flip_every_load is 0.5; it must be a whole"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config({"advanced": wrong})
    config = parse_config({"advanced": {"faults": faults, "allow_faults": True}})
    assert parse_config(config.to_args()) == config
    assert config.kv_store.offload("/s").faults == Faults(save_delay_ms=2, flip_every_load=3)
    assert kv_store().offload("/s").faults == Faults()


def test_the_memory_limit_is_the_least_of_machine_and_cgroups(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       8388608 kB\nMemFree: 1 kB\n")
    assert memory_limit_bytes(proc, cgroups) == 8 * GIB
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    (cgroups / "a" / "b").mkdir(parents=True)
    (cgroups / "a" / "b" / "memory.max").write_text("max\n")
    (cgroups / "a" / "memory.max").write_text(f"{3 * GIB}\n")
    assert memory_limit_bytes(proc, cgroups) == 3 * GIB
    (proc / "self" / "cgroup").write_text("4:cpu:/c\n5:memory,x:/c\n")
    (cgroups / "memory" / "c").mkdir(parents=True)
    (cgroups / "memory" / "c" / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (cgroups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit_bytes(proc, cgroups) == 2 * GIB
