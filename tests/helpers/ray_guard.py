"""Keeps quick tests free of Ray: `ray.init` raises unless the running test is marked `ray`.

Does not import Ray itself; when some test does, the guard is laid over `ray.init` as that import ends. Ray's automatic
start on the first remote call goes through `ray.init` too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class RayNotAllowedError(RuntimeError):
    """A test that is not marked `ray` tried to start or join a Ray cluster."""


class RayGuard(MetaPathFinder):
    """Wraps `ray.init` now or when Ray is imported. `allowed` is set by conftest.py before each test's fixtures."""

    def __init__(self) -> None:
        self.allowed = False

    def install(self) -> None:
        """Take effect for this process, from here on."""
        if "ray" in sys.modules:
            self.wrap(sys.modules["ray"])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of `ray` with a loader that wraps `ray.init` after loading; None for any other module."""
        if fullname != "ray":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WrappingLoader(spec.loader, self)
        return spec

    def wrap(self, ray: Any) -> None:
        """Replace `ray.init` by a function that asks `allowed` first."""
        real_init = ray.init

        @functools.wraps(real_init)
        def guarded_init(*args: Any, **kwargs: Any) -> Any:
            if not self.allowed:
                raise RayNotAllowedError("a test that is not marked ray may not start Ray; mark it or leave Ray out")
            return real_init(*args, **kwargs)

        ray.init = guarded_init


class _WrappingLoader(Loader):
    def __init__(self, loader: Loader, guard: RayGuard) -> None:
        self._loader = loader
        self._guard = guard

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._guard.wrap(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source and the like, for tracebacks and inspect
