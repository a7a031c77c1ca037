"""Whether an engine process makes progress, told from what it says between steps and from what Linux says of it.

Pure but for `look_at`, which reads /proc. What is done about an engine that hangs is engine_client.py's: it is killed.

An engine says something at least every BEAT_S whenever it is between two steps, idle or not. So silence means a step,
however long, or a hang. The engine's main thread tells them apart: in a step it computes, or waits for a disk, or for
another thread that does; one that neither runs nor wants to for `still_looks` hangs: stopped, in a deadlock, waiting
for a device or rank that is gone. What other threads compute says nothing: some beat or poll whatever the engine does.

Invariants:
 1. Time is counted in looks, between which everything that has arrived is heard: who watches may itself be held up.
 2. An engine that is heard, or whose main thread gets, wants or waits for something of this machine, is given up only
    after `busy_looks`; so a slow machine, a long step and a full queue are no hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BEAT_S = 1.0
LOOK_S = 1.0
STILL_LOOKS = 15
STILL_LOOKS_OF_RANKS = 60  # rank 0 waits for others, whose loss is noticed, and named, after rank_channel.SILENCE_S
BUSY_LOOKS = 600
STATES = {"T": "it was stopped", "t": "it is being traced", "S": "it waits for something that does not come"}
AT_WORK = "RD"  # runs or would run, waits for a disk
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MainThread:
    """state: Linux's letter, D also when it waits and another thread waits for a disk; cpu_ticks: what it has used."""

    state: str
    cpu_ticks: int


def look_at(pid: int, proc: Path = PROC) -> MainThread | None:
    """The main thread of a process; None when there is none."""
    tasks = proc / str(pid) / "task"
    if (fields := _stat_of(tasks / str(pid))) is None:
        return None
    state = fields[0]
    try:
        if state == "S" and any((other := _stat_of(task)) is not None and other[0] == "D" for task in tasks.iterdir()):
            state = "D"
    except OSError:
        return None
    return MainThread(state, int(fields[11]) + int(fields[12]))


def _stat_of(task: Path) -> list[str] | None:
    """Fields of a thread from its state on; None when it is gone."""
    try:
        stat = (task / "stat").read_text()
    except OSError:
        return None
    return stat[stat.rindex(")") + 2 :].split()


class Watchdog:
    """See the module. To be told what is heard, and to be asked every LOOK_S."""

    def __init__(self, still_looks: int = STILL_LOOKS, busy_looks: int = BUSY_LOOKS) -> None:
        self._still_looks = still_looks
        self._busy_looks = busy_looks
        self._silent = self._still = self._idle = 0
        self._steps = -1
        self._seen: MainThread | None = None

    def hear(self, num_steps: int) -> None:
        """The engine said something; num_steps: that it has made so far."""
        self._silent = self._still = 0
        self._seen = None
        if num_steps != self._steps:
            self._steps, self._idle = num_steps, 0

    def look(self, thread: MainThread | None, has_requests: bool) -> str:
        """Why the engine is given up, "" while it is not. has_requests: that it could work on."""
        seen, self._seen = self._seen, thread
        self._silent += 1
        self._idle = self._idle + 1 if has_requests else 0
        at_work = thread is None or seen is None or thread.state in AT_WORK or thread.cpu_ticks != seen.cpu_ticks
        self._still = 0 if at_work else self._still + 1
        if thread is not None and self._still >= self._still_looks:
            why = STATES.get(thread.state, f"its main thread is in state {thread.state}")
            return f"the engine has said and done nothing for {self._still_looks * LOOK_S:g} s: {why}"
        if self._silent > self._busy_looks:
            return f"the engine has not ended a step for {self._busy_looks * LOOK_S:g} s"
        if self._idle > self._busy_looks:
            return f"the engine has begun no step for {self._busy_looks * LOOK_S:g} s, though it has requests"
        return ""
