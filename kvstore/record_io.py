"""Runs of records between host slots and a segment file, without copying payloads that need no codec.

Owns which buffers one system call gets, and the checks of what it read. A payload goes to and from its slot directly;
header, trailer, the last page of an odd length and encoded payloads go through page-aligned scratch memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tournant.kvstore.codecs import encode, restore
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_events import RecordAt, RecordRead, WriteRecords
from tournant.kvstore.disk_io import DiskIO, page_buffer, read_all, write_all
from tournant.kvstore.record import (
    CODEC_NONE,
    CorruptBlock,
    RecordHeader,
    RecordRefused,
    Stored,
    check_trailer,
    checksum,
    pack_header,
    pack_trailer,
    padded,
    parse_header,
    record_bytes,
)

_SCRATCH_PAGES = 256


class CodecCosts(Protocol):
    """Who chooses codecs and learns what they cost. Called from several threads."""

    def choose(self, kv_form: str) -> int:
        """Codec to try on the next record of this numeric form."""
        ...

    def wrote(self, kv_form: str, payload_bytes: int, stored_bytes: int) -> None:
        """A codec was tried on a record."""
        ...

    def restored(self, kv_form: str, codec: int, payload_bytes: int, restore_us: int) -> None:
        """A record was read, checked and decoded."""
        ...


class Scratch:
    """Page-aligned memory of one thread, used anew for each run. Grows to the largest run seen."""

    def __init__(self) -> None:
        self._pages = _SCRATCH_PAGES
        self._memory = page_buffer(self._pages)
        self._used = 0

    def reset(self) -> None:
        """What was taken may be overwritten from now on."""
        self._used = 0

    def take(self, pages: int) -> memoryview:
        """Memory for so many pages, with whatever bytes lie there."""
        if self._used + pages > self._pages:  # views taken before keep the old memory alive
            self._pages = max(2 * self._pages, pages)
            self._memory, self._used = page_buffer(self._pages), 0
        start = self._used * PAGE_BYTES
        self._used += pages
        return self._memory[start : start + pages * PAGE_BYTES]


def write_run(
    disk: DiskIO, file: int, run: WriteRecords, pool: memoryview, scratch: Scratch, costs: CodecCosts
) -> tuple[tuple[RecordAt, ...], OSError | None]:
    """Write the records of a run one after another in one call. Returns those that are whole in the file, and an error.

    Raises ValueError for a header that no record may have; nothing is written then.
    """
    scratch.reset()
    buffers: list[memoryview] = []
    placed: list[RecordAt] = []
    offset = run.offset
    for item in run.records:
        header = item.header
        payload = _slot(pool, item.slot, header.length)
        stored, body = _encoded(header, payload, costs, scratch)
        frame = scratch.take(2)
        first, last = frame[:PAGE_BYTES], frame[PAGE_BYTES:]
        pack_header(first, header, stored, run.segment, offset)
        pack_trailer(last, header, stored, run.segment, offset)
        buffers += [first, *body, last]
        size = record_bytes(stored.length)
        placed.append(RecordAt(run.segment, offset, size, header))
        offset += size
    done, error = write_all(disk, file, buffers, run.offset)
    end = run.offset + done
    return tuple(record for record in placed if record.offset + record.size <= end), error


def _encoded(
    header: RecordHeader, payload: memoryview, costs: CodecCosts, scratch: Scratch
) -> tuple[Stored, list[memoryview]]:
    """How a payload is stored, and its bytes as whole pages. An encoding that saves no page is not used."""
    codec = costs.choose(header.kv_form)
    if codec != CODEC_NONE:
        packed = encode(codec, payload)
        costs.wrote(header.kv_form, len(payload), len(payload) if packed is None else len(packed))
        if packed is not None and padded(len(packed)) < padded(len(payload)):
            pages = scratch.take(padded(len(packed)) // PAGE_BYTES)
            pages[: len(packed)] = packed
            pages[len(packed) :] = bytes(len(pages) - len(packed))
            return Stored(codec, len(packed), checksum(packed)), [pages]
    whole = len(payload) // PAGE_BYTES * PAGE_BYTES
    body = [payload[:whole]] if whole else []
    if whole < len(payload):
        tail = scratch.take(1)
        rest = len(payload) - whole
        tail[:rest] = payload[whole:]
        tail[rest:] = bytes(PAGE_BYTES - rest)
        body.append(tail)
    return Stored(CODEC_NONE, header.length, header.checksum), body


@dataclass(slots=True)
class _Target:
    """Where the pages of one record are read to. body: of its payload; tail: the last page when its end is odd."""

    read: RecordRead
    first: memoryview
    body: memoryview
    tail: memoryview | None
    last: memoryview

    def buffers(self) -> list[memoryview]:
        """In the order of the record."""
        middle = [self.body] if len(self.body) else []
        return [self.first, *middle, *([] if self.tail is None else [self.tail]), self.last]


def read_run(
    disk: DiskIO, file: int, reads: Sequence[RecordRead], pool: memoryview, scratch: Scratch, costs: CodecCosts
) -> list[str]:
    """Read records that follow each other without a gap in one call, into their slots.

    Returns what is wrong with each, "" where the slot now holds the payload, checked. Raises OSError when the call
    failed: nothing is known of any of them then.
    """
    scratch.reset()
    targets = [_target(read, pool, scratch) for read in reads]
    began = time.perf_counter_ns()
    got = read_all(disk, file, [buffer for target in targets for buffer in target.buffers()], reads[0].offset)
    read_ns = time.perf_counter_ns() - began
    total = sum(read.size for read in reads)
    end = reads[0].offset + got
    problems = []
    for read, target in zip(reads, targets, strict=True):
        try:
            if read.offset + read.size > end:
                raise CorruptBlock(f"segment {read.segment} ends at byte {end}, inside the record at {read.offset}")
            began = time.perf_counter_ns()
            stored = _check(target, pool)
        except (CorruptBlock, RecordRefused) as error:
            problems.append(str(error))
            continue
        restore_ns = read_ns * read.size // total + time.perf_counter_ns() - began
        costs.restored(read.header.kv_form, stored.codec, read.header.length, restore_ns // 1000)
        problems.append("")
    return problems


def _is_plain(read: RecordRead) -> bool:
    """Whether the record has a codec can be told from its size: an encoding saves at least a page."""
    return read.size == record_bytes(read.header.length)


def _target(read: RecordRead, pool: memoryview, scratch: Scratch) -> _Target:
    first, last = scratch.take(1), scratch.take(1)
    if not _is_plain(read):
        return _Target(read, first, scratch.take(read.size // PAGE_BYTES - 2), None, last)
    payload = _slot(pool, read.slot, read.header.length)
    whole = len(payload) // PAGE_BYTES * PAGE_BYTES
    return _Target(read, first, payload[:whole], scratch.take(1) if whole < len(payload) else None, last)


def _check(target: _Target, pool: memoryview) -> Stored:
    """Raises CorruptBlock or RecordRefused unless the slot holds, or by now holds, the record's payload."""
    read = target.read
    header, stored = parse_header(target.first, read.segment, read.offset)
    if header != read.header:
        raise CorruptBlock(f"segment {read.segment} offset {read.offset} holds another record: {header}")
    if record_bytes(stored.length) != read.size or (stored.codec == CODEC_NONE) != _is_plain(read):
        raise CorruptBlock(f"segment {read.segment} offset {read.offset}: {stored} in {read.size} bytes")
    check_trailer(target.last, header, stored, read.segment, read.offset)
    payload = _slot(pool, read.slot, header.length)
    if target.tail is not None:
        whole = len(target.body)
        payload[whole:] = target.tail[: len(payload) - whole]
    restore(header, stored, target.body[: stored.length] if stored.codec != CODEC_NONE else payload, payload)
    return stored


def _slot(pool: memoryview, slot: int, length: int) -> memoryview:
    """The payload bytes of a slot. Raises ValueError when they are not all in the pool."""
    start = slot * PAGE_BYTES
    if slot < 0 or start + length > len(pool):
        raise ValueError(f"{length} bytes from page {slot} on are not in a pool of {len(pool)} bytes")
    return pool[start : start + length]
