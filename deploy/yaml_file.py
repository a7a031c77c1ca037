"""YAML files as operators write them: plain values, read within bounds, and what is ambiguous is refused.

Owns the reading alone; what a file may hold is config.py's and config_check.py's.

Invariants:
 1. Memory and time are bounded by MAX_FILE_BYTES and MAX_NODES, however aliases and merge keys repeat what they name.
 2. Nothing is constructed but mappings, lists, text, numbers, dates, true, false and null.
 3. A key that is written twice in one mapping, in whatever notation, of which YAML would take the last, is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tournant.workers.errors import ConfigError

MAX_FILE_BYTES = 64 << 10
MAX_NODES = 50_000  # keys and values, each as often as aliases repeat it
_MAX_NUMBER = 1 << 64
_WITHOUT_VALUE = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")  # << and =


def read_yaml(path: Path) -> Any:
    """What a file holds. Raises ConfigError, which begins with the path, when it cannot be read, is larger than
    MAX_FILE_BYTES, or is refused by `parse_yaml`.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    try:
        return parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path} {error}") from None


def parse_yaml(text: bytes | str, max_bytes: int = MAX_FILE_BYTES) -> Any:
    """What a text holds. Raises ConfigError, whose message continues "the file ..."."""
    if len(text) > max_bytes:
        raise ConfigError(f"has more than {max_bytes} bytes")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _Counter(loader).count(node)
        return loader.construct_document(node)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        if error.context == "expected a single document in the stream":
            raise ConfigError("holds several YAML documents; give each a file of its own") from None
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError("is not YAML that can be read: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}") from None
    except (AttributeError, LookupError, TypeError) as error:  # what PyYAML raises for !!timestamp x and the like
        raise ConfigError(f"is not YAML: a value does not fit its tag ({type(error).__name__})") from None


class _Loader(yaml.SafeLoader):
    """Without numbers that Python can hold, but not print."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number = int(super().construct_yaml_int(node))
        if abs(number) > _MAX_NUMBER:
            raise ConfigError(f"has a number of more than 64 bits{_line(node)}")
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


class _Counter:
    """Counts nodes as if every alias were written out, in time linear in what is written."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._counts: dict[int, int] = {}  # by id of a node
        self._open: set[int] = set()

    def count(self, node: yaml.Node) -> int:
        """Nodes of this one and all below it. Raises ConfigError beyond MAX_NODES, and as the module's head says."""
        known = self._counts.get(id(node))
        if known is not None:
            return known
        if id(node) in self._open:
            raise ConfigError(f"holds an alias of what it is part of{_line(node)}")
        self._open.add(id(node))
        total = 1
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            total += sum(self.count(key) + self.count(value) for key, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            total += sum(self.count(item) for item in node.value)
        if total > MAX_NODES:
            raise ConfigError(f"holds more than {MAX_NODES} values once its aliases are written out")
        self._open.discard(id(node))
        self._counts[id(node)] = total
        return total

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """As what they mean: 0x1 and 1 are one key, "1" is another."""
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                value = (key.value,) if key.tag in _WITHOUT_VALUE else self._loader.construct_object(key)
                if value in seen:
                    raise ConfigError(f"has the key {key.value[:80]} twice in one mapping{_line(key)}")
                seen.add(value)


def _line(node: yaml.Node) -> str:
    return f", line {node.start_mark.line + 1}" if node.start_mark is not None else ""
