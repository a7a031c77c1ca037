"""What it costs to compute a prefix again and to load it, learned from what both took; and the better of the two.

Owns running estimates only; decides nothing but `choose`. Pure: durations are arguments. Times in seconds, sizes in
bytes.

Computing n tokens whose mean position is c takes n * (a + b * c): b stands for attention. Loading takes latency plus
bytes (those that wait before it included) over the rate of its tier; from NVMe or another node, blocks pass through RAM
as well. The latency of another node is learned, those of the tiers here are constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tournant.workers.transfer_messages import HOST, NVME, REMOTE

MIN_PREFILL_TOKENS = 16  # of a step that teaches something about prefill
MEMORY = 0.95  # weight of what was known before an observation
FORGIVE_S = 30.0  # a rate that was not observed for so long is tried again at twice its value
MAX_DOUBLINGS = 20.0
LATENCY_S = {HOST: 0.001, NVME: 0.003, REMOTE: 0.01}  # REMOTE: until it is known better


class Rate:
    """Bytes per second, of the last few dozen transfers; None before the first. One that nobody observes is thought to
    rise, so that it is tried again.
    """

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._seen = 0.0

    def observe(self, num_bytes: float, seconds: float, now: float) -> None:
        """So many bytes took so long."""
        self._bytes = self._bytes * MEMORY + num_bytes
        self._seconds = self._seconds * MEMORY + max(seconds, 1e-9)
        self._seen = now

    def at(self, now: float) -> float | None:
        """What is assumed now."""
        if not self._seconds:
            return None
        doublings = min(max(0.0, now - self._seen) / FORGIVE_S, MAX_DOUBLINGS)
        return self._bytes / self._seconds * 2**doublings


class _Latency:
    """Seconds that a transfer takes beside its bytes: what a straight line through sizes and times begins with, as soon
    as sizes differ enough to tell.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # weighted sums of the least squares

    def observe(self, num_bytes: float, seconds: float) -> None:
        x, y = num_bytes / 1e6, seconds
        for name, value in (("_n", 1.0), ("_x", x), ("_y", y), ("_xx", x * x), ("_xy", x * y)):
            setattr(self, name, getattr(self, name) * MEMORY + value)
        det = self._n * self._xx - self._x * self._x
        if det > 0.05 * self._n * self._xx:
            slope = (self._n * self._xy - self._x * self._y) / det
            self.seconds = min(max(0.0, (self._y - slope * self._x) / self._n), self._y / self._n)


@dataclass(frozen=True, slots=True)
class Choice:
    """How many leading blocks to load; load_s and compute_s: estimates for loading and for computing all of them."""

    count: int
    load_s: float
    compute_s: float


