"""I/O orders: textbook figures by hand, every request once, no starvation under SCAN; traces and their replay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.kvstore.io_trace import TraceError, compare, format_trace, parse_trace, replay
from tournant.kvstore.policies.io_order import MERGE_BYTES, ORDERS, Fcfs, IoRequest, Scan, Sstf

TEXTBOOK = "98,183,37,122,14,124,65,67"  # the head at 53


def order_of(name: str, text: str = TEXTBOOK, start: int = 53, **options: object) -> tuple[list[int], int]:
    found = {one.order: one for one in compare(parse_trace(text), start, **options)}[name]  # type: ignore[arg-type]
    return [one.request.position for one in found.served], found.seek_distance


def test_textbook_figures() -> None:
    """Distances that can be added up by hand."""
    assert order_of("fcfs") == ([98, 183, 37, 122, 14, 124, 65, 67], 640)
    assert order_of("sstf") == ([65, 67, 37, 14, 98, 122, 124, 183], 236)
    assert order_of("scan") == ([65, 67, 98, 122, 124, 183, 37, 14], (183 - 53) + (183 - 14))
    assert order_of("scan", upward=False) == ([37, 14, 65, 67, 98, 122, 124, 183], (53 - 14) + (183 - 14))
    assert order_of("scan", upward=False, ends=(0, 199))[1] == 53 + 183
    assert order_of("scan", ends=(0, 199))[1] == (199 - 53) + (199 - 14)


def test_ties_and_the_head_itself() -> None:
    assert order_of("sstf", "60,40", 50) == ([40, 60], 30)
    assert order_of("scan", "50,50,49", 50) == ([50, 50, 49], 1)
    assert order_of("scan", "50,51", 50, upward=False) == ([50, 51], 1)


def test_neighbours_are_merged() -> None:
    run = [IoRequest(index, 1000 + index * 100, 100) for index in range(5)]
    for upward in (True, False):
        scan = Scan(0 if upward else 5000, upward=upward)
        for request in [IoRequest(9, 2000, 10), *reversed(run), IoRequest(8, 1501, 10)]:
            scan.push(request)
        calls = []
        while taken := scan.take():
            calls.append([request.id for request in taken])
        assert sorted(calls) == [[0, 1, 2, 3, 4], [8], [9]]


def test_a_merged_run_has_a_limit() -> None:
    scan = Scan()
    for index in range(3):
        scan.push(IoRequest(index, index * (MERGE_BYTES // 2), MERGE_BYTES // 2))
    assert [len(scan.take()) for _ in range(3)] == [2, 1, 0]


requests = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 100), st.integers(0, 10)), max_size=40)


@given(found=requests, start=st.integers(0, 100), upward=st.booleans())
def test_every_request_is_served_once(found: list[tuple[int, int, int]], start: int, upward: bool) -> None:
    queue = [IoRequest(index, *rest, arrival) for index, (arrival, *rest) in enumerate(found)]
    for order in (Fcfs(start), Sstf(start), Scan(start, upward=upward)):
        done = replay(queue, order)
        assert sorted(one.request.id for one in done.served) == list(range(len(queue)))
        head = start
        distance = 0
        for one in done.served:
            distance += abs(one.request.position - head)
            head = one.request.position + one.request.length
        assert done.seek_distance == distance
        assert done.runs <= len(queue)


def test_a_far_request_starves_under_sstf_and_not_under_scan() -> None:
    """Near the head a new request comes with every one served; the far one waits for all, or for one sweep."""
    queue = [IoRequest(0, 10_000, 1, 0)] + [IoRequest(index, index % 7 * 10, 1, index - 1) for index in range(1, 200)]
    waits = {done.order: next(one.wait for one in done.served if one.request.id == 0) for done in compare(queue, 0)}
    assert waits["sstf"] == 199
    assert waits["scan"] < 10
    assert waits["fcfs"] == 0


def test_a_late_request_is_not_served_before_it_comes() -> None:
    late = replay([IoRequest(0, 5, 1, 0), IoRequest(1, 0, 1, 1), IoRequest(2, 9, 1, 7)], Sstf(0))
    assert [(one.request.id, one.wait) for one in late.served] == [(0, 0), (1, 0), (2, 0)]


def test_text_form() -> None:
    queue = (IoRequest(0, 4096, 8192, 0), IoRequest(1, 0, 4096, 1))
    assert parse_trace(format_trace(queue)) == queue
    assert [request.position for request in parse_trace(" 3, 1 ,2 # all at once")] == [3, 1, 2]
    assert [request.position for request in parse_trace("7")] == [7]
    assert parse_trace("# nothing\n\n") == ()


@pytest.mark.parametrize("text", ["1 2", "1 2 3 4\n1 2 3", "0 -1 5\n0 1 2", "a,b", "0 1 99999999999999999999\n0 0 0"])
def test_a_bad_trace_names_its_line(text: str) -> None:
    with pytest.raises(TraceError, match="line 1"):
        parse_trace(text)


def test_orders_by_name() -> None:
    assert {name: factory().name for name, factory in ORDERS.items()} == {name: name for name in ORDERS}
