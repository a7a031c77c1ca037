"""Matrices of layers below the device: in RAM as one image each, or in files as pieces that are checked when read.

Owns how an image gets there and back, the threads that read, and the words of errors. Which layer lies where, and when
it is read, is weights_offload.py's business.

Guarantees:
 1. What `ImageReader.read` returns from is what was put there: each piece is compared with its checksum.
 2. A failed read has ended when it raises: nothing writes to its target afterwards.
 3. Files are read past the page cache where the file system can, so that it does not hold the weights a second time.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_io import DiskIO, RealDisk, page_buffer, read_all
from tournant.workers.spill_file import bypass_page_cache
from tournant.workers.weights import FilePlace

PIECE_BYTES = 2 << 20
NUM_READERS = 4
Bytes = npt.NDArray[np.uint8]


class WeightsLost(RuntimeError):  # noqa: N818 - a state of the world
    """Weights below the device cannot be had; the message says which, why, and what to do."""


class PagedFile(Protocol):
    """Something that images are read from, by any thread."""

    @property
    def name(self) -> str:
        """What errors call it."""

    def read(self, offset: int, data: memoryview) -> None:
        """Fill whole pages from a page border on; at the end of the file fewer. Raises OSError."""


class ModelFile:
    """A file of a model, open as long as this lives. disk: the system calls. Raises OSError."""

    def __init__(self, path: Path, disk: DiskIO | None = None) -> None:
        self.name = str(path)
        self.disk = disk or RealDisk()
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file).atexit = False
        self._size = os.fstat(self._file).st_size
        bypass_page_cache(self._file)

    def read(self, offset: int, data: memoryview) -> None:
        """See PagedFile."""
        wanted = min(len(data), self._size - offset)
        if read_all(self.disk, self._file, [data], offset) < wanted:
            raise OSError(errno.EIO, "it has become shorter")


Range = tuple[PagedFile, int, int, int]
"""Bytes of an image in a file: the file, the offset in it, the first byte in the image, how many."""


@dataclass(frozen=True, slots=True)
class HostImage:
    """memory: uint8 [bytes of the image], locked for the device."""

    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_bytes` at `offset` of a file belong at `start` of the image; digest: their xxh3."""

    file: PagedFile
    offset: int
    start: int
    num_bytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class DiskImage:
    """layer: number in the model, for errors."""

    layer: int
    pieces: tuple[Piece, ...]


def pieces_of(image: Bytes, ranges: Sequence[Range]) -> tuple[Piece, ...]:
    """Pieces of the ranges in which files hold an image, with checksums of what is in the image."""
    found = []
    for file, offset, start, num_bytes in ranges:
        for skip in range(0, num_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, num_bytes - skip)
            digest = xxhash.xxh3_64_intdigest(image[start + skip : start + skip + size].data)
            found.append(Piece(file, offset + skip, start + skip, size, digest))
    return tuple(found)


def ranges_of(
    places: Sequence[Sequence[FilePlace]], starts: Sequence[int], opened: Callable[[Path], PagedFile]
) -> Iterator[Range]:
    """Ranges of matrices that lie in files at `places` and in the image from `starts` on."""
    for of_matrix, first in zip(places, starts, strict=True):
        start = first
        for place in of_matrix:
            yield opened(place.file), place.offset, start, place.num_bytes
            start += place.num_bytes


class ImageReader:
    """Reads images from disk with several threads, each with memory for a piece that does not lie on pages."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights-reader")
        self._own = threading.local()

    def read(self, image: DiskImage, target: Bytes) -> None:
        """Fill `target`, the beginning of pages, with an image. Raises WeightsLost; the target is undefined then."""
        reads = [self._threads.submit(self._read, image.layer, piece, target) for piece in image.pieces]
        wait(reads)
        for read in reads:
            read.result()

    def _read(self, layer: int, piece: Piece, target: Bytes) -> None:
        part = target[piece.start : piece.start + piece.num_bytes]
        lead = piece.offset % PAGE_BYTES
        try:
            if lead or piece.start % PAGE_BYTES or piece.num_bytes % PAGE_BYTES:
                staged = self._staged()[: -(-(lead + piece.num_bytes) // PAGE_BYTES) * PAGE_BYTES]
                piece.file.read(piece.offset - lead, staged)
                np.copyto(part, np.frombuffer(staged, np.uint8)[lead : lead + piece.num_bytes])
            else:
                piece.file.read(piece.offset, part.data)
        except OSError as error:
            raise WeightsLost(
                f"layer {layer} of the weights cannot be read from {piece.file.name}: {error.strerror or error}; "
                "see the disk"
            ) from error
        if xxhash.xxh3_64_intdigest(part.data) != piece.digest:
            raise WeightsLost(
                f"layer {layer} of the weights is not what it was when the engine started: {piece.file.name} changed, "
                "or its disk fails; put the model back and start the engine again"
            )

    def _staged(self) -> memoryview:
        if not hasattr(self._own, "staged"):
            self._own.staged = page_buffer(PIECE_BYTES // PAGE_BYTES + 1)
        found: memoryview = self._own.staged
        return found
