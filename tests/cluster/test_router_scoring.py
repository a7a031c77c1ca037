"""Where a request goes: what saves prefill, what waits, who may not be chosen, what is done when nothing is known."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kvstore.store_harness import keys
from tournant.cluster.router_index import DirectoryCopy, IndexConfig, Prefix, RouterIndex
from tournant.cluster.router_scoring import Candidate, Choice, Routed, Scoring, ScoringConfig
from tournant.cluster.routing_keys import MAX_PIECES, PIECE_BYTES, PIECE_TOKENS, head_keys, routed_call
from tournant.kvstore.directory import Changes, Position
from tournant.workers.errors import ConfigError

CHAIN = [key[:-2] + b"\x00\x01" for key in keys(64)]
PROMPT = Routed(CHAIN, 1024, 16)
HOST, NVME, REMOTE = 1, 2, 3
NAMES = [f"replica-{number}" for number in range(8)]


def prompt(number: int, tokens: int = 1024) -> Routed:
    """One that shares nothing with others."""
    return Routed([key[:-2] + b"\x00\x01" for key in keys(tokens // 16, f"p{number}")], tokens, 16)


def scoring(config: ScoringConfig | None = None, *, host: int = 0, nvme: int = 0, seed: int = 0) -> Scoring:
    """Of a router that knows of so many leading blocks of PROMPT on the nodes HOST and NVME."""
    copy = DirectoryCopy(1)
    entries = [
        (key, (HOST,) if place < host else (), (NVME,) if place < nvme else ()) for place, key in enumerate(CHAIN)
    ]
    copy.apply(0, Changes(Position(1), True, (), tuple(entries)))
    return Scoring(config or ScoringConfig(), RouterIndex(copy), Random(seed))


def best(one: Scoring, request: Routed, *candidates: Candidate) -> str:
    return one.choose(0.0, request, candidates).ranked[0]


def send(one: Scoring, request: Routed, candidates: list[Candidate], now_s: float = 0.0) -> Choice:
    choice = one.choose(now_s, request, candidates)
    (chosen,) = (candidate for candidate in candidates if candidate.replica == choice.ranked[0])
    one.sent(now_s, request, chosen, choice.computed)
    return choice


# -------------------------------------------------------------------- prefixes


def test_the_replica_that_saves_most_is_chosen_and_tiers_have_their_weights() -> None:
    there = scoring(host=40, nvme=40)
    disk, ram, nothing = Candidate("disk", NVME), Candidate("ram", HOST), Candidate("nothing", REMOTE)
    choice = there.choose(0.0, PROMPT, [nothing, disk, ram])
    assert choice == Choice(("ram", "disk", "nothing"), Prefix(0, 40, 0), 1024 - 40 * 16, "prefix")
    assert best(scoring(host=20, nvme=60), PROMPT, nothing, disk, ram) == "disk", "more on a slower tier"
    there.sent(0.0, Routed(CHAIN[:44], 704, 16), nothing, 704)
    assert best(there, PROMPT, nothing, disk, ram) == "nothing", "its device has what was sent there"


def test_what_waits_is_weighed_against_what_is_saved() -> None:
    there = scoring(ScoringConfig(queue=0.5), host=40)  # 576 tokens of worth
    other = Candidate("other", REMOTE)
    assert best(there, PROMPT, Candidate("ram", HOST, queued_tokens=900), other) == "ram"
    assert best(there, PROMPT, Candidate("ram", HOST, queued_tokens=1400), other) == "other"
    assert there.choose(0.0, PROMPT, [Candidate("ram", HOST, queued_tokens=1400), other]).why == "load"


def test_a_burst_of_one_prompt_follows_its_first() -> None:
    one, replicas = scoring(), [Candidate(name) for name in NAMES]
    first = send(one, PROMPT, replicas)
    again = send(one, PROMPT, replicas)
    assert (again.ranked[0], again.saved, again.computed, again.why) == (first.ranked[0], Prefix(64), 0, "prefix")


states = st.builds(
    Candidate,
    st.sampled_from(NAMES),
    st.sampled_from([HOST, NVME, REMOTE, None]),
    st.integers(0, 5000),
    st.integers(0, 5),
    full=st.booleans(),
    draining=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(states, max_size=8, unique_by=lambda one: one.replica),
    st.integers(0, 64),
    st.integers(0, 64),
    st.booleans(),
    st.sampled_from([PROMPT, Routed(), Routed(session="s"), replace(PROMPT, session="s"), prompt(1)]),
    st.sampled_from(NAMES),
)
def test_one_that_drains_or_is_full_is_chosen_only_if_all_are(
    candidates: list[Candidate], host: int, nvme: int, silent: bool, request: Routed, last: str
) -> None:
    one = scoring(host=host, nvme=nvme)
    if silent:
        one.index.directory.drop(0, silent=True)
    one.sent(0.0, request, Candidate(last), 10)
    choice = one.choose(1.0, request, candidates)
    assert sorted(choice.ranked) == sorted(candidate.replica for candidate in candidates)
    state = {candidate.replica: (candidate.draining, candidate.full) for candidate in candidates}
    if candidates:
        ready = [name for name, (draining, full) in state.items() if not draining and not full]
        alive = [name for name, (draining, _) in state.items() if not draining]
        assert choice.ranked[0] in (ready or alive or state)
        assert set(choice.ranked[: len(ready)]) == set(ready), "further tries too"
    else:
        assert choice == Choice((), Prefix(), request.tokens, "none")


# -------------------------------------------------------------------- equals


def test_routers_that_know_nothing_of_each_other_agree_on_cold_prompts_and_spread_them() -> None:
    replicas = [Candidate(name) for name in NAMES]
    chosen = [best(scoring(seed=1), prompt(number), *replicas) for number in range(80)]
    assert chosen == [best(scoring(seed=2), prompt(number), *reversed(replicas)) for number in range(80)]
    assert set(chosen) == set(NAMES)
    fewer = [best(scoring(), prompt(number), *replicas[1:]) for number in range(80)]
    assert all(new == old for new, old in zip(fewer, chosen, strict=True) if old != NAMES[0])


def test_the_hash_is_of_the_head_alone() -> None:
    replicas = [Candidate(name) for name in NAMES]
    for number in range(8):
        request = prompt(number, 2048)
        other = Routed([*request.keys[:64], *prompt(number + 100).keys], 2048, 16)  # 1,024 tokens are the head
        assert best(scoring(), request, *replicas) == best(scoring(), other, *replicas)


def test_a_replica_that_has_had_more_than_its_share_of_work_is_passed_over_until_that_is_long_ago() -> None:
    replicas = [Candidate(name) for name in NAMES[:2]]
    one, cold = scoring(), prompt(1)
    by_hash = best(one, cold, *replicas)
    (busy,) = (candidate for candidate in replicas if candidate.replica == by_hash)
    one.sent(0.0, prompt(2), busy, 100_000)
    assert best(one, cold, *replicas) != by_hash
    (other,) = (candidate for candidate in replicas if candidate.replica != by_hash)
    one.sent(2400.0, prompt(3), other, 1000)  # 20 times `recent_s` later
    assert one.choose(2400.0, cold, replicas).ranked[0] == by_hash


def test_work_is_shared_evenly_when_all_prompts_are_cold() -> None:
    one, replicas = scoring(), [Candidate(name) for name in NAMES[:4]]
    given_to = [send(one, prompt(number), replicas, now_s=number / 10).ranked[0] for number in range(200)]
    counts = [given_to.count(name) for name in NAMES[:4]]
    assert max(counts) <= 1.2 * sum(counts) / 4


def test_a_session_goes_where_it_went_unless_another_replica_is_much_better() -> None:
    replicas = [Candidate(name) for name in NAMES]
    one = scoring()
    for number in range(8):
        request = replace(prompt(number), session=f"s{number}")
        one.sent(0.0, Routed(session=request.session), replicas[number], 0)
        assert one.choose(0.0, request, replicas)[::3] == (
            (NAMES[number], *(n for n in NAMES if n != NAMES[number])),
            "session",
        )
    busy = [replace(replicas[0], queued_tokens=100_000), *replicas[1:]]
    assert best(one, replace(prompt(0), session="s0"), *busy) != NAMES[0]


def test_a_session_alone_is_enough_for_routers_to_agree() -> None:
    replicas = [Candidate(name) for name in NAMES]
    for number in range(20):
        request = Routed(session=f"s{number}")
        assert best(scoring(seed=1), request, *replicas) == best(scoring(seed=2), request, *replicas)


# -------------------------------------------------------------------- nothing known


def test_of_two_drawn_replicas_the_less_loaded_is_chosen_when_the_shard_is_silent() -> None:
    light, heavy = Candidate("light", queued_tokens=10), Candidate("heavy", queued_tokens=11)
    spread = set()
    for number in range(30):
        one = scoring(seed=number)
        one.index.directory.drop(0, silent=True)
        assert one.choose(0.0, prompt(0), [heavy, light])[0::3] == (("light", "heavy"), "load")
        spread.add(best(one, prompt(0), *map(Candidate, NAMES)))
    assert len(spread) > 4, "drawn, not by the hash"


def test_what_this_router_sent_counts_while_the_shard_is_silent() -> None:
    one, replicas = scoring(), [Candidate(name) for name in NAMES]
    first = send(one, PROMPT, replicas)
    one.index.directory.drop(0, silent=True)
    assert one.choose(0.0, PROMPT, replicas)[0::3] == (first.ranked, "prefix")


def test_a_request_of_which_nothing_is_known_goes_by_load() -> None:
    choice = scoring().choose(0.0, Routed(), [Candidate("a", running=3), Candidate("b", running=2)])
    assert (choice.ranked, choice.why) == (("b", "a"), "load")


def test_memory_is_bounded() -> None:
    copy = DirectoryCopy(0)
    one = Scoring(ScoringConfig(max_sessions=4), RouterIndex(copy, IndexConfig(max_hints=50)))
    replicas = [Candidate(name) for name in NAMES]
    for number in range(30):
        send(one, replace(prompt(number), session=str(number)), replicas)
    one.index.validate()
    sessions = [one.choose(0.0, Routed(session=str(number)), replicas).why for number in range(30)]
    assert sessions == ["hash"] * 26 + ["session"] * 4
    one.keep(NAMES[:1])
    assert all(not any(saved) for saved in one.index.lookup(prompt(29).keys, [(name, None) for name in NAMES[1:]]))


@pytest.mark.parametrize(
    ("name", "value"),
    [("device", 1.5), ("queue", -0.1), ("queue", math.nan), ("recent_s", 0.0), ("excess", 0.9), ("head_tokens", 0)],
)
def test_a_number_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} of a router is {value}"):
        ScoringConfig(**{name: value})  # type: ignore[arg-type]


# -------------------------------------------------------------------- keys of what comes without


def test_prompts_share_as_many_keys_as_whole_pieces_of_their_heads() -> None:
    text = "x" * 3 * PIECE_BYTES
    keys_of_it, tokens = head_keys(text)
    assert (len(keys_of_it), tokens) == (3, 3 * PIECE_TOKENS)
    assert head_keys(text + "y")[0] == keys_of_it
    changed = head_keys(text[: PIECE_BYTES + 5] + "y" + text[PIECE_BYTES + 6 :])[0]
    assert [a == b for a, b in zip(changed, keys_of_it, strict=True)] == [True, False, False]
    assert not set(head_keys(text, "salt")[0]) & set(keys_of_it)
    assert len(head_keys("x" * 200 * PIECE_BYTES)[0]) == MAX_PIECES


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        (list(range(2 * PIECE_TOKENS)), 2),
        ([{"role": "user", "content": "x" * PIECE_BYTES}], 1),
        (b"x" * PIECE_BYTES, 1),
        ("short", 0),
        ("\ud800" * PIECE_BYTES, 3),
        ([-1], 0),
        ([1, "a", object()], 0),
        (None, 0),
        ([], 0),
    ],
)
def test_any_prompt_may_be_given(asked: object, count: int) -> None:
    assert len(head_keys(asked)[0]) == count


def test_a_call_says_what_is_known() -> None:
    text = "x" * PIECE_BYTES
    plain = routed_call((text,), {}, "s")
    assert (list(plain.keys), plain.block_tokens, plain.session) == (head_keys(text)[0], PIECE_TOKENS, "s")
    assert routed_call((), {"prompt": text}, "s") == plain
    assert routed_call(({"prompt": text},), {}, "s") == plain
    assert routed_call((text,), {"cache_salt": "a"}, "s").keys == head_keys(text, "a")[0]
    assert routed_call(({"prompt": text, "cache_salt": "a"},), {}, "s").keys == head_keys(text, "a")[0]
    given_keys = routed_call((text,), {"routing_keys": CHAIN}, "", block_tokens=32)
    assert (given_keys.keys, given_keys.tokens, given_keys.block_tokens) == (CHAIN, 64 * 32, 32)
    for wrong in ([b"short"], "text", [1], 5):
        assert routed_call((text,), {"routing_keys": wrong}, "s") == plain
