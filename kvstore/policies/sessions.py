"""Which requests continue an earlier one, and which of them will be continued: sessions without session ids.

A request names its chain of keys, head first. The next turn of a conversation contains the prompt of the turn before as
a prefix, so the last key of a prompt (or the one before it, when the end of the prompt was a template) is an anchor:
the deepest anchor in a new chain is the previous turn. Owns anchors, what is known of the open sessions, and an online
predictor of return; knows nothing of residency.

Invariants:
 1. At any time only what came before it is used: a turn is labelled returned when a later request continues it, and as
    gone when it stayed away for a time; one that returns after all is labelled again.
 2. A turn is continued once; a second request that extends the same turn begins a session of its own.
 3. At most `max_sessions` sessions are open, and as many keys are expected as two generations hold.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from tournant.kvstore.errors import InvariantViolation, StoreConfigError
from tournant.kvstore.policies.return_index import (
    NUM_BUCKETS,
    bucket_begin_us,
    bucket_of,
    hazards_of_chance,
    return_index,
)

NUM_ANCHORS = 2
NUM_PACES = 3  # first turn; follows fast; follows slowly
_MIN_LOGIT, _MAX_LOGIT = -4.0, 2.0
_OLD_GAPS = 8192  # counts of gaps are halved at so many, so that what changed is noticed
_ENOUGH_GAPS = 20  # returns from which a median is taken


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Choices of the predictor; the defaults are near the best on whole public traces, and flat around it.

    learning_rate: of the logistic regression; gone_after_medians: a turn counts as gone when it stayed away for so many
    median gaps, at least 20 s and at most 15 min; num_chances: classes of predicted return; pace_us: a think time below
    is fast; shared_gaps: weight of all gaps in the distribution of one pace; refresh_requests: the index is computed
    anew after so many requests; max_sessions: open ones; max_expected: keys whose session is remembered until they are
    stored.
    """

    learning_rate: float = 0.2
    gone_after_medians: float = 1.5
    num_chances: int = 8
    pace_us: int = 20_000_000
    shared_gaps: float = 40.0
    refresh_requests: int = 256
    max_sessions: int = 16_384
    max_expected: int = 65_536

    def __post_init__(self) -> None:
        for name in ("num_chances", "pace_us", "refresh_requests", "max_sessions", "max_expected"):
            if getattr(self, name) < 1:
                raise StoreConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("learning_rate", "gone_after_medians", "shared_gaps"):
            if not getattr(self, name) > 0:
                raise StoreConfigError(f"{name} is {getattr(self, name)}; it must be above 0")


class Session:
    """One turn: the newest of its session. length: blocks of its prompt; label: class of pace and chance."""

    __slots__ = ("anchors", "chance", "features", "label", "length", "number", "returned", "seen_us", "turn")

    def __init__(self, number: int, seen_us: int, length: int, turn: int) -> None:
        self.number = number
        self.seen_us = seen_us
        self.length = length
        self.turn = turn
        self.label = 0
        self.chance = 0.5
        self.features: tuple[int, ...] = ()
        self.anchors: tuple[Hashable, ...] = ()
        self.returned = False


class ReturnPredictor:
    """Logistic regression over binned features with a falling step per feature. Unknown features weigh nothing."""

    def __init__(self, learning_rate: float) -> None:
        self._rate = learning_rate
        self._weights: dict[int, float] = {}
        self._moved: dict[int, float] = {}  # feature -> sum of squared errors

    @staticmethod
    def features(turn: int, think_us: int, length: int, growth: int) -> tuple[int, ...]:
        """Bins of what is known of a turn; lengths in blocks, two bins per octave. think_us, growth: 0 at turn 1."""
        size = int(2 * math.log2(1 + length))
        turn = min(turn, 8)
        if turn == 1:
            return (0, 100 + turn, 200 + size)
        grown = int(2 * math.log2(1 + growth))
        return 0, 100 + turn, 200 + size, 300 + bucket_of(think_us), 400 + grown, 1000 * min(turn, 4) + grown

    def chance(self, features: tuple[int, ...]) -> float:
        """Predicted chance of return."""
        weights = self._weights
        logit = 0.0
        for feature in features:
            logit += weights.get(feature, 0.0)
        return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, logit))))

    def learn(self, features: tuple[int, ...], returned: bool) -> None:
        """One outcome."""
        error = float(returned) - self.chance(features)
        for feature in features:
            moved = self._moved[feature] = self._moved.get(feature, 0.0) + error * error
            self._weights[feature] = self._weights.get(feature, 0.0) + self._rate * error / math.sqrt(1.0 + moved)


