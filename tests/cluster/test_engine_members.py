"""The registry of engines: its pure core against a naive model, and those who speak to it over one of the test's."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from tests.deploy.async_test import async_test, settle
from tournant.cluster.engine_members import EngineMembers, Member, Members, MembersConfig, TooManyMembers
from tournant.cluster.engines_actor import EngineAnnouncer, EnginesUnavailable, EngineWatch

CONFIG = MembersConfig(lease_us=100, max_members=4)


def member(name: str, **changes: object) -> Member:
    fields: dict[str, object] = {"port": 1, "token": b"t", "node": "n", "weights_id": "w", "epoch": 0}
    return Member(**({"replica": name, "host": "h"} | fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_it_knows_what_a_naive_model_knows(seed: int) -> None:
    rng = random.Random(seed)
    core, now = EngineMembers(7, CONFIG), 0
    said: dict[str, tuple[Member, int]] = {}
    for _ in range(300):
        now += rng.choice((0, 1, 20, 60))
        before = core.members()
        name = rng.choice("abcdefghijkl")
        alive = {key for key, (_, at) in said.items() if at + 100 > now}
        said = {key: value for key, value in said.items() if key in alive}
        if rng.random() < 0.1:
            core.leave(now, name)
            said.pop(name, None)
            assert list(core._left)[-1] == name or name in core._left
        else:
            word = member(name, epoch=rng.randrange(2), state=rng.choice(("serving", "draining")))
            if name in core._left:
                core.hear(now, word)
            elif name not in alive and len(alive) >= 4:
                with pytest.raises(TooManyMembers, match="at most 4"):
                    core.hear(now, word)
            else:
                core.hear(now, word)
                said[name] = (word, now)
        after = core.members()
        assert {one.replica: one for one in after.members} == {key: word for key, (word, _) in said.items()}
        assert after.version > before.version or after.members == before.members
        assert after.incarnation == 7
        assert len(core._left) <= 4


def test_a_lease_ends_when_nothing_is_heard() -> None:
    core = EngineMembers(7, CONFIG)
    core.hear(0, member("a"))
    core.hear(60, member("b"))
    core.hear(70, member("a"))
    assert core.next_expiry_us() == 160
    core.expire(160)
    assert [one.replica for one in core.members().members] == ["a"]
    core.expire(170)
    assert core.members().members == ()
    assert core.next_expiry_us() is None


def test_a_word_that_says_nothing_new_wakes_nobody() -> None:
    core = EngineMembers(7, CONFIG)
    core.hear(0, member("a"))
    known = core.known
    core.hear(50, member("a"))
    assert core.known == known
    core.hear(60, member("a", epoch=1))
    assert core.known != known


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(member("a", token=b"secret"))


class FakeRegistry:
    """A registry in this process that can be away, and can begin again."""

    def __init__(self) -> None:
        self.core = EngineMembers(1)
        self.away = False
        self.news = asyncio.Event()
        self.heard = 0

    def begin_again(self) -> None:
        self.core = EngineMembers(self.core.known[0] + 1)
        self.wake()

    def wake(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()

    async def hear(self, member: Member) -> None:
        self._check()
        self.heard += 1
        self.core.hear(0, member)
        self.wake()

    async def leave(self, replica: str) -> None:
        self._check()
        self.core.leave(0, replica)
        self.wake()

    async def changes(self, known: tuple[int, int] | None) -> Members:
        self._check()
        while self.core.known == known:
            await self.news.wait()
            self._check()
        return self.core.members()

    def _check(self) -> None:
        if self.away:
            raise EnginesUnavailable("away")


@async_test
async def test_frontends_hear_of_engines_that_come_change_and_go_also_after_the_registry_began_again() -> None:
    registry = FakeRegistry()
    seen: list[tuple[Member, ...]] = []
    news = asyncio.Event()

    def note(members: tuple[Member, ...]) -> None:
        seen.append(members)
        news.set()

    async def heard(*expected: Member) -> None:
        while not seen or set(seen[-1]) != set(expected):
            news.clear()
            await news.wait()

    watch = EngineWatch(registry, note)
    first, second = member("a"), member("b")
    one = EngineAnnouncer(registry, first, heartbeat_s=0.01)
    two = EngineAnnouncer(registry, second, heartbeat_s=0.01)
    await heard(first, second)
    two.change(state="draining", epoch=3)
    await heard(first, replace(second, state="draining", epoch=3))
    registry.begin_again()
    await heard(first, replace(second, state="draining", epoch=3))
    registry.away = True
    registry.wake()
    await settle()
    registry.away = False
    registry.begin_again()
    await two.stop()
    await heard(first)
    await one.stop()
    await heard()
    await one.stop()
    await watch.stop()
    assert registry.heard > 4
