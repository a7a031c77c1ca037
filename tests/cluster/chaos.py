"""Clients that know the right answers, and a seeded schedule of what is killed meanwhile, over a deployed service."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from tests.cluster.conftest import RayCluster
from tests.cluster.service_harness import Service, all_end, parent_of, wait_for
from tests.workers.parallel_harness import NUM_NEW, Chosen
from tournant.deploy.tokenizer import Tokenizer

REFUSALS = {408, 429, 500, 502, 503, 504}
MODULES = {  # a process of ours -> the module that it runs
    "leader": "tournant.workers.engine_process",
    "rank": "tournant.workers.rank_process",
    "store": "tournant.kvstore.server",
}
KINDS = ("rank", "leader", "replica", "store", "directory", "node", "stopped rank", "paused rank")
PATIENCE_S = 240.0
Outcome = Literal["right", "refused", "broken", "wrong", "late"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. broken: an error came after a part of the right answer; late: nothing came in time; invoked, back:
    of time.monotonic; host: tokens that came from RAM below the device.
    """

    prompt: int
    outcome: Outcome
    detail: str
    invoked: float
    back: float
    host: int = 0


class Clients:
    """Threads that ask one prompt after another, some of them as streams, until `stop`."""

    def __init__(self, service: Service, chosen: Chosen, seed: int, count: int, late_s: float) -> None:
        tokenizer = Tokenizer.from_folder(service.model)
        self._service = service
        self._prompts = chosen.prompts
        self._wanted = [tokenizer.decode(answer, True) for answer in chosen.answers]
        self._late_s = late_s
        self._stopping = threading.Event()
        self.history: list[Asked] = []
        self._threads = [threading.Thread(target=self._run, args=(f"{seed}/{n}",), daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: str) -> None:
        rng = random.Random(seed)
        while not self._stopping.is_set():
            number = rng.randrange(len(self._prompts))
            invoked = time.monotonic()
            outcome, detail, host = self._ask(number, rng.random() < 0.5)
            self.history.append(Asked(number, outcome, detail, invoked, time.monotonic(), host))
            if outcome == "refused":
                self._stopping.wait(0.1)

    def _ask(self, number: int, streamed: bool) -> tuple[Outcome, str, int]:
        wanted, text, host = self._wanted[number], "", 0
        fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        try:
            with self._service.post(self._prompts[number], self._late_s, max_tokens=NUM_NEW, **fields) as response:
                for part in _events(response) if streamed else [json.load(response)]:
                    if "error" in part:
                        detail = json.dumps(part["error"])
                        return ("broken" if wanted.startswith(text) else "wrong"), f"{text!r}, then {detail}", 0
                    text += "".join(choice["text"] for choice in part["choices"])
                    if usage := part.get("usage"):
                        host = usage["prompt_tokens_details"]["cached_tokens_by_tier"]["host"]
        except urllib.error.HTTPError as error:
            detail = f"{error.code} {error.read()[:300]!r}"
            return ("refused" if error.code in REFUSALS else "wrong"), detail, 0
        except TimeoutError:
            return "late", f"{text!r}, then nothing", 0
        except urllib.error.URLError as error:
            return ("late" if isinstance(error.reason, TimeoutError) else "broken"), repr(error), 0
        except (http.client.HTTPException, OSError, json.JSONDecodeError) as error:
            return ("broken" if wanted.startswith(text) else "wrong"), f"{text!r}, then {error!r}", 0
        return ("right" if text == wanted else "wrong"), f"{text!r} for {wanted!r}", host

    def counts(self) -> Counter[Outcome]:
        return Counter(asked.outcome for asked in list(self.history))

    def told(self) -> list[str]:
        """What clients were told, and how often."""
        said = Counter(f"{asked.outcome}: {asked.detail[-160:]}" for asked in self.history if asked.outcome != "right")
        host = sum(asked.host > 0 for asked in self.history)
        return [f"{self.counts()}, {host} of the right ones with tokens from RAM", *map(str, said.most_common(20))]

    def wait_right(self, more: int) -> None:
        """Until so many more answers have come whole and right."""
        end = self.counts()["right"] + more
        wait_for(lambda: self.counts()["right"] >= end, PATIENCE_S)

    def wait_calm(self, count: int) -> None:
        """Until so many answers in a row are right."""
        begin = len(self.history)
        wait_for(lambda: _tail(self.history[begin:]) >= count, PATIENCE_S)

    def stop(self) -> None:
        """Wait for what is asked to be answered."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * self._late_s)
        assert not any(thread.is_alive() for thread in self._threads), "a request was never answered"


def _events(response: Any) -> Any:
    """Of a stream that must end with "[DONE]"; one that does not raises HTTPException."""
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
    raise http.client.IncompleteRead(b"")


def _tail(history: Sequence[Asked]) -> int:
    """How many at the end are right."""
    return next((n for n, asked in enumerate(reversed(history)) if asked.outcome != "right"), len(history))


class Kills:
    """What can be killed of a service on a cluster. patient: at times nobody can kill a stopped rank, only its silence
    ends its group, or a whole node hangs, which all take long. done: how often each kind was.
    """

    def __init__(
        self, cluster: RayCluster, service: Service, clients: Clients, seed: int, *, patient: bool = False
    ) -> None:
        self.done: Counter[str] = Counter()
        self.log: list[str] = []
        self._cluster = cluster
        self._service = service
        self._clients = clients
        self._rng = random.Random(seed)
        self._patient = patient
        self._kinds: dict[str, Callable[[], str]] = {
            "rank": lambda: self._kill("rank"),
            "leader": lambda: self._kill("leader"),
            "store": lambda: self._kill("store"),
            "replica": self._replica,
            "directory": self._directory,
            "node": self._node,
            "stopped rank": self._stopped_rank,
            "paused rank": self._paused_rank,
        }

    def run(self, duration_s: float) -> None:
        """Kill one thing after another, all kinds in an order that the seed gives, until every kind was and the time is
        over; between two of them some answers are right. What is not there comes later.
        """
        end = time.monotonic() + duration_s
        left: list[str] = []
        while time.monotonic() < end or self.done.keys() != set(KINDS):
            left = left or self._rng.sample(KINDS, len(KINDS))
            kind, began = left.pop(), time.monotonic()
            if began > end and kind in self.done:
                continue
            what = self._kinds[kind]()
            self.log.append(f"{time.monotonic() - end + duration_s:.1f} s: {kind}: {what}")
            if what:
                self.done[kind] += 1
            elif left:
                left.insert(0, kind)
            self._clients.wait_right(self._rng.randrange(3, 25))
            self.log.append(f"  answers again after {time.monotonic() - began:.1f} s")

    def _ours(self, kind: str) -> list[int]:
        """Processes of the service that run a module."""
        module, folder = MODULES[kind].encode(), b"TMPDIR=%s\0" % str(self._cluster.folder).encode()
        found = []
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                ours = path.name.isdecimal() and module in (path / "cmdline").read_bytes()
                if ours and folder in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return sorted(found)

    def _kill(self, kind: str) -> str:
        pids = self._ours(kind)
        return self._signal(self._rng.choice(pids), signal.SIGKILL) if pids else ""

    def _replica(self) -> str:
        leaders = self._ours("leader")
        return self._signal(parent_of(self._rng.choice(leaders)), signal.SIGKILL) if leaders else ""

    def _directory(self) -> str:
        try:
            actor = ray.get_actor("tournant-directory-0", namespace=f"tournant-{self._service.target.name}")
            pid: int = ray.get(actor.status.remote(), timeout=10)["pid"]
        except (ValueError, RayError):
            return ""
        return self._signal(pid, signal.SIGKILL)

    def _node(self) -> str:
        """One of those beside the head goes, with all that runs there, and another comes in its place. With patience it
        hangs first, until its ranks are missed by nobody, and goes on for a while.
        """
        name = self._rng.choice(sorted(set(self._cluster.nodes) - {"head"}))
        hung = self._hang(name) if self._patient and self.done["node"] % 2 == 0 else []
        self._cluster.remove_node(name)
        try:
            self._clients.wait_right(5)
        finally:
            self._cluster.add_node(name)
        return f"{name}, of which {hung} saw other groups form"

    def _hang(self, name: str) -> list[int]:
        """Stop all that runs on a node until there are two groups without it; its ranks then go on, and end."""
        pids = self._cluster.processes(name)
        ranks = sorted(set(self._ours("rank")) & set(pids))
        for pid in pids:
            self._signal(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: len(set(self._ours("rank")) - set(ranks)) == 2, PATIENCE_S)
            self._clients.wait_right(5)
            left = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
        finally:
            for pid in pids:
                self._signal(pid, signal.SIGCONT)
        assert all_end(ranks)
        return left

    def _stopped_rank(self) -> str:
        """A rank is stopped, perhaps with the actor that could kill it; another group forms; they go on, and end."""
        found, before, done = self._group(), self._ours("leader"), self.done["stopped rank"]
        if found is None:
            return ""
        leader, rank = found
        try:
            stopped = [parent_of(rank), rank] if self._patient and done % 2 == 0 else [rank]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        except (OSError, IndexError):
            return ""
        try:
            if not self._patient or done % 3:
                self._signal(leader, signal.SIGKILL)
            wait_for(lambda: (group := self._group()) is not None and group[0] not in before, PATIENCE_S)
            left = [pid for pid in stopped if Path(f"/proc/{pid}").exists()]
        finally:
            for pid in stopped:
                self._signal(pid, signal.SIGCONT)
        assert all_end(stopped)
        return f"{stopped}, of which {left} saw another group form"

    def _paused_rank(self) -> str:
        """A rank is stopped for as long as others need for some answers, then goes on with its group."""
        pids = self._ours("rank")
        paused = self._signal(self._rng.choice(pids), signal.SIGSTOP) if len(pids) == 2 else ""
        if paused:
            try:
                self._clients.wait_right(2)
            finally:
                self._signal(int(paused), signal.SIGCONT)
        return paused

    def _group(self) -> tuple[int, int] | None:
        """Leader and another rank of one group, which work."""
        with suppress(RayError, RayServeException, TimeoutError):
            facts = self._service.facts()
            if len(facts["ranks"]) == 2 and not facts["restarting"]:
                return facts["engine_pid"], facts["ranks"][1]["pid"]
        return None

    def _signal(self, pid: int, number: signal.Signals) -> str:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return str(pid)
        return ""

    def wait_whole(self) -> None:
        """Until two groups of two ranks run, and nothing else of them."""
        wait_for(lambda: len(self._ours("leader")) == len(self._ours("rank")) == 2, PATIENCE_S)
