"""Which weights' blocks a store holds: small numbers for their digests, and one numeric form of KV for each."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WEIGHTS = 4096


@dataclass(frozen=True, slots=True)
class Weights:
    """weights_id: digest; kv_form: numeric form of KV under it, on which all clients of a store agree."""

    weights_id: bytes
    kv_form: str


class WeightsTable:
    """Numbers are given in order and kept until the store ends."""

    def __init__(self) -> None:
        self.entries: list[Weights] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, weights_id: bytes, kv_form: str) -> int | None:
        """The number of these weights; None when they are known with another form, or too many are known."""
        number = self._numbers.get(weights_id)
        if number is None:
            if len(self.entries) >= MAX_WEIGHTS:
                return None
            number = self._numbers[weights_id] = len(self.entries)
            self.entries.append(Weights(weights_id, kv_form))
        return number if self.entries[number].kv_form == kv_form else None

    def form_of(self, weights_id: bytes) -> str | None:
        """The form these weights are known with."""
        number = self._numbers.get(weights_id)
        return None if number is None else self.entries[number].kv_form
