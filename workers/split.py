"""How many ranks share a model: plain numbers, which processes without torch know too.

Owns the numbering of ranks: stage by stage, rank = stage * tensor + place in the stage; rank 0 leads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """tensor: ranks that share a layer; pipeline: stages of layers. Made by `parallel.check_split`."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline

    def stage_of(self, rank: int) -> int:
        """The stage a rank belongs to."""
        return rank // self.tensor

    def ranks_of(self, stage: int) -> range:
        """The ranks of a stage."""
        return range(stage * self.tensor, (stage + 1) * self.tensor)
