"""Counters of a node store: plain values, read by whoever exports metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoreStats:
    """Since the start. Blocks are counted once per part. The tiers' own counters are in `TierManager`.

    host_hits, nvme_hits: blocks that fetches chose, by where they lay then.
    """

    reported: int = 0
    refused_entries: int = 0
    dropped_incomplete: int = 0
    credit_short: int = 0
    opened: int = 0
    keys_asked: int = 0
    keys_found: int = 0
    host_hits: int = 0
    nvme_hits: int = 0
    expired_reads: int = 0
    late_fetches: int = 0
    prefetched: int = 0
    adopted: int = 0
    refused_records: int = 0
    corrupt_records: int = 0
