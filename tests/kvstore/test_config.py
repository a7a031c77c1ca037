"""Limits of the store's settings: whatever is out of them is named, with the limit, before anything is begun."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tournant.kvstore.config import CHUNK_BYTES, PAGE_BYTES, StoreConfig, shown
from tournant.kvstore.errors import StoreConfigError
from tournant.kvstore.nvme_tier import NvmeConfig

GIB = 1 << 30
NUMBERS = [
    (cls, field.name)
    for cls in (StoreConfig, NvmeConfig)
    for field in fields(cls)
    if str(field.type) in ("int", "float")
]


def make(cls: type[StoreConfig] | type[NvmeConfig], **chosen: Any) -> StoreConfig | NvmeConfig:
    given = {"host_bytes": GIB} if cls is StoreConfig else {}
    return cls(**(given | chosen))


@pytest.mark.parametrize("value", [10**30, 10**4000, -1, -(10**30), -4096, float("nan"), float("inf")])
@pytest.mark.parametrize(("cls", "name"), NUMBERS, ids=lambda one: one if isinstance(one, str) else "")
def test_no_number_is_without_limits(cls: type[StoreConfig] | type[NvmeConfig], name: str, value: float) -> None:
    with pytest.raises(StoreConfigError) as caught:
        make(cls, **{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is ")
    assert "it must be " in message
    assert len(message) < 160


def test_what_python_does_not_print_is_shown_by_its_size() -> None:
    assert shown(1 << 50_000) == "a number of 50001 bits"
    assert len(shown("x" * 10_000)) < 50


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"host_bytes": 5000}, "host_bytes is 5000; it must be a multiple of 4096"),
        ({"nvme_bytes": GIB, "segment_bytes": 1 << 41}, "segment_bytes is 2199023255552; it must be 4096 to"),
        ({"nvme_bytes": GIB, "segment_bytes": GIB}, "nvme_bytes is 1073741824; it must be 0 or at least two segments"),
        ({"copy_stop": 0.8}, "copy_stop is 0.8, copy_start 0.7, copy_parallel 0.9; they must rise"),
        ({"records_per_write": 65}, "records_per_write is 65; it must be 1 to 64"),
    ],
)
def test_the_setting_that_is_wrong_is_named(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(StoreConfigError, match=f"^{message}"):
        make(StoreConfig, **chosen)


@pytest.mark.parametrize("form", ["", "x" * 33, "bf16\0", "\ud800", "bf16\n"])
def test_a_form_that_no_record_can_have_is_refused(form: str) -> None:
    with pytest.raises(StoreConfigError, match=r"^kv_form is '.*; it must be a name of 1 to 32 bytes, such as bf16"):
        NvmeConfig(kv_form=form)


@pytest.mark.parametrize(
    ("host_bytes", "chunk_bytes", "expected"),
    [
        (PAGE_BYTES, 0, PAGE_BYTES),
        (5 * PAGE_BYTES, 0, 3 * PAGE_BYTES),
        (32 << 20, 0, 16 << 20),
        (GIB, 0, CHUNK_BYTES),
        (32 << 20, 64 << 20, 32 << 20),
        (GIB, 256 << 20, 256 << 20),
    ],
)
def test_a_pool_has_two_chunks_at_least_unless_told_otherwise(host_bytes: int, chunk_bytes: int, expected: int) -> None:
    assert StoreConfig(host_bytes, chunk_bytes).bytes_per_chunk == expected
