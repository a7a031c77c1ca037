"""docs/configuration.md says what the configuration is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tournant.deploy import config_table
from tournant.deploy.access_config import AccessConfig
from tournant.deploy.config import ADVANCED_KEYS, ENGINE_KEYS, SERVICE_ADVANCED_KEYS, ServiceConfig
from tournant.deploy.kv_store_config import FAULT_KEYS, KV_ADVANCED_KEYS, KV_STORE_KEYS
from tournant.deploy.live_config import LIVE_KEYS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def sections() -> dict[str, dict[str, list[str]]]:
    """Cells behind each key, by the headings of the tables."""
    found: dict[str, dict[str, list[str]]] = {}
    for section in config_table.tables().split("## ")[1:]:
        title, _, _, _, *rows = section.strip().splitlines()
        cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
        found[title] = {key: rest for key, *rest in cells}
    return found


def test_the_page_is_what_the_definitions_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == config_table.with_tables(text), "run `make docs-config`"


def test_what_can_change_live_is_marked() -> None:
    prefixes = {"The service": "", "engine:": "engine.", "kv_store:": "kv_store.", "access:": "access."}
    marked = [
        prefixes.get(title, "advanced.") + key
        for title, rows in sections().items()
        for key, rest in rows.items()
        if rest[3] == "yes"
    ]
    assert sorted(marked) == sorted(LIVE_KEYS)


def test_every_key_is_there_but_those_for_tests() -> None:
    tables = sections()
    service, engine, store, access, *advanced = (set(rows) for rows in tables.values())
    assert service | {"engine", "kv_store", "access"} | SERVICE_ADVANCED_KEYS == set(ServiceConfig.model_fields)
    assert (engine, store, access) == (ENGINE_KEYS, KV_STORE_KEYS, set(AccessConfig.model_fields))
    assert set().union(*advanced) == (ADVANCED_KEYS | SERVICE_ADVANCED_KEYS | KV_ADVANCED_KEYS) - FAULT_KEYS
    assert all(rest[-1] for rows in tables.values() for rest in rows.values())


@pytest.mark.parametrize(
    ("title", "key", "cells"),
    [
        ("The service", "max_body_bytes", ["size", "8MiB", "1KiB to 1GiB"]),
        ("The service", "served_model_name", ["text", "null", "1 to 256 characters"]),
        ("The service", "request_timeout_s", ["number", "600", "above 0 to 604800"]),
        ("engine:", "max_num_seqs", ["whole number", "64", "1 to 4096"]),
        ("engine:", "deterministic", ["true or false", "false", ""]),
        ("access:", "admin_port", ["whole number", "null", "0 to 65535"]),
        ("advanced:, of the service", "weights_drain_s", ["number", "30", "0 to 86400"]),
        ("advanced:, of the tiers", "restore", ["text", "auto", "auto, always, never"]),
        ("advanced:, of the tiers", "nvme_workers", ["whole number", "4", "1 to 64"]),
        ("advanced:, of the tiers", "host_copy_start", ["number", "0.7", "above 0 and at most 1"]),
    ],
)
def test_limits_are_those_that_errors_tell(title: str, key: str, cells: list[str]) -> None:
    assert sections()[title][key][:3] == cells


def test_a_key_without_a_meaning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(config_table.MEANINGS, "engine.dtype")
    with pytest.raises(KeyError, match=r"engine\.dtype"):
        config_table.tables()


def test_no_meaning_is_left_over() -> None:
    names = {
        "": [name for name in ServiceConfig.model_fields if name not in ("engine", "kv_store", "access")],
        "access.": AccessConfig.model_fields,
        "engine.": ENGINE_KEYS,
        "kv_store.": KV_STORE_KEYS,
        "advanced.": ADVANCED_KEYS | SERVICE_ADVANCED_KEYS | KV_ADVANCED_KEYS,
    }
    assert config_table.MEANINGS.keys() <= {prefix + name for prefix, found in names.items() for name in found}


def test_the_page_is_written_between_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{config_table.BEGIN}\nwas here\n{config_table.END}\nafter\n", encoding="utf-8")
    assert config_table.main(["--write", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| max_num_seqs |" in text
    assert "was here" not in text
    with pytest.raises(ValueError, match="lacks the marks"):
        config_table.with_tables("nothing")
