"""The leader's side of a read: one version per key that is present for all parts; the shortest good prefix of ranks.

Pure functions over what node stores answered (STORE.md section 4, Read). Mixing versions across the parts of a block is
what they exist to prevent (I1); mixing them along a chain is allowed, because every key contains its parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tournant.kvstore.block import Part, Version
from tournant.kvstore.groups import ROW, Handle


@dataclass(frozen=True, slots=True)
class Answer:
    """What one node store said to `Open`, `Fetch` or `HardPin`: counts, rows and parts as in events.py."""

    counts: bytes
    rows: bytes
    parts: tuple[Part, ...]

    def handles(self) -> list[list[Handle]]:
        """Per key, the handles of all parts of all versions shown. Raises ValueError when counts and rows disagree."""
        if len(self.rows) != sum(self.counts) * ROW.size:
            raise ValueError(f"{len(self.rows)} bytes of rows; counts of {sum(self.counts)} handles need other ones")
        found = [Handle._make(fields) for fields in ROW.iter_unpack(self.rows)]
        result, start = [], 0
        for count in self.counts:
            result.append(found[start : start + count])
            start += count
        return result


@dataclass(frozen=True, slots=True)
class Pick:
    """The leader's choice for one key. nodes: per needed part, the node whose store has it."""

    version: Version
    nodes: tuple[int, ...]


def tiles(parts: Sequence[Part], whole: Part) -> bool:
    """Whether the parts cover every (layer, KV head) of `whole` exactly once."""
    area = sum((p.layer_stop - p.layer_start) * (p.head_stop - p.head_start) for p in parts)
    if area != (whole.layer_stop - whole.layer_start) * (whole.head_stop - whole.head_start):
        return False
    inside = all(
        whole.layer_start <= p.layer_start < p.layer_stop <= whole.layer_stop
        and whole.head_start <= p.head_start < p.head_stop <= whole.head_stop
        for p in parts
    )
    return inside and not any(_overlap(a, b) for i, a in enumerate(parts) for b in parts[:i])


def _overlap(a: Part, b: Part) -> bool:
    return (
        a.layer_start < b.layer_stop
        and b.layer_start < a.layer_stop
        and a.head_start < b.head_stop
        and b.head_start < a.head_stop
    )


def choose(answers: Sequence[Answer], needed: Sequence[Part]) -> list[Pick]:
    """Per key, in order, a version whose parts on all nodes are all the needed ones; ends at the first key without.

    answers: one per node; needed: the parts of the reading group, which tile a block. A version whose parts are cut
    otherwise is not taken. Among several, one with more parts in host slots wins, then the one shown first.
    """
    per_node = [answer.handles() for answer in answers]
    number = {part: index for index, part in enumerate(needed)}
    picks: list[Pick] = []
    for place in range(max(map(len, per_node), default=0)):
        pick = _pick(answers, per_node, place, number)
        if pick is None:
            break
        picks.append(pick)
    return picks


def _pick(
    answers: Sequence[Answer], per_node: list[list[list[Handle]]], place: int, number: dict[Part, int]
) -> Pick | None:
    """One key. Keeps, per version and needed part, the node that has it (in host if any has)."""
    found: dict[tuple[int, int], dict[int, tuple[bool, int]]] = {}
    for node, keys in enumerate(per_node):
        for handle in keys[place] if place < len(keys) else ():
            index = number.get(answers[node].parts[handle.part])
            if index is None:
                continue
            have = found.setdefault((handle.writer_id, handle.counter), {})
            in_host = handle.generation > 0
            if index not in have or (in_host and not have[index][0]):
                have[index] = (in_host, node)
    best: tuple[int, tuple[int, int]] | None = None
    for version, have in found.items():
        if len(have) == len(number):
            in_host_parts = sum(in_host for in_host, _ in have.values())
            if best is None or in_host_parts > best[0]:
                best = (in_host_parts, version)
    if best is None:
        return None
    have = found[best[1]]
    return Pick(Version(*best[1]), tuple(have[index][1] for index in range(len(number))))


def incomplete(answers: Sequence[Answer], needed: Sequence[Part]) -> list[tuple[int, Version]]:
    """(place of the key, version) of versions that lack a needed part on all nodes together: to be forgotten."""
    per_node = [answer.handles() for answer in answers]
    result = []
    for place in range(max(map(len, per_node), default=0)):
        have: dict[tuple[int, int], set[Part]] = {}
        for answer, keys in zip(answers, per_node, strict=True):
            for handle in keys[place] if place < len(keys) else ():
                have.setdefault((handle.writer_id, handle.counter), set()).add(answer.parts[handle.part])
        result += [(place, Version(*name)) for name, parts in have.items() if not parts.issuperset(needed)]
    return result


def good_prefix(good: Iterable[int]) -> int:
    """Blocks that every rank has copied and verified: the shortest of the ranks' prefixes; 0 for no ranks."""
    return min(good, default=0)
