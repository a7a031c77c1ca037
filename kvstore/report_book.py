"""What a client has lent, and what of it its reports have handed over: the bookkeeping of one rank's reports.

Owns free and taken slots, the numbers of reports, and the reports that are not answered. Sends and receives nothing
(client.py does).

Invariants:
 1. A lent slot is free, taken (being written or kept) or named by an unanswered report; a report's slots are the
    store's from the moment it is sent.
 2. The slots of refused entries are free again with the reply, each once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tournant.kvstore.events import Report, Reported, ReportEntry

_Name = tuple[int, int]  # page, generation


@dataclass(frozen=True, slots=True)
class Lent:
    """A slot that this client may write until it reports or releases it."""

    page: int
    generation: int


class ReportBook:
    """See the module. seq, answered: numbers of the last report sent and answered; free: slots that can be written."""

    def __init__(self) -> None:
        self.free: deque[Lent] = deque()
        self.seq = self.answered = 0
        self._taken: set[_Name] = set()
        self._unanswered: deque[tuple[Report, set[_Name]]] = deque()  # with those of its entries' slots that were ours
        self._replies: deque[Reported] = deque()

    @property
    def held(self) -> int:
        """Slots that are free or taken."""
        return len(self.free) + len(self._taken)

    def lend(self, pairs: Iterable[_Name]) -> None:
        """The store lent these."""
        self.free.extend(Lent(*pair) for pair in pairs)

    def take(self) -> Lent | None:
        """A free slot, taken now."""
        if not self.free:
            return None
        lent = self.free.popleft()
        self._taken.add((lent.page, lent.generation))
        return lent

    def put_back(self, lent: Lent) -> None:
        """A taken slot is free again, as if it had not been taken."""
        name = (lent.page, lent.generation)
        if name in self._taken:
            self._taken.remove(name)
            self.free.append(lent)

    def sent(self, report: Report) -> None:
        """A report with the number after `seq` is on its way."""
        self.seq = report.seq
        self._unanswered.append((report, self._hand_over(report)))

    def replied(self, reply: Reported) -> bool:
        """Take in a reply. False when it is not the one that is due: nothing was changed."""
        if not self.answered < reply.seq <= self.seq:
            return False
        self.answered = reply.seq
        self._take_back(reply.refused)
        self.lend(reply.lent)
        self._replies.append(reply)
        return True

    def replies(self) -> list[Reported]:
        """Replies taken in since the last call, in order."""
        found = list(self._replies)
        self._replies.clear()
        return found

    def last_reply(self) -> Reported:
        """Take the newest reply out of what `replies` will give. There must be one."""
        return self._replies.pop()

    def _hand_over(self, report: Report) -> set[_Name]:
        """Slots that a report names are the store's now; which of those of its entries were this client's."""
        reported = _slots_of(report.entries)
        named = reported.union(report.released)
        ours = reported & self._taken
        if named - self._taken:  # of an entry that was refused before, and free again
            ours |= {(lent.page, lent.generation) for lent in self.free} & reported
            self.free = deque(lent for lent in self.free if (lent.page, lent.generation) not in named)
        self._taken -= named
        return ours

    def _take_back(self, refused: Sequence[int]) -> None:
        """Slots of refused entries of the oldest unanswered report are still lent: they can be written again."""
        report, slots = self._unanswered.popleft()
        if not refused:
            return
        none = set(refused)
        slots -= _slots_of(entry for number, entry in enumerate(report.entries) if number not in none)
        for later, held in self._unanswered:  # which may take what was refused here
            again = slots & _slots_of(later.entries)
            held |= again
            slots -= again.union(later.released)
        self.lend(sorted(slots))


def _slots_of(entries: Iterable[ReportEntry]) -> set[_Name]:
    return {(entry.page, entry.generation) for entry in entries}
