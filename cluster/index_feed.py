"""Keeps a copy of the directory, for routers, what the directory says: a thread that asks every shard what has changed.

Owns the positions in the shards' logs and what becomes of a shard that does not answer. How shards are asked is
injected, so that all but `RayReader` knows no Ray.

Invariants:
 1. What an answer says is taken in whole and in order, and no change twice or never: the next question is put from the
    position of the answer before. Whatever went wrong ends with a shard's entries dropped and position `START`, which
    no log reaches, so that the shard begins anew, and tells all it has in pages until the copy is full.
 2. A shard that has died, or says nothing for `silent_s`, has no entries and is silent, until it answers.
 3. No shard holds up another one, and none holds up `stop`.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError

from tournant.cluster.app_namespace import namespace_of
from tournant.cluster.directory_actor import shard_name
from tournant.cluster.router_index import MAX_KEYS, DirectoryCopy
from tournant.kvstore.directory import Changes, Position

POLL_S = 0.25
ANSWER_S = 1.0  # for the answers of all shards to one question
ABSENT_S = 2.0  # until the next question while there is no directory
SILENT_S = 3.0
MAX_PAGES = 8  # of changes that a shard is asked for in one round
START = Position(-1)  # before every log
_LOG = logging.getLogger("tournant.router")


class NoAnswer(enum.Enum):
    """Of a shard. ABSENT: there is none, as when no node announces anything; LATE: it has not answered in time."""

    ABSENT = enum.auto()
    DEAD = enum.auto()
    LATE = enum.auto()


class Reader(Protocol):
    """How the shards of a directory are asked."""

    def read(self, positions: Mapping[int, Position]) -> Mapping[int, Changes | NoAnswer]:
        """`changes_since` of shards at their positions, all at once and within a second or so."""
        ...


class IndexFeed:
    """See the module. `round` is what the thread does, every `poll_s`; clock: seconds."""

    def __init__(
        self,
        reader: Reader,
        copy: DirectoryCopy,
        poll_s: float = POLL_S,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.copy = copy
        self._reader = reader
        self._poll_s = poll_s
        self._silent_s = silent_s
        self._clock = clock
        self._positions = [START] * copy.num_shards
        self._answered_at = [clock()] * copy.num_shards
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begin, on a thread that ends when nobody has this feed any more."""
        threading.Thread(target=_run, args=(weakref.ref(self), self._stopping), daemon=True, name="index-feed").start()

    def stop(self) -> None:
        """Ask nothing more; does not wait. Idempotent."""
        self._stopping.set()

    def round(self) -> float:
        """Ask every shard until it has nothing more to say; seconds until the next round."""
        ask = set(range(self.copy.num_shards))
        anybody = False
        for _ in range(MAX_PAGES):
            if not ask:
                break
            answers = self._reader.read({shard: self._positions[shard] for shard in sorted(ask)})
            anybody = anybody or any(answer is not NoAnswer.ABSENT for answer in answers.values())
            ask = {shard for shard in ask if self._take(shard, answers[shard])}
        return self._poll_s if anybody else max(self._poll_s, ABSENT_S)

    def _take(self, shard: int, answer: Changes | NoAnswer) -> bool:
        """Take an answer in; whether there may be more."""
        if isinstance(answer, Changes):
            self.copy.apply(shard, answer)
            position = answer.position
            if position.given is not None and self.copy.full(shard):
                position = position._replace(given=None)
            more = position != self._positions[shard]
            self._positions[shard] = position
            self._answered_at[shard] = self._clock()
            return more
        late = answer is NoAnswer.LATE and self._clock() - self._answered_at[shard] <= self._silent_s
        if not late:
            self.copy.drop(shard, silent=answer is not NoAnswer.ABSENT)
            self._positions[shard] = START
        return False


def _run(feed: weakref.ref[IndexFeed], stopping: threading.Event) -> None:
    pause = 0.0
    while not stopping.wait(pause):
        one = feed()
        if one is None:
            return
        try:
            pause = one.round()
        except Exception:
            _LOG.exception("reading the directory failed; trying again in %g s", POLL_S)
            pause = POLL_S
        del one  # else it would live as long as this thread waits


# -------------------------------------------------------------------- on Ray


class RayReader:
    """Asks the actors of an application's directory. Of one thread, which is no event loop's."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._actors: dict[int, Any] = {}

    def read(self, positions: Mapping[int, Position]) -> dict[int, Changes | NoAnswer]:
        """See Reader. An actor that fails is looked up by its name the next time."""
        answers: dict[int, Changes | NoAnswer] = {}
        calls: dict[Any, int] = {}
        for shard, position in positions.items():
            try:
                calls[self._actor(shard).changes_since.remote(position)] = shard
            except ValueError:  # nobody has this name
                answers[shard] = NoAnswer.ABSENT
        ready: list[Any] = []
        if calls:
            ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_S)
        for call, shard in calls.items():
            answers[shard] = self._answer(shard, call) if call in ready else NoAnswer.LATE
        return answers

    def _actor(self, shard: int) -> Any:
        actor = self._actors.get(shard)
        if actor is None:
            actor = self._actors[shard] = ray.get_actor(shard_name(shard), namespace=namespace_of(self._app))
        return actor

    def _answer(self, shard: int, call: Any) -> Changes | NoAnswer:
        try:
            answer: Changes = ray.get(call)
        except RayActorError:
            del self._actors[shard]
            return NoAnswer.DEAD
        except RayError as error:
            _LOG.warning("shard %d of the directory failed: %s", shard, str(error).strip().split("\n")[-1])
            return NoAnswer.LATE
        return answer


_feeds: weakref.WeakValueDictionary[tuple[str, int, int], IndexFeed] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def shared_feed(app: str, num_shards: int, max_keys: int = MAX_KEYS) -> IndexFeed:
    """The feed of this process for the directory of an application, started. It lives as long as somebody has it.

    num_shards: 0 = there is no directory, and nothing is asked.
    """
    with _lock:
        feed = _feeds.get((app, num_shards, max_keys))
        if feed is None:
            feed = _feeds[app, num_shards, max_keys] = IndexFeed(RayReader(app), DirectoryCopy(num_shards, max_keys))
            if num_shards:
                feed.start()
        return feed
