"""How much a block is worth that is idle since some time: hazards of return, and the index that ranks them.

Owns the buckets of idle time, two per octave, and the arithmetic; who returns is learnt elsewhere (sessions.py).

The index of an idle time a is the best rate of hits per second that keeping the block from a on can buy, over all times
to give up: max over T of P(return within T | idle a) / E[time kept, at most T | idle a]. That is the Gittins index of
a block that may come back; evicting the lowest first is the best order when each block is one of many. Where hazard
falls with idle time it ranks as LRU does; where a return comes after a pause of typical length it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

NUM_BUCKETS = 30
_SHIFT = 18  # the first bucket ends at 2^18 us = 0.26 s, the last one begins at 1.2 hours


def bucket_of(idle_us: int) -> int:
    """Bucket of an idle time in microseconds."""
    scaled = idle_us >> _SHIFT
    bits = scaled.bit_length()
    if bits < 2:  # 0 and 1 have a bucket each
        return scaled
    bucket = 2 * bits - 2 + ((scaled >> (bits - 2)) & 1)
    return bucket if bucket < NUM_BUCKETS else NUM_BUCKETS - 1


def bucket_begin_us(bucket: int) -> int:
    """First microsecond of a bucket; of NUM_BUCKETS, the end of the last."""
    if bucket < 2:  # 0 and 1 have a bucket each
        return bucket << _SHIFT
    return (2 + bucket % 2) << (bucket // 2 - 1 + _SHIFT)


_LENGTH_S = [(bucket_begin_us(b + 1) - bucket_begin_us(b)) / 1e6 for b in range(NUM_BUCKETS)]


def hazards_of_chance(chance: float, gaps: Sequence[float]) -> list[float]:
    """P(return in a bucket | idle at its begin) of what returns with `chance`, after gaps distributed as `gaps`.

    gaps: weight per bucket, at least one positive.
    """
    total = sum(gaps)
    left = 1.0  # of those that return, the share still away
    found = []
    for weight in gaps:
        share = weight / total
        found.append(min(1.0, chance * share / (chance * max(left, share) + 1.0 - chance)))
        left -= share
    return found


def hazards_counted(returned: Sequence[float], at_risk: Sequence[float], prior: Sequence[float]) -> list[float]:
    """P(return in a bucket | idle at its begin), counted, with 8 observations of `prior` mixed in."""
    return [min(1.0, (r + 8.0 * p) / (n + 8.0)) for r, n, p in zip(returned, at_risk, prior, strict=True)]


def at_risk(returned: Sequence[float], censored: Sequence[float]) -> list[float]:
    """How many were idle through each bucket. censored: last seen idle in this bucket; they count half there."""
    found = [0.0] * NUM_BUCKETS
    later = 0.0
    for bucket in range(NUM_BUCKETS - 1, -1, -1):
        found[bucket] = later + returned[bucket] + 0.5 * censored[bucket]
        later += returned[bucket] + censored[bucket]
    return found


def return_index(hazards: Sequence[float]) -> list[float]:
    """The index of each bucket, hits per second."""
    found = []
    for begin in range(NUM_BUCKETS):
        away, hits, kept_s, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(begin, NUM_BUCKETS):
            hit = away * hazards[bucket]
            hits += hit
            kept_s += _LENGTH_S[bucket] * (away - 0.5 * hit)
            away -= hit
            if hits > best * kept_s:
                best = hits / kept_s
        found.append(best)
    return found
