"""Rules about source text that no stock tool checks. Each takes a `Module` (or all of them) and returns what is wrong.

Stock tools do the rest: ruff (banned modules and calls, swallowed errors, missing docstrings, commented-out code) and
mypy are run by test_tools.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

FOLDERS = ("deploy", "cluster", "workers", "kvstore", "kernels")
MAY_IMPORT = {
    "deploy": {"cluster", "workers", "kvstore", "kernels"},
    "cluster": {"workers", "kvstore", "kernels"},
    "workers": {"kvstore", "kernels"},
    "kvstore": set(),
    "kernels": set(),
}
FOREIGN_ONLY_IN = {
    "ray": ("deploy/", "cluster/", "workers/shard_actor.py"),
    "triton": ("kernels/",),
    "torch": ("deploy/", "cluster/", "workers/", "kernels/"),
    "transformers": ("deploy/", "cluster/", "workers/"),
}
OPTIONAL_IMPORTS: frozenset[str] = frozenset()  # top names of optional dependencies, which functions may import
ENVIRONMENT_READERS = frozenset({"deploy/cli.py"})
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 70


@dataclass(frozen=True)
class Module:
    """One Python file: path relative to the repository root, text, syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Module:
        """A module from text. Raises SyntaxError."""
        return cls(path, text, ast.parse(text))

    @property
    def folder(self) -> str:
        """Top folder of the file."""
        return self.path.split("/", 1)[0]

    @property
    def name(self) -> str:
        """Dotted name under which the file is imported, without `tournant.`."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """Dotted name that relative imports start from."""
        return ".".join(PurePosixPath(self.path).parts[:-1])


def read_modules(root: Path, folders: Iterable[str]) -> list[Module]:
    """All Python files under the given folders of a repository."""
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    return [Module.parse(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def imported_names(module: Module, nodes: Iterable[ast.AST] | None = None) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import; `from a import b` gives a.b, relative ones are made absolute."""
    for node in ast.walk(module.tree) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["tournant", *module.package.split(".")]
                base = ".".join([*parents[: len(parents) + 1 - node.level], *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def import_layers(module: Module) -> list[str]:
    """Imports go one way between folders, and heavy libraries stay where they belong."""
    wrong = []
    for line, name in imported_names(module):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top == "tournant" and target != module.folder and target not in MAY_IMPORT[module.folder]:
            wrong.append(f"{module.path}:{line}: {module.folder} may not import {name}")
        if not module.path.startswith(FOREIGN_ONLY_IN.get(top, (module.path,))):
            wrong.append(f"{module.path}:{line}: {top} may be imported only in {', '.join(FOREIGN_ONLY_IN[top])}")
    return wrong


def bare_folder_imports(module: Module) -> list[str]:
    """The folders are imported as tournant.kernels and so on: a bare name works only from the repository root."""
    return [
        f"{module.path}:{line}: import tournant.{name}, not {name}"
        for line, name in imported_names(module)
        if name.split(".")[0] in FOLDERS
    ]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Statements that run when the module is imported: no function bodies, nothing under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if _is_type_checking(child):
            for other in child.orelse if isinstance(child, ast.If) else []:
                yield other
                yield from _run_time_nodes(other)
            continue
        yield child
        yield from _run_time_nodes(child)


def _owner(name: str, known: Container[str]) -> str | None:
    """The module of ours that an imported dotted name lies in, without `tournant.`; None when it is not ours."""
    top, _, rest = name.partition(".")
    while top == "tournant" and rest:
        if rest in known:
            return rest
        rest = rest.rpartition(".")[0]
    return None


def import_cycles(modules: Iterable[Module]) -> list[str]:
    """No modules that need each other while they are being imported."""
    by_name = {module.name: module for module in modules}
    graph = {
        name: {
            owner
            for _, imported in imported_names(module, _run_time_nodes(module.tree))
            if (owner := _owner(imported, by_name)) is not None and owner != name
        }
        for name, module in by_name.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["import cycle: " + " > ".join(error.args[1][::-1])]
    return []


def sizes(module: Module) -> list[str]:
    """Files and functions fit their budgets."""
    wrong = []
    lines = module.text.count("\n")
    if lines > MAX_FILE_LINES:
        wrong.append(f"{module.path}: {lines} lines, the budget is {MAX_FILE_LINES}")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                wrong.append(f"{module.path}:{node.lineno}: {node.name}: {length} lines, budget {MAX_FUNCTION_LINES}")
    return wrong


def lazy_imports(module: Module, optional: frozenset[str] = OPTIONAL_IMPORTS) -> list[str]:
    """Imports stand at the top of a module, but for optional dependencies."""
    inner = (
        node
        for function in ast.walk(module.tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    )
    return [
        f"{module.path}:{line}: {name} is imported inside a function"
        for line, name in sorted(set(imported_names(module, inner)))
        if name.split(".")[0] not in optional
    ]


def environment(module: Module) -> list[str]:
    """Configuration comes from flags and YAML: only the command line looks at environment variables."""
    if module.path in ENVIRONMENT_READERS:
        return []
    names = {"environ", "environb", "getenv", "putenv"}
    lines = {node.lineno for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and node.attr in names}
    lines |= {line for line, name in imported_names(module) if name in {f"os.{name}" for name in names}}
    return [f"{module.path}:{line}: environment variables belong in deploy/cli.py" for line in sorted(lines)]


def unexplained_todos(module: Module) -> list[str]:
    """A TODO says in a sentence what is missing and why, so that an issue can be made of it."""
    return [
        f"{module.path}:{number}: say in a sentence what is to be done, or do it"
        for number, line in enumerate(module.text.splitlines(), 1)
        if (found := re.search(r"\x23.*\b(?:TODO|FIXME|XXX|HACK)\b(.*)", line)) and len(found[1].split()) < 8
    ]


def _named_in_strings(module: Module) -> Iterator[str]:
    """Strings that are a module of ours in full, as in `python -m tournant.a.b` or `tournant.a.b:main`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tournant."):
            yield node.value.partition(":")[0]


def dead_modules(modules: Iterable[Module], users: Iterable[Module], mentions: str) -> list[str]:
    """Every module is imported or started by another file, or named in full in `mentions` (entry points, YAML)."""
    names = {module.name for module in modules if not module.path.endswith("__init__.py")}
    used = {name for name in names if re.search(rf"\btournant\.{re.escape(name)}\b", mentions)}
    for user in [*modules, *users]:
        imported = (name for _, name in imported_names(user))
        owners = {_owner(name, names) for name in (*imported, *_named_in_strings(user))}
        used |= {name for name in owners if name is not None and name != user.name}
    return [f"{name} is used by nothing" for name in sorted(names - used)]


def foreign_names(module: Module) -> set[str]:
    """Top names that a module imports from outside this project."""
    return {name.split(".")[0] for _, name in imported_names(module)} - {"tournant", "__future__"}


MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(?:home/(?!ray\b)|Users/|root/|work/)\w")
INDEX_OPTIONS = re.compile(r"(?:--(?:extra-)?index(?:-url)?|--find-links|--registry)[ =]+\S*://")  # any package host


def foreign_places(path: str, text: str) -> list[str]:
    """No path of somebody's machine and no package registry by name in any tracked text."""
    return [
        f"{path}:{number}: {found[0]!r} is a place outside the project"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in (MACHINE_PATHS, INDEX_OPTIONS)
        if (found := pattern.search(line))
    ]
