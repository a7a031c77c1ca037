"""Named mutants of how a group of ranks gets blocks of other nodes: each breaks a promise that an invariant watches.

As in group_mutants.py: a mutant is a set of replaced methods, `shape` and `faults` make schedules that can show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.simulation.group_mutants import GroupMutant
from tests.simulation.group_remote_agents import Bringing
from tests.simulation.group_remote_world import draw
from tests.simulation.group_world import Setup
from tournant.kvstore.block import Version
from tournant.kvstore.groups import Handle
from tournant.workers import group_merge, link_reads
from tournant.workers.group_merge import GroupMerge
from tournant.workers.link_reads import LinkReads
from tournant.workers.remote_reads import RemoteReads
from tournant.workers.transfer_messages import HOST, REMOTE, Brought, Found

OTHERS = ("other version",)
LONG = {"events": 1200}


def setup_for(mutant: GroupMutant, seed: int) -> Setup:
    """A schedule that may show it."""
    setup = draw(seed)
    return replace(setup, faults=setup.faults.union(mutant.faults), **mutant.shape)


# ---- which version

_CHOOSE = group_merge.choose
_BROUGHT = GroupMerge._on_brought


def _chosen_by_who_brought(merge: GroupMerge, rank: int, event: Brought) -> None:
    """The first rank that was to bring names the versions."""
    read = merge._reads.get(event.read)
    first = min(read.brought, default=rank) if read is not None else rank
    with patch.object(group_merge, "choose", lambda shown: _CHOOSE([shown[first]])):
        _BROUGHT(merge, rank, event)


def _reads_the_newest(shown: Sequence[Sequence[Handle]], picks: Sequence[Version]) -> list[Handle]:
    return [handles[0] for handles, _ in zip(shown, picks, strict=False)]


def _picks_of_before(merge: GroupMerge, rank: int, event: Brought) -> None:
    """What was shown at first is chosen from, with what the newest look has behind it."""
    read = merge._reads.get(event.read)
    old = list(read.shown) if read is not None else []
    picks = read.picks if read is not None else None
    known = patch.object(
        group_merge,
        "choose",
        lambda shown: _CHOOSE([[*mine, *now[len(mine) :]] for mine, now in zip(old, shown, strict=True)]),
    )
    with known if picks else nullcontext():
        _BROUGHT(merge, rank, event)


# ---- what is promised


def _reach_of_the_tiers(said: Sequence[Found], first: int) -> int:
    return max(first, min(len(one.tiers) for one in said))


def _reach_of_the_leader(said: Sequence[Found], first: int) -> int:
    return max(first, len(said[0].tiers))


_FOUND = GroupMerge._on_found


def _promised_as_here(merge: GroupMerge, rank: int, event: Found) -> None:
    _FOUND(merge, rank, event)
    merge._events = [
        replace(one, tiers=one.tiers.replace(bytes([REMOTE]), bytes([HOST]))) if isinstance(one, Found) else one
        for one in merge._events
    ]


# ---- who waits for whom


def _first_for_all(merge: GroupMerge, rank: int, event: Brought) -> None:
    read = merge._reads.get(event.read)
    if read is not None and rank in read.bringing:
        read.bringing = {rank}
    _BROUGHT(merge, rank, event)


def _silent_without_blocks(reads: LinkReads, read: Any, asked: int, answer: Any) -> None:
    if (answer is not None and answer.count) or not read.bringing:
        _CAME(reads, read, asked, answer)
    else:
        read.question = 0


_CAME = LinkReads._brought


def _waits_for_ever(remote: RemoteReads) -> None:
    asked, remote._asked = remote._asked, {}
    remote._asked = {number: replace(one, until=float("inf")) for number, one in asked.items()}
    _ADVANCE(remote)


_ADVANCE = RemoteReads.advance


# ---- under which version


def _own_version(bringing: Bringing, version: Version) -> Version:
    return Version(version.writer_id ^ 1, version.counter)


REMOTE_MUTANTS = (
    GroupMutant("the first rank that has brought blocks names the versions", ("I1",),
                ((GroupMerge, "_on_brought", _chosen_by_who_brought),), OTHERS),
    GroupMutant("a rank reads the newest of what it has brought", ("I1",),
                ((link_reads, "named", _reads_the_newest),), OTHERS, LONG),
    GroupMutant("what was here before is taken to be here still", ("I1",),
                ((GroupMerge, "_on_brought", _picks_of_before),), ("evictions",), LONG),
    GroupMutant("blocks are promised that ranks have in no common version", ("I13",),
                ((group_merge, "reach", _reach_of_the_tiers),), OTHERS),
    GroupMutant("blocks are promised that the leader's rank can have", ("I13",),
                ((group_merge, "reach", _reach_of_the_leader),)),
    GroupMutant("blocks of other nodes are told as here", ("I13",), ((GroupMerge, "_on_found", _promised_as_here),)),
    GroupMutant("the first rank that has brought its part has done so for all", ("I11", "I1"),
                ((GroupMerge, "_on_brought", _first_for_all),), ("agent late",)),
    GroupMutant("a rank to which no block came says nothing", ("I11",),
                ((LinkReads, "_brought", _silent_without_blocks),), ("agent late", "agent dead")),
    GroupMutant("an agent is waited for without an end", ("I11",),
                ((RemoteReads, "advance", _waits_for_ever),), ("agent silent",)),
    GroupMutant("what is brought is filed as a write of this node", ("I3", "I1"),
                ((Bringing, "version_of", _own_version),)),
)  # fmt: skip
