"""How a step attends to blocks in RAM when the device has a link: the CPU reads them in place, or they are copied.

Owns running estimates and the choice. Pure: durations are arguments. Times in seconds, sizes in bytes, both of one
layer.

Copying takes bytes over the link's rate, whatever the number of rows. In place the CPU's rate depends on the rows that
attend: one row reads as fast as memory gives, many wait for arithmetic. So that rate is kept by powers of two of rows;
where one is unknown, as many times more rows as were observed are thought to take as many times longer, and fewer rows
as long: never too little, so that a wrong guess costs no more than a copy would.
"""

from __future__ import annotations

from tournant.workers.cost_model import Rate

FEW_ROWS = 16  # until the CPU's rate is known, so many are given to it at most
IN_PLACE_S = 60e-6  # queries down, states up, and the wait for both


class OverflowChoice:
    """See the module."""

    def __init__(self) -> None:
        self._link = Rate()
        self._in_place: dict[int, Rate] = {}  # by the power of two that the rows reach

    def observe_copy(self, num_bytes: int, seconds: float, now: float) -> None:
        """Bytes went from RAM to the device."""
        self._link.observe(num_bytes, seconds, now)

    def observe_in_place(self, rows: int, num_bytes: int, seconds: float, now: float) -> None:
        """`rows` rows attended to bytes in RAM."""
        self._in_place.setdefault(_bucket(rows), Rate()).observe(num_bytes, seconds, now)

    def copy_s(self, num_bytes: int, now: float) -> float | None:
        """Seconds to bring them; None before any were."""
        rate = self._link.at(now)
        return None if rate is None else num_bytes / rate

    def in_place_s(self, rows: int, num_bytes: int, now: float) -> float | None:
        """Seconds for these rows; None before any attended."""
        bucket = _bucket(rows)
        fewer = max((known for known in self._in_place if known <= bucket), default=None)
        nearest = min(self._in_place, default=None) if fewer is None else fewer
        if nearest is None:
            return None
        rate = self._in_place[nearest].at(now) or 1.0
        return IN_PLACE_S + num_bytes / rate * max(1.0, rows / 2 ** (nearest + 1) if nearest < bucket else 1.0)

    def is_in_place(self, rows: int, num_bytes: int, now: float) -> bool:
        """Whether to leave these bytes where they are. What is unknown is tried, in place with few rows only."""
        copied, stays = self.copy_s(num_bytes, now), self.in_place_s(rows, num_bytes, now)
        if stays is None:
            return rows <= FEW_ROWS
        return copied is not None and stays < copied


def _bucket(rows: int) -> int:
    return rows.bit_length() - 1
