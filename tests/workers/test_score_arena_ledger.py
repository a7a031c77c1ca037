"""The decisions about tiles against a naive model, driven by Hypothesis; and each rule about who leaves and returns."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.tile_ledger import MAX_DOWN, MAX_UP, Kind, Move, Tier, TileLedger

LARGEST = 10
DEVICE, HOST, BOTTOM = Tier.DEVICE, Tier.HOST, Tier.BOTTOM


class Tiles(RuleBasedStateMachine):
    """One user makes tiles and reads them in order; moves land or fail whenever they like.

    The model: which tiers hold a tile's bytes. A copy needs them where it begins; a read needs them on the device.
    """

    @initialize(
        sizes=st.lists(st.integers(3, LARGEST), min_size=6, max_size=24),
        kinds=st.lists(st.sampled_from(list(Kind)), min_size=24, max_size=24),
        reads=st.lists(st.integers(0, 23), max_size=60),
        device=st.integers(2 * LARGEST, 60),
        host=st.integers(2 * LARGEST, 60),
        disk=st.booleans(),
    )
    def begin(self, sizes: list[int], kinds: list[Kind], reads: list[int], device: int, host: int, disk: bool) -> None:
        if not disk:  # everything and the tiles on their way must fit into memory
            host = max(host, sum(sizes) + 3 * LARGEST)
        self.ledger = TileLedger(device, host, bottom=disk)
        self.sizes, self.kinds = sizes, kinds
        self.reads = [place for place in reads if place < len(sizes)]
        self.ledger.schedule(self.reads)
        self.copies: dict[int, set[Tier]] = {}
        self.moves: list[Move] = []
        self.made = self.next_read = 0
        self.used_now: int | None = None  # the tile that is written or read

    def plan(self) -> None:
        for move in self.ledger.plan():
            assert move.source in self.copies[move.key], "a copy begins where there is nothing"
            assert move.key != self.used_now, "a tile leaves while it is used"
            self.moves.append(move)

    @rule()
    def ask_again(self) -> None:
        self.plan()

    @precondition(lambda self: self.used_now is None and self.made < len(self.sizes))
    @rule()
    def make(self) -> None:
        self._make()

    def _make(self) -> None:
        if self.ledger.add(self.made, self.sizes[self.made], self.kinds[self.made]):
            self.copies[self.made] = {DEVICE}
            self.used_now, self.made = self.made, self.made + 1
        self.plan()

    def can_read(self) -> bool:
        return self.used_now is None and self.made == len(self.sizes) and self.next_read < len(self.reads)

    @precondition(can_read)
    @rule()
    def read(self) -> None:
        self._read()

    def _read(self) -> None:
        key = self.reads[self.next_read]
        if self.ledger.pin(key):
            assert self.copies[key] == {DEVICE}
            self.used_now, self.next_read = key, self.next_read + 1
        self.plan()

    @precondition(lambda self: self.used_now is not None)
    @rule()
    def done(self) -> None:
        self._done()

    def _done(self) -> None:
        key, self.used_now = self.used_now, None
        assert key is not None
        self.ledger.release(key)
        spent = self.ledger.spent(key)
        assert spent == (key in self.reads and key not in self.reads[self.next_read :] and self.made == len(self.sizes))
        if spent:
            assert self.ledger.drop(key) == DEVICE
            del self.copies[key]
        self.plan()

    @precondition(lambda self: self.moves)
    @rule(place=st.integers(0, 20), fails=st.integers(0, 5))
    def end_move(self, place: int, fails: int) -> None:
        self._end_move(place, fails)

    def _end_move(self, place: int, fails: int) -> None:
        move = self.moves.pop(place % len(self.moves))
        if fails == 0:
            self.ledger.failed(move)
        else:
            self.copies[move.key] = {move.target}
            self.ledger.landed(move)
        self.plan()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "ledger"):
            self._check()

    def _check(self) -> None:
        self.ledger.validate()
        assert self.ledger.num_moving == len(self.moves)
        assert {key: {place} for key, (place, _) in self.ledger.places().items()} == self.copies
        assert sum(move.target < move.source for move in self.moves) <= MAX_UP + 1  # one more that is waited for

    def teardown(self) -> None:
        """The user gets through, whatever happened before."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(20 * (len(self.sizes) + len(self.reads)) + 100):
            if self.used_now is not None:
                self._done()
            elif self.made < len(self.sizes):
                before = self.made
                self._make()
                assert self.made > before or self.moves, "there is room for no tile, and nothing moves"
            elif self.next_read < len(self.reads):
                before = self.next_read
                self._read()
                assert self.next_read > before or self.moves, "a tile does not come, and nothing moves"
            while self.moves:
                self._end_move(0, 1)
            self._check()
        assert (self.made, self.next_read) == (len(self.sizes), len(self.reads))


TestTiles = Tiles.TestCase
TestTiles.settings = settings(stateful_step_count=60)


def filled(ledger: TileLedger, sizes: Iterable[int], kind: Kind = Kind.SCORES, first: int = 0) -> TileLedger:
    """With tiles of these sizes at rest on the device; nothing was planned yet."""
    for key, size in enumerate(sizes, first):
        assert ledger.add(key, size, kind)
        ledger.release(key)
    return ledger


def land_all(ledger: TileLedger, moves: list[Move]) -> list[Move]:
    """Carry out moves and those that follow, in order."""
    for move in moves:
        ledger.landed(move)
        moves += ledger.plan()
        assert len(moves) < 1000, "tiles go up and down without end"
    return moves


