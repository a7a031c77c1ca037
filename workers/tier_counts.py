"""Counters of an engine's tiers, shared by those who count: one for each number of `TierStats`.

Owns the sums since the engine started; gauges are put in when they are read.
"""

from __future__ import annotations

from dataclasses import asdict

from tournant.workers.messages import TierStats


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
