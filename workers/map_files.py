"""Attention maps in a folder: one .npy per kind, layer and head, and manifest.json.

Owns names, modes, the layout of an array, the check for room and what is left behind on failure: nothing. An array is
float32 [tokens, tokens] in rows of queries; cells of keys that a query does not see are 0, and above the diagonal they
were never written, so that they take no room on disk. numpy.load(path, mmap_mode="r") maps one.

Rows are written by system calls, not through a map: on a full disk that is an error, not the end of the process.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_io import DiskIO, RealDisk
from tournant.workers.errors import ConfigError

FORMAT = "tournant-attention-maps-1"
MANIFEST = "manifest.json"
KINDS = ("scores", "probabilities")
_OURS = re.compile(r"(scores|probabilities)-layer-\d+-head-\d+\.(npy|png)|" + re.escape(MANIFEST))


@dataclass(frozen=True, slots=True)
class MapName:
    """One array."""

    kind: str
    layer: int
    head: int

    @property
    def stem(self) -> str:
        """Of its file and of its picture."""
        return f"{self.kind}-layer-{self.layer:03}-head-{self.head:03}"


@dataclass(frozen=True, slots=True)
class AttentionMaps:
    """What was written. folder: holds manifest.json and the arrays; names: of these, in order; peak_bytes: most memory
    that tiles took at once.
    """

    folder: Path
    names: tuple[MapName, ...]
    num_tokens: int
    peak_bytes: int

    def path(self, name: MapName) -> Path:
        """The file of an array."""
        return self.folder / f"{name.stem}.npy"

    def open(self, kind: str, layer: int, head: int) -> npt.NDArray[np.float32]:
        """An array, mapped: float32 [tokens, tokens]. Raises FileNotFoundError when it was not asked for."""
        found: npt.NDArray[np.float32] = np.load(self.path(MapName(kind, layer, head)), mmap_mode="r")
        return found


class MapFolder:
    """The arrays while they are written: the bottom tier of an arena, by (name, rows). Leave it by `finish`, with all
    arrays and the manifest, or by `discard`, with nothing.

    Raises ConfigError when `folder` is no folder, holds maps that may not be overwritten, or a manifest.json of
    something else, and OSError (ENOSPC) when its disk has less room than the arrays take.
    """

    def __init__(
        self,
        folder: Path,
        names: Iterable[MapName],
        num_tokens: int,
        *,
        overwrite: bool = False,
        disk: DiskIO | None = None,
    ) -> None:
        self.folder, self._num_tokens = folder, num_tokens
        self._disk = disk or RealDisk()
        self._names = list(names)
        self._files: dict[MapName, int] = {}
        self._made: list[Path] = []
        self._new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        self._remove_earlier(overwrite=overwrite)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_room(len(self._names))
            self._header = _header(num_tokens)
            for name in self._names:
                self._create(name)
        except BaseException:
            self.discard()
            raise

    def write(self, key: Any, tile: torch.Tensor) -> None:
        """Write a block of rows of an array: key (MapName, Rows), tile [rows, width]."""
        name, rows = key
        data = tile.numpy()[:, : rows.high - rows.low]
        for row in range(rows.count):
            self._write_row(name, rows.position + row, rows.low, data[row])

    def read(self, key: Any, tile: torch.Tensor) -> None:
        """Nothing comes back: see Bottom."""
        raise NotImplementedError("maps are only written")

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, with what is known here added. Raises OSError."""
        arrays = [
            {"file": f"{name.stem}.npy", "kind": name.kind, "layer": name.layer, "head": name.head}
            for name in self._names
        ]
        layout = "float32 [query, key], C order; 0 where a query does not see a key"
        shape = [self._num_tokens, self._num_tokens]
        whole = {"format": FORMAT, "layout": layout, "shape": shape, **manifest, "arrays": arrays}
        file = self._open(self.folder / MANIFEST)
        with os.fdopen(file, "w", encoding="utf-8") as text:
            json.dump(whole, text, ensure_ascii=False, indent=1)
        self.close()

    def close(self) -> None:
        """Close the arrays. Idempotent."""
        for file in self._files.values():
            self._disk.close(file)
        self._files = {}

    def discard(self) -> None:
        """Close and remove everything that was made."""
        self.close()
        for path in self._made:
            path.unlink(missing_ok=True)
        for folder in self._new_folders:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _remove_earlier(self, *, overwrite: bool) -> None:
        if not self.folder.exists() and not self.folder.is_symlink():
            return
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is no folder; name one, or a path where there is nothing yet")
        found = [path for path in sorted(self.folder.iterdir()) if _OURS.fullmatch(path.name)]
        manifest = self.folder / MANIFEST
        if manifest in found and not _is_ours(manifest):
            raise ConfigError(f"{manifest} is none of attention maps and would be lost; name another folder")
        if found and not overwrite:
            whole = "" if manifest in found else f", without {MANIFEST}, as a run that was killed leaves"
            raise ConfigError(
                f"{self.folder} holds attention maps ({found[0].name} and {len(found) - 1} more files{whole}); name "
                "another folder, or overwrite them"
            )
        for path in found:
            path.unlink()

    def _check_room(self, num_arrays: int) -> None:
        found = os.statvfs(self.folder)
        free = found.f_bavail * found.f_frsize
        needed = num_arrays * bytes_on_disk(self._num_tokens)
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"{num_arrays} maps of {self._num_tokens} tokens take {needed} bytes, but {self.folder} has room for "
                f"{free}; choose fewer layers or heads, or another folder",
            )

    def _create(self, name: MapName) -> None:
        file = self._files[name] = self._open(self.folder / f"{name.stem}.npy")
        os.ftruncate(file, len(self._header) + 4 * self._num_tokens**2)
        self._disk.write(file, [memoryview(self._header)], 0)

    def _open(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        self._made.append(path)
        return file

    def _write_row(self, name: MapName, row: int, first: int, cells: npt.NDArray[np.float32]) -> None:
        data = cells.data.cast("B")
        offset, done = len(self._header) + 4 * (row * self._num_tokens + first), 0
        while done < len(data):
            try:
                count = self._disk.write(self._files[name], [data[done:]], offset + done)
            except OSError as error:
                advice = "; free some room, or choose fewer layers or heads" if error.errno == errno.ENOSPC else ""
                raise OSError(
                    error.errno,
                    f"row {row} of {name.stem} cannot be written to {self.folder}: {error.strerror}{advice}",
                ) from error
            if not count:
                raise OSError(errno.EIO, f"writing row {row} of {name.stem} stopped without an error")
            done += count


def _is_ours(manifest: Path) -> bool:
    """Whether it is of maps, or of a run that was killed before it had written a word."""
    if not manifest.is_file():
        return False
    with manifest.open("rb") as file:
        start = file.read(64)
    return not start or FORMAT.encode() in start


def bytes_on_disk(num_tokens: int) -> int:
    """Most bytes that an array takes: the cells on and below the diagonal, in whole pages, and no more than all."""
    return PAGE_BYTES + min(2 * num_tokens * (num_tokens + 1) + 2 * PAGE_BYTES * num_tokens, 4 * num_tokens**2)


def _header(num_tokens: int) -> bytes:
    text = io.BytesIO()
    described = {"descr": "<f4", "fortran_order": False, "shape": (num_tokens, num_tokens)}
    np.lib.format.write_array_header_1_0(text, described)
    return text.getvalue()
