"""Every key of a configuration, as the tables of docs/configuration.md (`make docs-config` writes them).

Keys, types, defaults and limits come from the definitions themselves, limits from what a wrong value is answered with;
only the meanings are written here (those of the store's settings: in kvstore/server_flags.py). A key without a meaning
is an error, and a test compares the file with what this makes.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from tournant.deploy import kv_store_config
from tournant.deploy.access_config import AccessConfig
from tournant.deploy.config import ADVANCED_KEYS, ENGINE_KEYS, SERVICE_ADVANCED_KEYS, ServiceConfig, parse_config
from tournant.deploy.kv_store_config import KVStoreConfig
from tournant.deploy.live_config import LIVE_KEYS
from tournant.kvstore.server_flags import HELP
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
WRONG_VALUES: tuple[Any, ...] = (-1, 0, "?", "")  # which one is wrong depends on the key
NVME_ALSO = {"host_bytes": 1 << 30, "nvme_folder": "/kv", "nvme_bytes": 1 << 30}  # so that keys of the tiers are read
MEANINGS = {
    "model": "folder with config.json and safetensors, a .gguf file, or a hub id; null: SmolLM2-135M-Instruct",
    "served_model_name": "what clients call the model; null: its own name",
    "host": "address that `tournant serve` listens at; in a Serve file: http_options",
    "port": "its port; in a Serve file: http_options",
    "num_replicas": "engines that share the requests",
    "request_timeout_s": "longest life of a request",
    "max_body_bytes": "largest body of a request",
    "ingress": "way in: direct, every replica serves HTTP itself; resilient, a deployment of its own does, and answers "
    "go on in another engine when theirs is lost",
    "log_level": "of the service's own logs",
    "cache_dir": "where converted models are kept; null: the user's cache folder",
    "engine.device": "auto takes the first NVIDIA GPU where there is one",
    "engine.dtype": "of computing, and of KV unless kv_cache_dtype says otherwise; auto: bfloat16",
    "advanced.quantization": "of a .gguf file's matrices: as they are, or widened to dtype; auto: as they are where a "
    "CPU can (Q4_0, Q4_1, Q8_0)",
    "engine.max_model_len": "most tokens of prompt and answer; null: the model's limit",
    "engine.max_num_seqs": "sequences that run at once",
    "advanced.max_num_batched_tokens": "tokens computed in one step",
    "engine.max_queued_requests": "requests that may wait; more are answered with 503",
    "engine.kv_cache_bytes": "size of the device pool; null: on a CPU the lesser of 1 GiB and a quarter of the free "
    "memory, on a GPU what gpu_memory_utilization leaves",
    "engine.enable_prefix_caching": "reuse the KV of prompts that begin alike",
    "engine.deterministic": "the same tokens whatever else runs, a little slower",
    "engine.gpu_memory_utilization": "share of a GPU's memory for weights, the largest step and the pool together",
    "engine.kv_cache_dtype": "of KV on the device; auto: dtype; fp8 halves the bytes and costs accuracy "
    "(docs/kernels.md)",
    "kv_store.host_bytes": "RAM of the node's store, at most 60 % of the memory limit; 0: no store; null: 25 % of the "
    "limit with a GPU, 0 on a CPU",
    "kv_store.nvme_bytes": "most bytes in nvme_folder, several times host_bytes (docs/offload.md); 0: no disk tier",
    "kv_store.nvme_folder": "where KV lies on disk, between runs too; for one form of KV",
    "advanced.block_tokens": "tokens of a KV block; null: 16 on a CPU, 64 on a GPU",
    "advanced.num_threads": "CPU threads of an engine, or of each of its ranks; null: all cores, shared by the "
    "ranks on a machine",
    "advanced.overflow_host_bytes": "RAM of each rank for KV of running sequences that are larger than its device; 0: "
    "none (docs/beyond-the-device.md)",
    "advanced.overflow_disk_bytes": "disk of each rank for what of that does not fit there; 0: none",
    "advanced.overflow_folder": "where that file without a name lies; null: /var/tmp",
    "advanced.overflow_host_bytes_per_s": "emulated link between device and that RAM, bytes a second; 0: off",
    "advanced.overflow_disk_bytes_per_s": "emulated drive of that file, bytes a second; 0: off",
    "advanced.overflow_attention": "how that RAM is attended to: by the CPU where it lies, or copied to the device; "
    "auto: where it lies, on a GPU what takes less time",
    "advanced.weights_offload": "layers that do not fit device_bytes stream to the device from RAM (host_bytes) or "
    "disk while it computes; sizes are of each rank; null: all are on it (docs/beyond-the-device.md)",
    "advanced.sparse_attention": "{budget, min_mass}: decode steps of sequences larger than the device read this share "
    "of their blocks below it, but all when the rest may carry more than 1 - min_mass; null: all always",
    "advanced.num_in_flight": "steps given to the device before the first is booked; null: 1 on a CPU, 2 on a GPU",
    "engine.tensor_parallel_size": "ranks that share every layer, each a process, on GPUs each with its own; then "
    "kv_cache_bytes is of each",
    "engine.pipeline_parallel_size": "stages of layers, one after another, each of as many ranks",
    "advanced.weights_drain_s": "most seconds for which running requests hold up a change of weights; then those that "
    "have delivered nothing begin again on the new ones, the others end with an error",
    "advanced.max_queued_tokens": "tokens of prompts that may wait to be computed, in each way in; more are answered "
    "with 503; null: as many as all requests that may be outstanding have at 1,024 tokens each",
    "access.api_keys_file": "tenants and their keys; null: no key is needed (docs/operations.md)",
    "access.public_metrics": "/metrics needs no key where the rest does",
    "access.admin_host": "address of admin_port",
    "access.admin_port": "where the routes of operators are served, on every node of the way in; 0: any free port; "
    "null: beside the API, for clients on the same machine",
    "access.admin_key_file": "the key that operators need at admin_port; null: none, but only on the same machine",
    "advanced.credit_blocks": "slots that the store lends an engine for blocks on their way down; null: a 32nd of "
    "the host pool, but 16 to 256, and at most half of what is left of the quarter that all engines may have",
    "advanced.device_copy_start": "pressure on the device pool from which every block is copied down",
    "advanced.device_copy_parallel": "pressure from which device_num_copiers threads copy down",
    "advanced.device_copy_stop": "pressure at which that stops",
    "advanced.device_num_copiers": "threads that copy down above device_copy_parallel",
    "advanced.publish_share": "share of a step's time that copying down may take below device_copy_start",
    "advanced.restore": "load a prefix from below, or compute it again: auto takes what is estimated to be faster",
    "advanced.lookup_ms": "longest wait of a request for the store's answer what it has",
    "advanced.restore_ms": "longest wait of a request for its blocks; the rest is computed then",
    "advanced.prefetch_requests": "waiting requests whose prefix is looked up and brought from disk into RAM",
    "advanced.prefetch_share": "most of the host pool that these may want at once",
    "advanced.lower_kv_dtype": "of KV in RAM and on disk; same: as on the device",
    "advanced.lower_kv_dtype_from": "only for blocks that begin at this token or later; above 0 there are two sizes of "
    "slots (docs/offload.md)",
    "advanced.host_bytes_per_s": "emulated link between device and RAM, bytes a second in each direction; 0: off",
    "advanced.store_directory_shards": "processes that share what all node stores of a cluster say they hold; 0: none",
    "advanced.store_drain_s": "most seconds in which the store writes to disk, at its end, what is only in RAM",
    "advanced.store_idle_exit_s": "seconds without an engine after which a cluster node's store ends",
}  # fmt: skip
_WORDS = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}


def tables() -> str:
    """All tables as Markdown. Raises KeyError for a key without a meaning."""
    return "\n\n".join(
        f"## {title}\n\n| key | type | default | limits | live | meaning |\n|---|---|---|---|---|---|\n"
        + "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
        for title, rows in (
            ("The service", _service_rows("")),
            ("engine:", _engine_rows("engine", ENGINE_KEYS)),
            ("kv_store:", _kv_store_rows()),
            ("access:", _model_rows("access.", AccessConfig.model_fields)),
            ("advanced:, of the service", _service_rows("advanced.")),
            ("advanced:, of the engine", _engine_rows("advanced", ADVANCED_KEYS)),
            ("advanced:, of the tiers", _tier_rows()),
        )
    )


Row = tuple[str, str, str, str, str, str]


def _service_rows(section: str) -> Iterator[Row]:
    of_section = {
        key: info
        for key, info in ServiceConfig.model_fields.items()
        if key not in ("engine", "kv_store", "access") and (key in SERVICE_ADVANCED_KEYS) == bool(section)
    }
    yield from _model_rows(section, of_section)


def _model_rows(section: str, fields_of_model: Mapping[str, FieldInfo]) -> Iterator[Row]:
    for key, info in fields_of_model.items():
        kind = next(
            kind for kind in (info.annotation, *get_args(info.annotation)) if not isinstance(kind, types.UnionType)
        )
        name = "str" if get_origin(kind) is Literal else kind.__name__
        yield _row(section + key, name, info.default, _limits_of(key, info, kind))


def _limits_of(name: str, info: FieldInfo, kind: Any) -> str:
    """What pydantic checks of a field of this name."""
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    bounds = [(words, getattr(item, kind)) for item in info.metadata for kind, words in _BOUNDS if hasattr(item, kind)]
    return " ".join(words.format(_plain(name, bound)) for words, bound in bounds)


_BOUNDS = (
    ("gt", "above {}"),
    ("ge", "{}"),
    ("le", "to {}"),
    ("min_length", "{}"),
    ("max_length", "to {} characters"),
)


def _engine_rows(section: str, keys: frozenset[str]) -> Iterator[Row]:
    for item in fields(EngineConfig):
        if item.name in keys:
            key = f"{section}.{item.name}"
            yield _row(key, str(item.type), item.default, _refusal({}, key))


def _kv_store_rows() -> Iterator[Row]:
    for item in fields(KVStoreConfig):
        if item.name != "advanced":
            key = f"kv_store.{item.name}"
            yield _row(key, str(item.type), item.default, _refusal(NVME_ALSO, key))


def _tier_rows() -> Iterator[Row]:
    for name, (_, item) in kv_store_config._NAMES.items():
        key = f"advanced.{name}"
        yield _row(key, str(item.type), item.default, _refusal(NVME_ALSO, key), HELP.get(item.name, ""))


def _row(key: str, annotation: str, default: Any, limits: str, meaning: str = "") -> Row:
    meaning = MEANINGS.get(key, meaning)
    if not meaning:
        raise KeyError(f"{key} has no meaning; add one to MEANINGS in deploy/config_table.py, then `make docs-config`")
    name = key.rpartition(".")[2]
    kind = annotation.partition(" | ")[0]
    words = "size" if kind == "int" and name.endswith("_bytes") else _WORDS.get(kind, "mapping")
    if words == "size":
        limits = re.sub(r"\d+", lambda found: _plain(name, int(found[0])), limits)
    live = "yes" if key in LIVE_KEYS else ""
    return name, words, _plain(name, default), "" if limits == words else limits, live, meaning


def _plain(name: str, value: Any) -> str:
    """A value as YAML has it; sizes with their unit."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if name.endswith("_bytes") and value:
        power = max(power for power in range(len(_UNITS)) if value % (1 << 10 * power) == 0)
        return f"{value >> 10 * power}{_UNITS[power]}"
    return f"{value:g}" if isinstance(value, float) else str(value)


