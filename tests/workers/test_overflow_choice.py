"""The choice between both ways to RAM, and the cuts of a sequence, both pure."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tournant.workers.overflow_choice import FEW_ROWS, IN_PLACE_S, OverflowChoice
from tournant.workers.overflow_routes import cut_pieces

MB = 1_000_000


def known(link: float = 50e9, one_row: float = 100e9) -> OverflowChoice:
    choice = OverflowChoice()
    choice.observe_copy(100 * MB, 100 * MB / link, 0.0)
    choice.observe_in_place(1, 100 * MB, 100 * MB / one_row, 0.0)
    return choice


def test_what_is_unknown_is_tried_in_place_with_few_rows_only() -> None:
    choice = OverflowChoice()
    assert choice.is_in_place(1, 100 * MB, 0.0)
    assert choice.is_in_place(FEW_ROWS, 100 * MB, 0.0)
    assert not choice.is_in_place(FEW_ROWS + 1, 100 * MB, 0.0)
    choice.observe_in_place(1, 100 * MB, 0.001, 0.0)
    assert not choice.is_in_place(1, 100 * MB, 0.0)  # then the link


def test_the_faster_way_wins() -> None:
    assert known().is_in_place(1, 100 * MB, 0.0)
    assert not known(link=200e9).is_in_place(1, 100 * MB, 0.0)
    assert not known().is_in_place(1, int(IN_PLACE_S * 50e9), 0.0)  # so few bytes that the wait decides
    assert not known().is_in_place(512, 100 * MB, 0.0)


def test_more_rows_are_never_thought_to_be_as_fast_as_few() -> None:
    choice = known()
    one = choice.in_place_s(1, 100 * MB, 0.0)
    many = choice.in_place_s(1024, 100 * MB, 0.0)
    assert one is not None
    assert many is not None
    assert many - IN_PLACE_S == pytest.approx((one - IN_PLACE_S) * 512)
    choice.observe_in_place(1024, 100 * MB, 0.2, 0.0)
    assert choice.in_place_s(1024, 100 * MB, 0.0) == pytest.approx(IN_PLACE_S + 0.2)
    assert choice.in_place_s(600, 100 * MB, 0.0) < 0.6  # type: ignore[operator]


def test_only_many_rows_were_seen() -> None:
    choice = OverflowChoice()
    choice.observe_in_place(64, 100 * MB, 0.01, 0.0)
    assert choice.in_place_s(2, 100 * MB, 0.0) == pytest.approx(IN_PLACE_S + 0.01)


def test_a_way_that_is_not_taken_is_tried_again() -> None:
    choice = known(link=50e9, one_row=40e9)
    assert not choice.is_in_place(1, 100 * MB, 0.0)
    choice.observe_copy(100 * MB, 0.002, 60.0)
    assert choice.is_in_place(1, 100 * MB, 60.0)


@pytest.mark.parametrize("splits", [False, True])
def test_cuts_cover_all_pieces_and_fit_the_ring(splits: bool) -> None:
    generator = random.Random(splits)
    for _ in range(300):
        per_piece = generator.choice((1, 4, 16))
        num_blocks, part_blocks = generator.randrange(1, 80), per_piece * generator.randrange(1, 4)
        places = np.asarray([generator.choice((-1, -1, 3, 50)) for _ in range(num_blocks)])
        if generator.random() < 0.5:
            places[: num_blocks // 2] = 3
        places[-1] = -1
        pieces = range(generator.randrange(-(-num_blocks // per_piece)), -(-num_blocks // per_piece))
        host_blocks = 10
        cuts = cut_pieces(places, per_piece, pieces, part_blocks, 0, host_blocks if splits else None)
        walked = [piece for cut in cuts for piece in range(cut.begin, cut.end)]
        assert sorted(walked) == list(pieces)
        assert cuts[-1].end == pieces.stop
        kinds = [cut.on_cpu for cut in cuts]
        assert kinds == sorted(kinds, reverse=True)  # the CPU's first
        assert splits or not any(kinds)
        for cut in cuts:
            assert len(cut.brought) <= part_blocks
            own = range(cut.begin * per_piece, min(cut.end * per_piece, num_blocks))
            first = host_blocks if cut.on_cpu else 0
            assert cut.brought == [block for block in own if places[block] >= first]
            assert not cut.on_cpu or min(places[block] for block in own) >= 0
