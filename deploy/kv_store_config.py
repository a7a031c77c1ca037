"""What an operator chooses about tiers below the device: `kv_store:`, and the keys of `advanced:` that belong to it.

Owns the names of these keys, their types, and how they become a `StorePlan` (the node store) and an `OffloadConfig` (an
engine's side); limits are those of the dataclasses, whose errors are shown with the key that the user wrote. Imports
neither Ray nor torch.

Keys of `advanced:` are the fields' names; those of NvmeConfig begin with `nvme_`, those of the store's process with
`store_`, and what both the host pool and the device pool have begins with `host_` or `device_`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tournant.cluster.node_store import DRAIN_S, StorePlan
from tournant.kvstore.config import CHUNK_BYTES, PAGE_BYTES, StoreConfig, parse_bytes, shown
from tournant.kvstore.disk_io import FolderRefused
from tournant.kvstore.errors import StoreConfigError
from tournant.kvstore.nvme_folder import locked
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.policies import make_admission, make_eviction
from tournant.workers.errors import ConfigError
from tournant.workers.offload_config import Faults, OffloadConfig

KV_STORE_KEYS = frozenset({"host_bytes", "nvme_bytes", "nvme_folder"})
FAULT_KEYS = frozenset({"faults", "allow_faults"})  # for tests
DEFAULT_SHARE, MAX_SHARE = 0.25, 0.60  # of the memory limit
NEEDS_HOST = "kv_store.nvme_bytes is set; it needs kv_store.host_bytes above 0, through which every block passes"
_NO_STORE = ("host_bytes", 0)
_SOCKET = "socket"  # stands for the store's, which is not known yet
_CONFIGS = {StoreConfig: "host_", OffloadConfig: "device_", NvmeConfig: "nvme_", StorePlan: "store_"}
_NOT_ADVANCED = KV_STORE_KEYS | FAULT_KEYS | {"store_socket", "store", "nvme"}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
    "bool": ((bool,), "true or false"),
}
Config = TypeVar("Config", StoreConfig, NvmeConfig, OffloadConfig, StorePlan)


def _names() -> dict[str, tuple[type, Field[Any]]]:
    """Every key of `advanced:` that is about tiers, with the field it sets."""
    found = [(cls, item) for cls in _CONFIGS for item in fields(cls) if item.name not in _NOT_ADVANCED]
    shared = {item.name for cls, item in found if cls is StoreConfig} & {
        item.name for cls, item in found if cls is OffloadConfig
    }
    named = {}
    for cls, item in found:
        prefixed = cls in (NvmeConfig, StorePlan) or item.name in shared
        named[f"{_CONFIGS[cls] if prefixed else ''}{item.name}"] = (cls, item)
    return named


_NAMES = _names()
KV_ADVANCED_KEYS = frozenset(_NAMES) | FAULT_KEYS


@dataclass(frozen=True)
class KVStoreConfig:
    """`kv_store:` of a ServiceConfig, checked by `read_kv_store`.

    host_bytes: RAM of the node store, which all replicas of a node share; None = 25 % of the memory limit where the
    engine runs on a GPU, and 0, no store, where it runs on the CPU, whose device pool is in RAM already; nvme_bytes:
    most bytes in nvme_folder, 0 = no NVMe tier; nvme_folder: absolute, kept between runs; advanced: values by key of
    `advanced:`.
    """

    host_bytes: int | None = None
    nvme_bytes: int = 0
    nvme_folder: str | None = None
    advanced: Mapping[str, Any] = field(default_factory=dict)

    def check_memory(self, limit_bytes: int | None = None) -> None:
        """Raises ConfigError when host_bytes is too much for this machine. limit_bytes: as in `plan`."""
        limit = memory_limit_bytes() if limit_bytes is None else limit_bytes
        if self.host_bytes is not None and self.host_bytes > MAX_SHARE * limit:
            raise ConfigError(
                f"kv_store.host_bytes is {self.host_bytes}; it must be at most {int(MAX_SHARE * limit)}, "
                f"{MAX_SHARE:.0%} of the memory limit of {limit} bytes"
            )

    def check_folder(self) -> None:
        """Make the NVMe folder, if there is none, and see that a store can use it now.

        To be called on the machine where the store will run, before anything that takes long. Raises ConfigError: no
        folder, not writable, open to others, somebody else's, or in use by another store.
        """
        if self.nvme_folder is None or not self.nvme_bytes:
            return
        path = expanded(self.nvme_folder)
        try:
            with locked(path, make=True):
                return
        except FolderRefused as error:
            raise ConfigError(f"kv_store.nvme_folder: {error}") from None
        except OSError as error:
            raise ConfigError(
                f"kv_store.nvme_folder is {str(path)!r:.300}: {error.strerror or error}; name a folder that user "
                f"{os.geteuid()} can make or has, with mode 0700"
            ) from None

    def plan(self, *, on_gpu: bool, prefix_caching: bool = True, limit_bytes: int | None = None) -> StorePlan | None:
        """The node store to run on this machine, None for none. limit_bytes: of memory, None = this machine's.

        Raises ConfigError.
        """
        limit = memory_limit_bytes() if limit_bytes is None else limit_bytes
        self.check_memory(limit)
        if self.host_bytes is not None:
            host_bytes = self.host_bytes
        else:
            host_bytes = int(DEFAULT_SHARE * limit) if on_gpu and prefix_caching else 0
        if not host_bytes:
            if self.nvme_bytes:
                raise ConfigError(NEEDS_HOST)
            return None
        return self._plan(_whole_pages(host_bytes))

    @property
    def asked_for(self) -> bool:
        """Whether a store is the user's wish, not the default."""
        return self.host_bytes is not None or bool(self.nvme_bytes)

    @property
    def drain_s(self) -> float:
        """Most seconds in which the store copies down at its end."""
        return float(self.advanced.get("store_drain_s", DRAIN_S))

    @property
    def directory_shards(self) -> int:
        """Of the directory that the stores of a cluster tell what they hold; 0: there is none."""
        return 0 if self.host_bytes == 0 else int(self.advanced.get("store_directory_shards", 1))

    def offload(self, socket: str) -> OffloadConfig:
        """An engine's side, for a store that listens at `socket`. Raises ConfigError."""
        faults = {"faults": Faults(**self.advanced["faults"])} if "faults" in self.advanced else {}
        return self._build(OffloadConfig, store_socket=socket, **faults)

    def to_plain(self) -> dict[str, Any]:
        """The keys of `kv_store:` that differ from their defaults."""
        plain = {name: getattr(self, name) for name in ("host_bytes", "nvme_bytes", "nvme_folder")}
        return {name: value for name, value in plain.items() if value not in (None, 0) or (name, value) == _NO_STORE}

    def _plan(self, host_bytes: int) -> StorePlan:
        store = self._build(StoreConfig, host_bytes=host_bytes, nvme_bytes=self.nvme_bytes)
        nvme = self._build(NvmeConfig)
        folder = None if self.nvme_folder is None else str(expanded(self.nvme_folder))
        return self._build(StorePlan, store=store, nvme_folder=folder, nvme=nvme)

    def _build(self, cls: type[Config], **given: Any) -> Config:
        chosen = {
            item.name: self.advanced[key]
            for key, (owner, item) in _NAMES.items()
            if owner is cls and key in self.advanced
        }
        try:
            made = cls(**given, **chosen)
            if isinstance(made, StoreConfig):
                make_admission(made.admission, make_eviction(made.eviction))
        except (StoreConfigError, ConfigError) as error:
            raise ConfigError(in_words_of_the_user(str(error), cls)) from None
        return made

    def check(self) -> None:
        """Raises ConfigError, one line per fault, for what is wrong on every machine."""
        faults = []
        for key in ("host_bytes", "nvme_bytes"):
            value = getattr(self, key)
            if not (value is None and key == "host_bytes") and (type(value) is not int or not 0 <= value < 1 << 60):
                faults.append(f"kv_store.{key} is {shown(value)}; it must be a size such as 4GiB, or 0")
        folder = self.nvme_folder
        if folder is not None:
            try:
                expanded(folder)
            except ConfigError as error:
                faults.append(str(error))
        if faults:
            raise ConfigError("\n".join(faults))
        if self.nvme_bytes and folder is None:
            raise ConfigError(f"kv_store.nvme_bytes is {self.nvme_bytes}; it needs kv_store.nvme_folder")
        if folder is not None and not self.nvme_bytes:
            raise ConfigError(
                f"kv_store.nvme_folder is {folder!r:.200}; say with kv_store.nvme_bytes how much it may hold"
            )
        if self.nvme_bytes and self.host_bytes == 0:
            raise ConfigError(NEEDS_HOST)
        self._plan(_whole_pages(self.host_bytes) if self.host_bytes else CHUNK_BYTES)
        self.offload(_SOCKET)