_UNITS = ("", "KiB", "MiB", "GiB", "TiB")


def _refusal(kv_store: Mapping[str, Any], key: str) -> str:
    """What a wrong value of the key is told that it must be, "" where nothing is refused."""
    section, name = key.split(".")
    for value in WRONG_VALUES:
        sections: dict[str, dict[str, Any]] = {"kv_store": dict(kv_store)}
        sections.setdefault(section, {})[name] = value
        try:
            parse_config(sections)
        except ConfigError as error:
            said = [line for line in str(error).splitlines() if re.search(rf"\b{name} (is )?", line)]
            found = re.search(r"; (?:it|they) must (?:be )?(.+)", said[0]) if said else None
            if found is not None and found[1] not in _WRONG_KINDS:
                return re.sub(r"^(?:one of|a(?: whole)? number(?: from)?|have|rise from) ", "", found[1])
    return ""


_WRONG_KINDS = ("a whole number", "a number", "text")  # told before limits are looked at


def main(argv: Sequence[str]) -> int:
    """Print the tables, or put them into a file between its marks."""
    if not argv:
        print(tables())
        return 0
    if argv[0] != "--write" or len(argv) != 2:
        print("usage: python -m tournant.deploy.config_table [--write FILE]", file=sys.stderr)
        return 2
    path = Path(argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def with_tables(text: str) -> str:
    """A document with what stands between its marks made anew. Raises ValueError without them."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the document lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
