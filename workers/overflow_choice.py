"""In place or streamed: how attention reaches the blocks of a long sequence that lie in RAM.

Owns the estimate. On the CPU reading in place costs what reading the device costs, so it is always chosen there unless
configured otherwise; streaming exists on it for what it shows of a link, and for tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OverflowChoice:
    """mode: "auto", "in_place" or "streamed"."""

    mode: str = "auto"

    def streams(self, num_queries: int, context: int) -> bool:
        """Whether a step of so many rows of a sequence copies RAM's blocks to the device first."""
        return self.mode == "streamed"