def read_kv_store(section: Any, advanced: Mapping[str, Any]) -> KVStoreConfig:
    """The configuration that `kv_store:` and these keys of `advanced:`, all known, say.

    Raises ConfigError, one line per fault; keys of `kv_store:` must be known too.
    """
    faults: list[str] = []
    values: dict[str, Any] = {}
    for key, value in section.items():
        try:
            values[key] = _size(f"kv_store.{key}", value) if key.endswith("_bytes") else value
        except ConfigError as error:
            faults.append(str(error))
    chosen = {}
    for key, value in advanced.items():
        try:
            chosen[key] = _faults(value) if key == "faults" else _typed(f"advanced.{key}", value, _annotation(key))
        except ConfigError as error:
            faults.append(str(error))
    if "faults" in advanced and advanced.get("allow_faults") is not True:
        faults.append("advanced.faults breaks the service on purpose, for tests; advanced.allow_faults must be true")
    if faults:
        raise ConfigError("\n".join(faults))
    config = KVStoreConfig(**values, advanced=chosen)
    config.check()
    return config


def tier_values(config: KVStoreConfig) -> dict[str, Any]:
    """Every key of `advanced:` that is about tiers, with the value chosen or else its default."""
    return {key: item.default for key, (_, item) in _NAMES.items()} | dict(config.advanced)


