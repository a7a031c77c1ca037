"""Stores for the tests of the shells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvstore.store_harness import Store


@pytest.fixture(params=["socket", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store to be started, once behind a socket and once in this process."""
    found = Store(request.param, tmp_path)
    yield found
    found.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Store]:
    """A store to be started behind a socket."""
    found = Store("socket", tmp_path)
    yield found
    found.close()