class CostModel:
    """See the module. block_tokens: tokens of a block."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._rates = {HOST: Rate(), NVME: Rate(), REMOTE: Rate()}
        self._remote_latency = _Latency(LATENCY_S[REMOTE])
        self._down = Rate()
        self._waiting = {HOST: 0, NVME: 0, REMOTE: 0}  # bytes that are on their way
        self._decode_s = 0.0
        self._xx = self._xy = self._yy = self._xs = self._ys = 0.0  # weighted sums of the least squares

    # ---- computing

    def observe_step(self, prefill_tokens: int, mean_position: float, num_decodes: int, seconds: float) -> None:
        """A step that computed so many prompt tokens and so many single ones took so long."""
        if prefill_tokens < MIN_PREFILL_TOKENS:
            if prefill_tokens == 0:
                self._decode_s += (seconds - self._decode_s) * (1 - MEMORY if self._decode_s else 1.0)
            return
        if num_decodes:
            seconds -= min(self._decode_s, seconds / 2)
        x, y = float(prefill_tokens), prefill_tokens * mean_position
        self._xx, self._xy, self._yy = self._xx * MEMORY + x * x, self._xy * MEMORY + x * y, self._yy * MEMORY + y * y
        self._xs, self._ys = self._xs * MEMORY + x * seconds, self._ys * MEMORY + y * seconds

    def _line(self) -> tuple[float, float] | None:
        """(a, b) of the module's formula; b = 0 as long as positions did not differ enough to tell."""
        if not self._xx:
            return None
        det = self._xx * self._yy - self._xy * self._xy
        if det > 1e-3 * self._xx * self._yy:
            a = (self._xs * self._yy - self._ys * self._xy) / det
            b = (self._ys * self._xx - self._xs * self._xy) / det
            if a > 0 and b >= 0:
                return a, b
        return self._xs / self._xx, 0.0

    def compute_s(self, start: int, stop: int) -> float | None:
        """Seconds to compute the tokens from position `start` to `stop`; None before anything was observed."""
        line = self._line()
        return None if line is None else max(0, stop - start) * (line[0] + line[1] * (start + stop) / 2)

    @property
    def prefill_tokens_per_second(self) -> float:
        """At the beginning of a prompt; 0 when unknown."""
        seconds = self.compute_s(0, self._block_tokens)
        return self._block_tokens / seconds if seconds else 0.0

    # ---- loading

    def began(self, tier: int, num_bytes: int) -> int:
        """Bytes of a tier are on their way from now on; how many are before them."""
        ahead = self._waiting[tier]
        self._waiting[tier] += num_bytes
        return ahead

    def ended(self, tier: int, num_bytes: int) -> None:
        """They arrived, or will not."""
        self._waiting[tier] -= num_bytes

    def observe_transfer(self, tier: int, num_bytes: int, seconds: float, now: float) -> None:
        """Bytes, those ahead of a transfer included, came from a tier, so long after it was asked for."""
        if num_bytes:
            if tier == REMOTE:
                self._remote_latency.observe(num_bytes, seconds)
            seconds = max(seconds - self.latency_s(tier), seconds / 4)
            self._rates[tier].observe(num_bytes, seconds, now)

    def latency_s(self, tier: int) -> float:
        """What a transfer from a tier takes beside its bytes."""
        return self._remote_latency.seconds if tier == REMOTE else LATENCY_S[tier]

    def observe_copy_down(self, num_bytes: int, seconds: float, now: float) -> None:
        """Bytes went from the device to RAM: as fast as they are thought to come back until some did."""
        if num_bytes:
            self._down.observe(num_bytes, seconds, now)

    def copy_down_rate(self, now: float) -> float | None:
        """Bytes per second from the device to RAM; None before anything was observed."""
        return self._down.at(now)

    def bytes_per_second(self, tier: int, now: float) -> float | None:
        """What is assumed of a tier; None before anything was observed."""
        rate = self._rates[tier].at(now)
        return self._down.at(now) if rate is None and tier == HOST else rate

    def load_s(self, num_host: int, num_nvme: int, block_bytes: int, now: float, num_remote: int = 0) -> float | None:
        """Seconds to load blocks from RAM, from NVMe and from another node; None while a rate that is needed is
        unknown.
        """
        total = 0.0
        for tier, count in ((HOST, num_host + num_nvme + num_remote), (NVME, num_nvme), (REMOTE, num_remote)):
            if count or tier == HOST:
                rate = self.bytes_per_second(tier, now)
                if rate is None:
                    return None
                total += self.latency_s(tier) + (count * block_bytes + self._waiting[tier]) / rate
        return total

    def choose(
        self, tiers: Sequence[int], first: int, block_bytes: int, now: float, busy_s: float = 0.0, decoding: int = 0
    ) -> Choice:
        """How many of these blocks to load. tiers: HOST, NVME or REMOTE of each; first: their place in the chain;
        busy_s: for how long the device computes for others first, which loading need not wait for; decoding: sequences
        that wait for their tokens while this prompt is computed, and do not while it is loaded: their seconds count as
        well.

        What loading saves grows with the position, so only ends of runs from one tier can be best. What is unknown is
        tried: all blocks are loaded then.
        """
        count, tokens = len(tiers), self._block_tokens
        stop = (first + count) * tokens
        whole = self.compute_s(first * tokens, stop)
        all_loaded = self._load_all_s(bytes(tiers), block_bytes, now)
        if whole is None or all_loaded is None:
            return Choice(count, all_loaded or 0.0, whole or 0.0)
        waiters = 1 + decoding
        best, best_s = 0, busy_s + waiters * whole
        for index, tier in enumerate(tiers):
            if index + 1 < count and tiers[index + 1] == tier:
                continue
            load = self._load_all_s(bytes(tiers[: index + 1]), block_bytes, now)
            rest = self.compute_s((first + index + 1) * tokens, stop)
            if load is not None and rest is not None and max(load, busy_s) + waiters * rest < best_s:
                best, best_s = index + 1, max(load, busy_s) + waiters * rest
        return Choice(best, all_loaded, whole)

    def _load_all_s(self, tiers: bytes, block_bytes: int, now: float) -> float | None:
        num_host, num_nvme, num_remote = map(tiers.count, (HOST, NVME, REMOTE))
        return self.load_s(num_host, num_nvme, block_bytes, now, num_remote)