def absolute_folder(folder: str) -> str:
    """A folder as it is named on a command line, relative to the current one too. Raises ConfigError as `expanded`."""
    return str(expanded(folder if folder.startswith(("/", "~")) else str(Path(folder).absolute())))


def expanded(folder: object) -> Path:
    """The NVMe folder that a user names, absolute. Raises ConfigError when no folder can have this name here."""
    if not isinstance(folder, str) or not folder.startswith(("/", "~")):
        raise ConfigError(f"kv_store.nvme_folder is {shown(folder)}; it must be an absolute path or begin with ~")
    try:
        path = Path(folder).expanduser()
        known = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        known = False
    except RuntimeError:
        raise ConfigError(
            f"kv_store.nvme_folder is {shown(folder)}; there is no such user: write the path out"
        ) from None
    if not known:
        raise ConfigError(f"kv_store.nvme_folder is {shown(folder)}; no path has such letters, choose another")
    return path


def in_words_of_the_user(message: str, *owners: type) -> str:
    """A message of one of these dataclasses with the keys that a user writes for its fields."""
    keys = {item.name: f"advanced.{key}" for key, (owner, item) in _NAMES.items() if owner in (owners or _CONFIGS)}
    keys |= {key: f"kv_store.{key}" for key in KV_STORE_KEYS}
    pattern = rf"(?<![\w.])({'|'.join(sorted(keys, key=len, reverse=True))})(?= is |\)| [0-9])"
    return re.sub(pattern, lambda found: keys[found[1]], message)


def _annotation(key: str) -> str:
    return "bool" if key == "allow_faults" else str(_NAMES[key][1].type)


def _typed(key: str, value: Any, annotation: str) -> Any:
    """The value if it is of the kind that a field's annotation names. Raises ConfigError."""
    name, _, optional = annotation.partition(" | ")
    kinds, words = _KINDS[name]
    if name == "int" and "_bytes" in key:
        value = _size(key, value)
    if value is None and optional:
        return value
    if (isinstance(value, bool) and name != "bool") or not isinstance(value, kinds):
        raise ConfigError(f"{key} is {shown(value)}; it must be {words}")
    return value


def _whole_pages(size: int) -> int:
    """4GB is no multiple of a page: rounded down; less than a page is left to be refused."""
    return size - size % PAGE_BYTES or size


def _size(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigError(f"{key} is {shown(value)}; {error}") from None


def _faults(value: Any) -> dict[str, Any]:
    """`advanced.faults`, all of it known. Raises ConfigError."""
    known = {item.name: str(item.type) for item in fields(Faults)}
    if not isinstance(value, Mapping) or not value.keys() <= known.keys():
        raise ConfigError(f"advanced.faults is {shown(value)}; its keys can be {', '.join(known)}")
    plain = {key: _typed(f"advanced.faults.{key}", item, known[key]) for key, item in value.items()}
    try:
        Faults(**plain)
    except ConfigError as error:
        raise ConfigError(f"advanced.{error}") from None
    return plain


def memory_limit_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Most memory that this process's cgroup, or else the machine, can have."""
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    limits = [int(meminfo["MemTotal"].split()[0]) << 10]
    for path in _limit_files(proc / "self" / "cgroup", cgroups):
        try:
            text = path.read_text().strip()
        except OSError:
            continue  # not mounted here
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def _limit_files(membership: Path, cgroups: Path) -> Iterator[Path]:
    """Files that may hold a limit: of the cgroup that this process is in, and of those above it, versions 2 and 1."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield root / folder / name