class SessionTracker:
    """Sessions of the requests of one store. `shared(key)`: whether a resident block belongs to several sessions."""

    def __init__(self, config: SessionConfig | None = None, shared: Callable[[Hashable], bool] | None = None) -> None:
        self.config = config or SessionConfig()
        self.num_labels = NUM_PACES * self.config.num_chances
        self.predictor = ReturnPredictor(self.config.learning_rate)
        self._shared = shared
        self._open: OrderedDict[int, Session] = OrderedDict()  # by number, oldest first
        self._anchors: dict[Hashable, Session] = {}
        self._unlabelled: deque[Session] = deque()
        self._expected: dict[Hashable, Session] = {}
        self._expected_before: dict[Hashable, Session] = {}
        self._gaps = [[0.0] * NUM_BUCKETS for _ in range(NUM_PACES)]
        self._gone_after_us = 0
        self._num_requests = 0
        self.index: list[list[float]] = []  # label -> bucket of idle time -> return index
        self._refresh()

    def begin(self, keys: Sequence[Hashable], now_us: int) -> tuple[Session, Session | None]:
        """A request: the turn it opens, and the turn it continues. Costs O(keys) look-ups."""
        previous = self._previous(keys)
        self._num_requests += 1
        turn = Session(self._num_requests, now_us, len(keys), 1 if previous is None else previous.turn + 1)
        think_us = growth = 0
        if previous is not None:
            think_us = now_us - previous.seen_us
            growth = max(0, turn.length - previous.length)
            self._returned(previous, think_us)
        turn.features = self.predictor.features(turn.turn, think_us, turn.length, growth)
        turn.chance = self.predictor.chance(turn.features)
        turn.label = self._label(turn, think_us)
        self._add(turn, keys)
        self._label_gone(now_us)
        if self._num_requests % self.config.refresh_requests == 0:
            self._refresh()
        return turn, previous

    def session_of(self, key: Hashable) -> Session | None:
        """The last turn that asked for this key, if it is still remembered."""
        found = self._expected.get(key)
        return found if found is not None else self._expected_before.get(key)

    def observe_gap(self, session: Session, idle_us: int) -> None:
        """Blocks of a turn were used again by another session after this time."""
        self._gaps[session.label // self.config.num_chances][bucket_of(idle_us)] += 1.0

    def _previous(self, keys: Sequence[Hashable]) -> Session | None:
        anchors = self._anchors
        for key in reversed(keys):
            if key in anchors:
                return anchors[key]
        return None

    def _returned(self, session: Session, gap_us: int) -> None:
        session.returned = True
        self.observe_gap(session, gap_us)
        self.predictor.learn(session.features, True)
        self._close(session)

    def _close(self, session: Session) -> None:
        del self._open[session.number]
        for anchor in session.anchors:
            if self._anchors.get(anchor) is session:
                del self._anchors[anchor]

    def _add(self, turn: Session, keys: Sequence[Hashable]) -> None:
        shared = self._shared
        turn.anchors = tuple(key for key in keys[-NUM_ANCHORS:] if shared is None or not shared(key))
        for anchor in turn.anchors:
            self._anchors[anchor] = turn
        self._open[turn.number] = turn
        self._unlabelled.append(turn)
        if len(self._open) > self.config.max_sessions:
            self._close(next(iter(self._open.values())))
        self._expected.update(dict.fromkeys(keys, turn))
        if len(self._expected) >= self.config.max_expected:
            self._expected_before, self._expected = self._expected, {}

    def _label(self, turn: Session, think_us: int) -> int:
        pace = 0 if turn.turn == 1 else 1 if think_us < self.config.pace_us else 2
        logit = math.log(turn.chance / (1.0 - turn.chance))
        share = (logit - _MIN_LOGIT) / (_MAX_LOGIT - _MIN_LOGIT)
        count = self.config.num_chances
        return pace * count + max(0, min(count - 1, int(share * count)))

    def _label_gone(self, now_us: int) -> None:
        waiting = self._unlabelled
        while waiting and (waiting[0].returned or now_us - waiting[0].seen_us > self._gone_after_us):
            turn = waiting.popleft()
            if not turn.returned:
                self.predictor.learn(turn.features, False)

    def _refresh(self) -> None:
        """Compute the index from what was counted so far."""
        gaps = self._gaps
        every = [sum(column) for column in zip(*gaps, strict=True)]
        total = sum(every)
        if total >= _OLD_GAPS:
            self._gaps = gaps = [[count / 2 for count in row] for row in gaps]
        median = _median_bucket(every) if total >= _ENOUGH_GAPS else NUM_BUCKETS // 2
        medians_us = int(self.config.gone_after_medians * bucket_begin_us(median + 1))
        self._gone_after_us = max(20_000_000, min(900_000_000, medians_us))
        every = [(count + 0.02) / (total + 0.02 * NUM_BUCKETS) for count in every]
        self.index = []
        count = self.config.num_chances
        for pace in range(NUM_PACES):
            own = [n + self.config.shared_gaps * share for n, share in zip(gaps[pace], every, strict=True)]
            for chance_class in range(count):
                logit = _MIN_LOGIT + (chance_class + 0.5) / count * (_MAX_LOGIT - _MIN_LOGIT)
                self.index.append(return_index(hazards_of_chance(1.0 / (1.0 + math.exp(-logit)), own)))

    def validate(self) -> None:
        """Recount. Raises InvariantViolation."""
        for anchor, session in self._anchors.items():
            if anchor not in session.anchors or self._open.get(session.number) is not session:
                raise InvariantViolation(f"an anchor names session {session.number}, which is not open")
        if len(self._open) > self.config.max_sessions or any(session.returned for session in self._open.values()):
            raise InvariantViolation(f"{len(self._open)} sessions are open, {self.config.max_sessions} may be")


def _median_bucket(counts: Sequence[float]) -> int:
    half = sum(counts) / 2
    for bucket, count in enumerate(counts):
        half -= count
        if half <= 0:
            return bucket
    return len(counts) - 1
