"""Tokenizers and fronts for the tests of deploy/."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_model import build_tiny_model
from tournant.deploy.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    """M's: ids 0 to 255 are bytes, 256 to 259 special, the rest three letters each; no begin-of-text token."""
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture(scope="session")
def bos_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One that puts <|bos|> before every text and has it in its chat template too."""
    folder = tmp_path_factory.mktemp("bos")
    return Tokenizer.from_folder(
        build_tiny_model(folder, add_bos=True, hidden=16, num_heads=1, num_kv_heads=1, head_size=16, intermediate=16)
    )
