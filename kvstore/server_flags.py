"""Flags of the store process: one for each setting of StoreConfig and NvmeConfig, and those of the process itself.

Owns names, help texts and defaults on the command line; what values mean and their limits are the configurations'.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from tournant.kvstore.config import StoreConfig, parse_bytes
from tournant.kvstore.nvme_tier import NvmeConfig

HELP = {
    "host_bytes": "size of the pool in RAM, such as 4GiB",
    "chunk_bytes": "size of a part of the pool with slots of one size, 0 = 64 MiB, or half of the pool if that is less",
    "nvme_bytes": "most bytes in the folder of the NVMe tier, 0 = no such tier",
    "segment_bytes": "size of one file there",
    "eviction": "which blocks leave first",
    "admission": "which blocks are copied to disk",
    "prefetch_blocks": "blocks behind an opened chain that are loaded from NVMe before they are asked for, 0 = none",
    "copy_start": "share of the pool in use from which blocks are copied to disk",
    "copy_parallel": "share from which several copiers work",
    "copy_stop": "share at which copying stops",
    "num_copiers": "most copiers at once",
    "max_lent_share": "most of the pool that clients may have lent or pinned in place",
    "max_pinned_share": "most of the pool that reads may hold",
    "pin_us": "microseconds that a read holds its blocks",
    "fetch_us": "microseconds that a fetch may take",
    "io_us": "microseconds until a call to the disk counts as hung",
    "disk_retry_us": "microseconds until a full or failed disk is tried again",
    "incomplete_reports": "reports of its writer after which a block that lacks parts is dropped",
    "records_per_write": "most blocks of one write to disk",
    "records_per_read": "most blocks of one read from disk",
    "checkpoint_segments": "files filled between two checkpoints of the index",
    "max_clients": "most clients attached",
    "max_reads": "most open reads of one client",
    "max_keys": "most keys of one read",
    "max_entries": "most entries of one report",
    "kv_form": "the only numeric form of KV that is adopted from the folder; all if left out",
    "workers": "threads, which is the most calls to the disk at once",
    "queue_limit": "most requests that wait for the disk",
    "order": "order of I/O",
    "codec": "how blocks are stored on disk",
    "bytes_per_s": "emulated disk: most bytes a second, reads and writes each, 0 = off",
    "persist": "keep what an earlier run left in the folder",
    "direct": "use direct I/O where the disk can",
    "trace_requests": "how many of the last requests are remembered",
}


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """The values of all flags; those of a configuration are read with `values_of`. Exits with 2 when they are wrong."""
    parser = argparse.ArgumentParser(
        "tournant.kvstore.server",
        description="One node's block store. Sizes may be written as 64MiB.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--socket", type=Path, required=True, help="where to listen; its folder is made with mode 0700")
    parser.add_argument("--nvme-folder", type=Path, help="folder of the NVMe tier; needs --nvme-bytes")
    parser.add_argument("--drain-s", type=float, default=10.0, help="most seconds to copy down at the end")
    parser.add_argument("--with-parent", type=int, metavar="PID", help="end when this process, the parent, ends")
    parser.add_argument("--ready-fd", type=_descriptor, help="descriptor that gets a line when clients can attach")
    parser.add_argument(
        "--tenant-check-fd", type=_descriptor, help="descriptor that the check word of the tenant is read from"
    )
    for cls, prefix in ((StoreConfig, "--"), (NvmeConfig, "--nvme-")):
        group = parser.add_argument_group(cls.__name__)
        for field in fields(cls):
            name = prefix + field.name.replace("_", "-")
            kind: dict[str, Any] = {"required": True} if field.default is MISSING else {"default": field.default}
            if field.type == "bool":
                kind["action"] = argparse.BooleanOptionalAction
            else:
                kind["type"] = _TYPES.get(str(field.type), str)
                kind["metavar"] = {"int": "N", "float": "X"}.get(str(field.type), "NAME")
            if field.name.endswith(("_bytes", "bytes_per_s")):
                kind |= {"type": _size, "metavar": "SIZE"}
            group.add_argument(name, dest=f"{cls.__name__}.{field.name}", help=HELP[field.name], **kind)
    return parser.parse_args(argv)


def values_of(args: argparse.Namespace, cls: type[StoreConfig] | type[NvmeConfig]) -> dict[str, Any]:
    """The arguments of a configuration's constructor."""
    return {field.name: getattr(args, f"{cls.__name__}.{field.name}") for field in fields(cls)}


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.100}; {error}") from None


def _descriptor(text: str) -> int:
    number = int(text)
    try:
        os.fstat(number)
    except (OSError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text} is no open descriptor") from None
    return number


_TYPES = {"int": int, "float": float}
