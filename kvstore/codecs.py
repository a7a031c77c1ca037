"""Lossless codecs of the NVMe tier: none, and LZ4 over the byte planes of numbers.

Owns the bytes of an encoded payload and the choice whether encoding pays. Each record says which codec made it.

An encoded payload of n bytes with p planes (p = bytes per number): p little-endian u32 lengths, then the planes one
after another; plane i holds byte i of every number, as an LZ4 block, or plain when its length is n / p. Exponents and
signs of neighbouring numbers repeat, mantissas do not; apart they compress, mixed they do not.

Invariants:
 1. decode(encode(x)) is x, byte for byte, or nothing was encoded.
 2. Decoding never makes more than the declared length, whatever the bytes are.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

import lz4.block
import numpy as np

from tournant.kvstore.record import (
    CODEC_LZ4_PLANES_2,
    CODEC_LZ4_PLANES_4,
    CODEC_NONE,
    CorruptBlock,
    RecordHeader,
    Stored,
    checksum,
)

CODECS = ("none", "lz4")
_PLANES = {CODEC_LZ4_PLANES_2: 2, CODEC_LZ4_PLANES_4: 4}
_CODEC_OF_FORM = {
    "bf16": CODEC_LZ4_PLANES_2,
    "bfloat16": CODEC_LZ4_PLANES_2,
    "fp16": CODEC_LZ4_PLANES_2,
    "float16": CODEC_LZ4_PLANES_2,
    "fp32": CODEC_LZ4_PLANES_4,
    "float32": CODEC_LZ4_PLANES_4,
}


def codec_for(kv_form: str) -> int:
    """The codec that fits numbers of this form; none for forms without one."""
    return _CODEC_OF_FORM.get(kv_form, CODEC_NONE)


def encode(codec: int, payload: memoryview) -> bytes | None:
    """The payload encoded, or None when that would not make it smaller or its length does not fit the codec.

    Almost all of it runs without the interpreter lock.
    """
    planes = _PLANES.get(codec)
    if planes is None or len(payload) % planes:
        return None
    rows = np.frombuffer(payload, dtype=np.uint8).reshape(-1, planes)
    parts: list[bytes] = []
    for index in range(planes):
        plane = np.ascontiguousarray(rows[:, index]).data
        packed = lz4.block.compress(plane, store_size=False)
        parts.append(packed if len(packed) < len(plane) else bytes(plane))
    lengths = [len(part) for part in parts]
    if 4 * planes + sum(lengths) >= len(payload):
        return None
    return b"".join([struct.pack(f"<{planes}I", *lengths), *parts])


def decode(codec: int, stored: memoryview, target: memoryview) -> None:
    """Fill `target`, all of it, with what `encode` was given.

    Raises CorruptBlock when the bytes are not an encoding of exactly that length; `target` may then hold anything.
    """
    planes = _PLANES.get(codec)
    if planes is None or len(target) % planes or len(stored) < 4 * planes:
        raise CorruptBlock(f"{len(stored)} bytes cannot be decoded with codec {codec} into {len(target)} bytes")
    lengths = struct.unpack_from(f"<{planes}I", stored)
    if sum(lengths) != len(stored) - 4 * planes:
        raise CorruptBlock(f"planes of {lengths} bytes do not fill {len(stored) - 4 * planes} bytes")
    rows = np.frombuffer(target, dtype=np.uint8).reshape(-1, planes)
    start = 4 * planes
    for index, length in enumerate(lengths):
        rows[:, index] = _plane(stored[start : start + length], len(rows))
        start += length


def _plane(stored: memoryview, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """One plane of `size` bytes."""
    if len(stored) == size:
        return np.frombuffer(stored, dtype=np.uint8)
    try:
        plane = lz4.block.decompress(stored, uncompressed_size=size)
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise CorruptBlock(f"a plane of {len(stored)} bytes does not decode: {error}") from None
    if len(plane) != size:
        raise CorruptBlock(f"a plane decodes to {len(plane)} bytes instead of {size}")
    return np.frombuffer(plane, dtype=np.uint8)


def restore(header: RecordHeader, stored: Stored, data: memoryview, target: memoryview) -> None:
    """Check the stored payload `data` and decode it into `target`, both of their exact lengths; without a codec the two
    are the same memory. Raises CorruptBlock unless `target` now holds what the record's writer reported.
    """
    if checksum(data) != stored.checksum:
        raise CorruptBlock("the checksum of the stored payload does not match")
    if stored.codec == CODEC_NONE:
        if stored.checksum != header.checksum:
            raise CorruptBlock("the checksum of the payload does not match")
        return
    decode(stored.codec, data, target)
    if checksum(target) != header.checksum:
        raise CorruptBlock("the checksum of the decoded payload does not match")


@dataclass(slots=True)
class CodecChooser:
    """Says whether the next record is to be encoded, from what the last ones cost. Pure: fed with bytes and times.

    codec: the one to try; min_saving: share of bytes it must save; window: records before a judgement, and about how
    many weigh in one; control: one record in so many stays plain, to be compared with; retry: records written plain
    before a codec that was given up is tried again, because other models bring other numbers.

    It switches itself off when it saves less than `min_saving`, or when restoring (reading what is stored, then
    decoding) takes longer per byte of payload than restoring the plain records does.
    """

    codec: int
    min_saving: float = 0.10
    window: int = 32
    control: int = 16
    retry: int = 8192
    why_off: str = ""
    _chosen: int = 0
    _written: tuple[int, int, int] = (0, 0, 0)  # records, payload bytes, stored bytes
    _encoded: tuple[int, int, int] = (0, 0, 0)  # of restored records: number, payload bytes, us
    _plain: tuple[int, int, int] = (0, 0, 0)

    def choose(self) -> int:
        """The codec of the next record."""
        self._chosen += 1
        if not self.why_off:
            return CODEC_NONE if self._chosen % self.control == 0 else self.codec
        if self._chosen <= self.retry:
            return CODEC_NONE
        self._chosen, self.why_off = 1, ""
        self._written = self._encoded = self._plain = (0, 0, 0)
        return self.codec

    def wrote(self, payload_bytes: int, stored_bytes: int) -> None:
        """A record was encoded, or would not become smaller (both numbers equal then)."""
        self._written = _grown(self._written, payload_bytes, stored_bytes)
        records, payload, stored = self._written
        if records >= self.window and stored > (1 - self.min_saving) * payload:
            self._give_up(f"saves {1 - stored / payload:.1%}, less than {self.min_saving:.0%}")
        self._written = self._aged(self._written)

    def restored(self, codec: int, payload_bytes: int, restore_us: int) -> None:
        """A record was read, checked and, if a codec made it, decoded."""
        if codec == CODEC_NONE:
            self._plain = self._aged(_grown(self._plain, payload_bytes, restore_us))
            return
        self._encoded = _grown(self._encoded, payload_bytes, restore_us)
        records, payload, encoded_us = self._encoded
        if records >= self.window and self._plain[0]:
            plain_us = payload * self._plain[2] / self._plain[1]
            if encoded_us > plain_us:
                self._give_up(f"restoring takes {encoded_us / max(1, plain_us):.2f} times as long as plain records")
        self._encoded = self._aged(self._encoded)

    def _give_up(self, why: str) -> None:
        self.why_off, self._chosen = why, 0

    def _aged(self, sums: tuple[int, int, int]) -> tuple[int, int, int]:
        """Half as many records weigh from now on, once there are twice the window."""
        return (sums[0] // 2, sums[1] // 2, sums[2] // 2) if sums[0] >= 2 * self.window else sums


def _grown(sums: tuple[int, int, int], first: int, second: int) -> tuple[int, int, int]:
    return sums[0] + 1, sums[1] + first, sums[2] + second


class Codecs:
    """A CodecChooser per numeric form, behind a lock: the CodecCosts of a tier's threads (record_io.py)."""

    def __init__(self, codec: str) -> None:
        self._on = codec != "none"
        self._lock = threading.Lock()
        self._choosers: dict[str, CodecChooser] = {}

    def choose(self, kv_form: str) -> int:
        """See CodecCosts."""
        codec = codec_for(kv_form) if self._on else CODEC_NONE
        if codec == CODEC_NONE:
            return codec
        with self._lock:
            return self._choosers.setdefault(kv_form, CodecChooser(codec)).choose()

    def wrote(self, kv_form: str, payload_bytes: int, stored_bytes: int) -> None:
        """See CodecCosts."""
        with self._lock:
            self._choosers[kv_form].wrote(payload_bytes, stored_bytes)

    def restored(self, kv_form: str, codec: int, payload_bytes: int, restore_us: int) -> None:
        """See CodecCosts."""
        with self._lock:
            if (chooser := self._choosers.get(kv_form)) is not None:
                chooser.restored(codec, payload_bytes, restore_us)

    def why_off(self) -> dict[str, str]:
        """Per numeric form."""
        with self._lock:
            return {form: chooser.why_off for form, chooser in self._choosers.items()}
