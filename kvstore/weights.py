"""Which weights' blocks a store holds: small numbers for each digest and numeric form of KV.

Which form of some weights may stay is decided when a client attaches (clients.py, adoption.py).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_WEIGHTS = 4096


@dataclass(frozen=True, slots=True)
class Weights:
    """weights_id: digest; kv_form: numeric form of KV under it, on which all clients of a store agree."""

    weights_id: bytes
    kv_form: str


class WeightsTable:
    """Numbers are given in order and kept until the store ends: what a number means never changes."""

    def __init__(self) -> None:
        self.entries: list[Weights] = []
        self._numbers: dict[Weights, int] = {}
        self._present: dict[bytes, dict[int, None]] = {}  # weights_id -> numbers under which there may be blocks

    def number(self, weights_id: bytes, kv_form: str) -> int | None:
        """The number of these weights in this form, of which there may be blocks from now on; None when too many are
        known.
        """
        weights = Weights(weights_id, kv_form)
        number = self._numbers.get(weights)
        if number is None:
            if len(self.entries) >= MAX_WEIGHTS:
                return None
            number = self._numbers[weights] = len(self.entries)
            self.entries.append(weights)
        self._present.setdefault(weights_id, {})[number] = None
        return number

    def has_room_for(self, weights_id: bytes, kv_form: str) -> bool:
        """Whether `number` gives one."""
        return len(self.entries) < MAX_WEIGHTS or Weights(weights_id, kv_form) in self._numbers

    def in_other_forms(self, weights_id: bytes, kv_form: str) -> list[int]:
        """Numbers of the same weights in other forms, as far as there may be blocks."""
        present = self._present.get(weights_id, ())
        return [number for number in present if self.entries[number].kv_form != kv_form]

    def gone(self, number: int) -> None:
        """No block is left under this number."""
        self._present[self.entries[number].weights_id].pop(number, None)