@pytest.mark.parametrize(("used", "copiers"), [(69, 0), (70, 1), (89, 1), (90, MAX_DOWN), (100, MAX_DOWN)])
def test_tiles_leave_from_70_percent_on_several_at_a_time_above_90(used: int, copiers: int) -> None:
    ledger = filled(TileLedger(100, 100, bottom=True), [1] * used)
    assert len(ledger.plan()) == copiers
    assert ledger.plan() == []  # no more until one has landed


def test_leaving_stops_at_50_percent() -> None:
    ledger = filled(TileLedger(100, 1000, bottom=True), [2] * 35)
    land_all(ledger, ledger.plan())
    assert ledger.used == {DEVICE: 50, HOST: 20, BOTTOM: 0}


def test_the_largest_go_first_then_those_read_last_kv_never_before_scores() -> None:
    ledger = TileLedger(100, 1000, bottom=False)
    ledger.schedule([0, 1, 2, 3, 1, 4, 4, 4])
    filled(ledger, [10, 10, 20, 10, 10])  # 1 and 4 will be read more than once
    filled(ledger, [30], Kind.KV, first=5)
    moves = land_all(ledger, ledger.plan())
    assert [(move.key, move.target) for move in moves[:3]] == [(2, HOST), (3, HOST), (0, HOST)]  # 50 percent are left
    assert [(move.key, move.target) for move in moves[3:]] == [(0, DEVICE)]  # it is read next, and there is room again
    ledger.flush()
    assert [move.key for move in land_all(ledger, ledger.plan())] == [0, 1, 4, 5]


def test_what_is_read_next_comes_back_in_order_while_there_is_room() -> None:
    ledger = TileLedger(100, 1000, bottom=False)
    ledger.schedule(list(range(14)))
    for key in range(14):  # each leaves before the next is made
        filled(ledger, [10], first=key)
        if key < 8:
            ledger.flush()
        land_all(ledger, ledger.plan())
        ledger._flushing = False
    ledger = _emptied(ledger)
    moves = ledger.plan()
    assert [move.key for move in moves] == [0, 1]
    assert all((move.source, move.target) == (HOST, DEVICE) for move in moves)
    assert [move.key for move in land_all(ledger, moves)] == list(range(6))  # 70 percent would begin to leave


def _emptied(ledger: TileLedger) -> TileLedger:
    """With all tiles on the host."""
    ledger.flush()
    land_all(ledger, ledger.plan())
    ledger._flushing = False
    assert ledger.used[DEVICE] == 0
    return ledger


def test_a_tile_that_is_waited_for_makes_itself_room() -> None:
    ledger = TileLedger(30, 30, bottom=True)
    ledger.schedule([0])
    filled(ledger, [10])
    _sink(ledger)
    filled(ledger, [10, 10, 10], first=1)
    assert not ledger.pin(0)
    moves = land_all(ledger, ledger.plan())
    assert [(move.key, move.target) for move in moves if move.key == 0] == [(0, HOST), (0, DEVICE)]
    assert ledger.pin(0)
    ledger.validate()


def test_a_tile_that_is_waited_for_is_not_sent_down_again() -> None:
    """Though by its size and reads it would be the first to go, and the tier that it passes is full."""
    ledger = TileLedger(20, 20, bottom=True)
    ledger.schedule([0, *[1, 2, 3, 4] * 3])
    filled(ledger, [10])
    _sink(ledger)
    for key in (1, 2, 3, 4):
        if not ledger.add(key, 10):
            land_all(ledger, ledger.plan())
            assert ledger.add(key, 10)
        ledger.release(key)
    assert not ledger.pin(0)
    moves = land_all(ledger, ledger.plan())
    assert [(move.key, move.target) for move in moves if move.key == 0] == [(0, HOST), (0, DEVICE)]
    assert ledger.pin(0)


def _sink(ledger: TileLedger) -> None:
    ledger.flush()
    land_all(ledger, ledger.plan())
    ledger._flushing = False


def test_an_export_forgets_what_reached_the_bottom() -> None:
    ledger = filled(TileLedger(100, 100, bottom=True, forgets=True), [10, 10])
    ledger.flush()
    land_all(ledger, ledger.plan())
    assert ledger.places() == {}
    assert ledger.settled
    assert set(ledger.used.values()) == {0}


def test_misuse_is_refused() -> None:
    ledger = TileLedger(100, 100, bottom=True)
    ledger.schedule([0, 1])
    filled(ledger, [80, 10])
    with pytest.raises(InvariantViolation, match="not the next"):
        ledger.pin(1)
    with pytest.raises(InvariantViolation, match="not pinned"):
        ledger.release(0)
    with pytest.raises(InvariantViolation, match="there already"):
        ledger.add(0, 1)
    (move,) = ledger.plan()
    with pytest.raises(InvariantViolation, match="copied"):
        ledger.drop(move.key)
    ledger.landed(move)
    with pytest.raises(InvariantViolation, match="begun"):
        ledger.landed(move)
    with pytest.raises(ValueError, match="host_bytes"):
        TileLedger(100, 0, bottom=True)


@pytest.mark.parametrize("damage", ["counts", "tier", "pins", "moving", "capacity"])
def test_validate_can_fail(damage: str) -> None:
    ledger = filled(TileLedger(100, 100, bottom=True), [80, 10])
    (move,) = ledger.plan()
    ledger.validate()
    tile, other = ledger._tiles[move.key], ledger._tiles[1 - int(str(move.key))]
    if damage == "counts":
        ledger.used[HOST] += 1
    elif damage == "tier":
        tile.tier = BOTTOM
    elif damage == "pins":
        tile.pins = 1
    elif damage == "moving":
        tile.move = None
    else:
        other.num_bytes += 20
        ledger.used[DEVICE] += 20
    with pytest.raises(InvariantViolation):
        ledger.validate()
