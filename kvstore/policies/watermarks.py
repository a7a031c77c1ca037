"""When blocks are copied down to disk, and by how many copiers: pressure with hysteresis.

Pressure = (referenced + not yet copied down) / total: clean, unreferenced blocks count as free, because they can be
dropped without losing anything. Nothing is dropped by watermarks; copying early costs no hits, dropping early does.
"""

from __future__ import annotations

from tournant.kvstore.errors import StoreConfigError

START, PARALLEL, STOP = 0.70, 0.90, 0.50
NUM_COPIERS = 4


class Watermarks:
    """Copying begins above `start`, with `num_copiers` at once above `parallel`, and goes on until pressure is at or
    below `stop` or nothing is left to copy. The only state is whether it is going on.

    Raises StoreConfigError unless 0 < stop <= start <= parallel <= 1 and num_copiers >= 1.
    """

    def __init__(
        self, start: float = START, parallel: float = PARALLEL, stop: float = STOP, num_copiers: int = NUM_COPIERS
    ) -> None:
        if not 0 < stop <= start <= parallel <= 1:
            raise StoreConfigError(
                f"watermarks are stop {stop}, start {start}, parallel {parallel}; "
                "they must rise from above 0 to at most 1"
            )
        if num_copiers < 1:
            raise StoreConfigError(f"num_copiers is {num_copiers}; it must be 1 or more")
        self._start, self._parallel, self._stop = start, parallel, stop
        self._num_copiers = num_copiers
        self.copying = False

    def copiers(self, referenced: int, not_copied_down: int, total: int) -> int:
        """Copiers that should work now: 0, 1 or `num_copiers`. All three amounts in one unit, blocks or pages."""
        load = referenced + not_copied_down
        if self.copying:
            self.copying = not_copied_down > 0 and load > self._stop * total
        else:
            self.copying = not_copied_down > 0 and load > self._start * total
        if not self.copying:
            return 0
        return self._num_copiers if load > self._parallel * total else 1
