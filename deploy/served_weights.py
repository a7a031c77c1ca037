"""What an answer was made by: the weights, as responses and lists of models name them."""

from __future__ import annotations

from typing import Any, NamedTuple


class ServedWeights(NamedTuple):
    """weights_id: hex; epoch: how the roll-out counts them at that time, 0 = as configured."""

    weights_id: str
    epoch: int

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: differs whenever other weights may have answered."""
        return f"tournant-{self.weights_id[:12]}-e{self.epoch}"

    def to_plain(self) -> dict[str, Any]:
        """Fields of a response."""
        return {"system_fingerprint": self.fingerprint, "weights_id": self.weights_id, "epoch": self.epoch}
