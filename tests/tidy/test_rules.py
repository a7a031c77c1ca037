"""The repository keeps the rules of rules.py, and each rule can fail."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.tidy import rules
from tests.tidy.rules import FOLDERS, Module, read_modules

REPO = Path(__file__).resolve().parents[2]

ModuleRule = Callable[[Module], list[str]]


@cache
def modules(*folders: str) -> list[Module]:
    return read_modules(REPO, folders)


@cache
def tracked_texts() -> dict[str, str]:
    """Text of every file that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True, check=True
    )
    texts = {}
    for path in listed.stdout.splitlines():
        data = (REPO / path).read_bytes() if (REPO / path).is_file() else b"\0"
        if b"\0" not in data:
            texts[path] = data.decode("utf-8", "replace")
    return texts


def expect_none(findings: Iterable[str]) -> None:
    """Fail with all findings, one a line."""
    if text := "\n".join(findings):
        pytest.fail(text, pytrace=False)


@pytest.mark.parametrize(
    "rule",
    [rules.import_layers, rules.lazy_imports, rules.environment],
    ids=lambda rule: rule.__name__,
)
def test_folders(rule: ModuleRule) -> None:
    expect_none(line for module in modules(*FOLDERS) for line in rule(module))


def test_sizes() -> None:
    expect_none(line for module in modules(*FOLDERS, "benchmarks", "tests/helpers") for line in rules.sizes(module))


@pytest.mark.parametrize("rule", [rules.bare_folder_imports, rules.unexplained_todos], ids=lambda rule: rule.__name__)
def test_all_code(rule: ModuleRule) -> None:
    everything = modules(*FOLDERS, "benchmarks", "examples", "tests")
    expect_none(line for module in everything for line in rule(module))


def test_no_import_cycle() -> None:
    expect_none(rules.import_cycles(modules(*FOLDERS)))


def test_no_dead_module() -> None:
    mentions = "\n".join(
        text for path, text in tracked_texts().items() if path.endswith((".toml", ".yaml", "Makefile"))
    )
    users = modules("tests", "benchmarks", "examples")
    expect_none(rules.dead_modules(modules(*FOLDERS), users, mentions))


def test_no_foreign_places() -> None:
    texts = {path: text for path, text in tracked_texts().items() if not path.startswith("tests/tidy/")}
    expect_none(line for path, text in texts.items() for line in rules.foreign_places(path, text))


def test_readme_begins_with_the_two_commands() -> None:
    head = (REPO / "README.md").read_text(encoding="utf-8").splitlines()[:25]
    assert any("make serve" in line for line in head)
    assert any("make test" in line for line in head)


BAD: list[tuple[ModuleRule, str, str]] = [
    (rules.import_layers, "kernels/a.py", "import tournant.kvstore.block"),
    (rules.import_layers, "kvstore/a.py", "from tournant.kernels import layout"),
    (rules.import_layers, "kvstore/policies/a.py", "from ...workers import scheduler"),
    (rules.import_layers, "workers/a.py", "from tournant.deploy.cli import main"),
    (rules.import_layers, "workers/a.py", "from tournant import cluster"),
    (rules.import_layers, "workers/a.py", "def f():\n    import ray.serve"),
    (rules.import_layers, "kvstore/a.py", "import torch"),
    (rules.import_layers, "kvstore/a.py", "from transformers import AutoConfig"),
    (rules.import_layers, "workers/a.py", "import triton.language as tl"),
    (rules.bare_folder_imports, "tests/a.py", "from kernels.layout import KVLayout"),
    (rules.bare_folder_imports, "workers/a.py", "import kvstore"),
    (rules.sizes, "workers/a.py", "\n" * 501),
    (rules.sizes, "workers/a.py", "class A:\n    async def f(self):\n" + "        pass\n" * 70),
    (rules.lazy_imports, "workers/a.py", "class A:\n    def f(self):\n        if self:\n            import json"),
    (rules.environment, "workers/a.py", "import os\nos.environ['A'] = '1'"),
    (rules.environment, "deploy/a.py", "from os import getenv"),
    (rules.unexplained_todos, "workers/a.py", "x = 1  " + chr(35) + " TODO: faster"),
]
GOOD: list[tuple[ModuleRule, str, str]] = [
    (rules.import_layers, "deploy/a.py", "import ray\nimport triton_client\nfrom tournant.kernels import layout"),
    (rules.import_layers, "workers/shard_actor.py", "import ray"),
    (rules.import_layers, "workers/models/a.py", "from ..sampler import Sampler\nimport torch"),
    (rules.bare_folder_imports, "tests/a.py", "import tournant.kernels.layout"),
    (rules.sizes, "workers/a.py", "def f():\n" + "    pass\n" * 69),
    (rules.lazy_imports, "workers/a.py", "if True:\n    import json"),
    (rules.environment, "deploy/cli.py", "import os\nos.environ['A'] = '1'"),
    (rules.unexplained_todos, "workers/a.py", "# TODO: split this once a second tier reads it, as both need it"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_rule_can_fail(rule: ModuleRule, path: str, text: str) -> None:
    assert len(rule(Module.parse(path, text))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), GOOD, ids=lambda value: getattr(value, "__name__", None))
def test_rule_can_pass(rule: ModuleRule, path: str, text: str) -> None:
    assert rule(Module.parse(path, text)) == []


def test_cycle_rule_can_fail() -> None:
    a = Module.parse("workers/a.py", "from tournant.workers.b import f")
    b = Module.parse("workers/b.py", "class C:\n    from tournant.workers import a")
    lazy = Module.parse(
        "workers/b.py", "if TYPE_CHECKING:\n    import tournant.workers.a\ndef f():\n    import tournant.workers.a"
    )
    assert rules.import_cycles([a, b]) == ["import cycle: workers.a > workers.b > workers.a"]
    assert rules.import_cycles([a, lazy]) == []


def test_dead_rule_can_fail() -> None:
    a = Module.parse("workers/a.py", "import tournant.workers.a\nfrom tournant.workers import b")
    b = Module.parse("workers/b.py", "")
    assert rules.dead_modules([a, b], [], "") == ["workers.a is used by nothing"]
    assert rules.dead_modules([a, b], [], "main = 'tournant.workers.a:main'") == []
    for text in ("from tournant.workers.a import X", "run(['-m', 'tournant.workers.a'])"):
        assert rules.dead_modules([a, b], [Module.parse("tests/t.py", text)], "") == []


def test_places_rule_can_fail() -> None:
    text = (
        "cd /home/someone/x\n--index-url https://packages.example/simple\nsee ~/work/x, deploy/work/x and /home/ray/x\n"
    )
    assert [line.split(": ")[0] for line in rules.foreign_places("a.md", text)] == ["a.md:1", "a.md:2"]
