"""Counters of an engine's tiers, shared by those who count: one for each number of `TierStats`.

Owns the sums since the engine started; gauges are put in when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from tournant.workers.messages import TierStats


def add_counts(sums: dict[str, float], more: Mapping[str, float]) -> None:
    """Add to sums by name; a name that is not there yet is at 0."""
    for name, value in more.items():
        sums[name] = sums.get(name, 0) + value


class Counts:
    """All begin at 0."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = asdict(TierStats())

    def add(self, **more: float) -> None:
        """Add to counters, by their names in `TierStats`. Raises KeyError for another name."""
        for name, value in more.items():
            self._sums[name] += value

    def stats(self, **gauges: float) -> TierStats:
        """As it is now; gauges: by name, in place of what was counted."""
        return TierStats(**{**self._sums, **gauges})  # type: ignore[arg-type]
