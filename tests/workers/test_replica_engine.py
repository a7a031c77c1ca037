"""An engine that comes back: with real ranks that die, and with clients without processes for when it gives up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.fake_engine import make_info
from tests.workers.harness import files_of
from tests.workers.launch_harness import ENDS_S, HOST, Ranks, check_answers, config_of, listening
from tests.workers.test_engine_process import Answer, run
from tournant.workers import replica_engine
from tournant.workers.config import EngineConfig
from tournant.workers.errors import EngineDeadError, ModelFormatError
from tournant.workers.messages import EngineStats, TierStats
from tournant.workers.model_folder import ModelFiles, weights_id
from tournant.workers.replica_engine import MAX_DEATHS, ReplicaEngine


class Launchers:
    """Makes the launcher of each start, and keeps them."""

    def __init__(self) -> None:
        self.made: list[Ranks] = []
        self.started = asyncio.Event()

    def __call__(self) -> Ranks:
        self.made.append(Ranks())
        self.started.set()
        return self.made[-1]


def test_a_replica_comes_back(tiny_model: Path) -> None:
    """Its engine is killed while a rank is stopped; then a rank is killed, and the replica closed while it starts."""

    async def scenario() -> None:
        launchers = Launchers()
        engine = await ReplicaEngine.start(
            config_of(2, 1), files_of(tiny_model), make_launcher=launchers, first_wait_s=0.0
        )
        first, (ranks,) = engine.info, launchers.made
        assert first.namespace.numerics.endswith("/tp2")
        assert listening([first.pid, ranks.pid(1)]) == {"0100007F"}, "127.0.0.1 alone"
        await check_answers(engine, tiny_model)
        steps = engine.stats.num_steps
        long = Answer(engine, [1, 2, 3], max_tokens=900)
        await long.first.wait()
        assert engine.stats.kv_used > 0
        os.kill(ranks.pid(1), signal.SIGSTOP)
        os.kill(first.pid, signal.SIGKILL)
        await long.done.wait()
        assert (long.outputs[-1].finish_reason, long.outputs[-1].token_ids) == ("error", [])

        assert (engine.alive, engine.restarting, engine.info) == (True, True, first)
        assert (engine.stats.kv_used, engine.stats.num_running) == (0, 0)
        assert engine.stats.num_steps > steps, "counters stay for whoever reads them late"
        with pytest.raises(EngineDeadError, match="is being started anew; try again"):
            Answer(engine, [1])
        with pytest.raises(EngineDeadError, match="is being started anew; try again"):
            await engine.reset_prefix_cache()
        engine.abort([long.request_id])
        await engine.wait_ready()
        assert ranks.processes[0].process.returncode == -signal.SIGKILL, (
            "the stopped rank is gone, not only asked to go"
        )
        assert (engine.alive, engine.restarting) == (True, False)
        assert engine.info == replace(first, writer_id=engine.info.writer_id, pid=engine.info.pid)
        assert engine.info.writer_id != first.writer_id
        assert engine.info.pid != first.pid
        assert engine.stats.num_steps == 0
        await check_answers(engine, tiny_model)

        launchers.started.clear()
        last = Answer(engine, [1, 2, 3], max_tokens=900)
        await last.first.wait()
        os.kill(launchers.made[1].pid(1), signal.SIGKILL)
        await last.done.wait()
        assert (last.outputs[-1].error or "").startswith(f"rank 1 on {HOST} ")
        await launchers.started.wait()
        await engine.close()
        assert not engine.alive
        assert engine._client is None, "its start was not waited for"
        for launcher in launchers.made:
            assert all(process.process.returncode is not None for process in launcher.processes)
        with pytest.raises(EngineDeadError, match="was closed"):
            Answer(engine, [1])

    run(scenario)


def test_close_lets_everything_end(tiny_model: Path) -> None:
    """The engine and its ranks end well, and the replica does not bring them back."""

    async def scenario() -> None:
        launchers = Launchers()
        engine = await ReplicaEngine.start(config_of(1, 2), files_of(tiny_model), make_launcher=launchers)
        client = engine._client
        assert client is not None
        await engine.close()
        await engine.close()
        (ranks,) = launchers.made
        assert [client.process.returncode, ranks.processes[0].process.wait(ENDS_S)] == [0, 0]
        assert (engine.alive, engine.restarting) == (False, False)

    run(scenario)


# ---------------------------------------------------------------- without processes


class FakeClient:
    """What a ReplicaEngine needs of a client."""

    def __init__(self, number: int) -> None:
        self.info = make_info(writer_id=number)
        self.stats = EngineStats(num_steps=7, kv_total=9, tiers=TierStats(attached=1, lookups=3))
        self.num_finished = 0
        self.alive = True
        self.closed = False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(self, why: str = "killed") -> None:
        self.alive = False
        self._ended.set_result(why)

    async def wait_ended(self) -> str:
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        self.closed = True
        if self.alive:
            self.die("closed")


class Starts:
    """Stands for `ProcessEngineClient.start`: each start waits for `go` and then fails or gives a client."""

    def __init__(self) -> None:
        self.clients: list[FakeClient] = []
        self.failures: list[Exception] = []
        self.begun = 0
        self.cancelled = 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, *_: object) -> FakeClient:
        self.begun += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failures:
            raise self.failures.pop(0)
        assert all(client.closed for client in self.clients), "one at a time"
        self.clients.append(FakeClient(self.begun))
        return self.clients[-1]


def faked(
    monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Starts, list[float]], Awaitable[None]], files: bool = False
) -> None:
    """Run a scenario with fake clients; waits between starts are noted and skipped. files: whether there are any."""

    async def outer() -> None:
        starts, waits = Starts(), list[float]()
        sleep = asyncio.sleep

        async def skip(seconds: float) -> None:
            waits.append(seconds)
            await sleep(0)

        monkeypatch.setattr(replica_engine.ProcessEngineClient, "start", starts)
        monkeypatch.setattr(replica_engine.asyncio, "sleep", skip)
        if not files:
            monkeypatch.setattr(replica_engine, "check_unchanged", lambda *_: None)
        await scenario(starts, waits)

    run(outer)


async def fake_engine() -> ReplicaEngine:
    return await ReplicaEngine.start(EngineConfig(), ModelFiles(Path("/m"), "m", b"w" * 32), first_wait_s=0.5)


async def ended(engine: ReplicaEngine) -> str:
    """Why it gave up."""
    with pytest.raises(EngineDeadError) as found:
        await engine.wait_ready()
    return str(found.value)


class OnFiles:
    """A model folder of two shards, and what has been read of it."""

    def __init__(self, folder: Path) -> None:
        self.config, self.shard = folder / "model" / "config.json", folder / "model" / "model-2.safetensors"
        self.cache = folder / "cache"
        self.shard.parent.mkdir()
        for path in (self.config, self.shard.with_name("model-1.safetensors"), self.shard):
            path.write_bytes(path.name.encode())
        self.files = ModelFiles(self.shard.parent, "m", weights_id(self.shard.parent, self.cache))

    async def start(self) -> ReplicaEngine:
        return await ReplicaEngine.start(EngineConfig(), self.files, cache_dir=self.cache)

    def overwrite(self) -> None:
        """Other bytes, as many as before."""
        self.shard.write_bytes(self.shard.read_bytes().swapcase())


def test_no_engine_is_started_on_files_that_were_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would read and write KV under the name of the weights that are gone. The same bytes anew do no harm."""
    model = OnFiles(tmp_path)

    async def scenario(starts: Starts, waits: list[float]) -> None:
        engine = await model.start()
        model.config.touch()
        model.shard.write_bytes(model.shard.read_bytes())
        starts.clients[-1].die()
        await engine.wait_ready()
        starts.clients[-1].die("rank 1 was killed")
        model.overwrite()
        why = await ended(engine)
        assert why.startswith(f"the engine is not started anew: {model.shard.parent} was overwritten: its weights are ")
        assert model.files.weights_id.hex()[:12] in why
        assert why.endswith("restart to serve what is there now, or give new weights a new path and run 'tournant "
            "weights update'")  # fmt: skip
        assert (starts.begun, engine.alive, engine.restarting, engine.last_end) == (2, False, False, why)
        with pytest.raises(EngineDeadError, match="was overwritten"):
            Answer(engine, [1])
        await engine.close()

    faked(monkeypatch, scenario, files=True)


def test_no_engine_answers_that_read_files_while_they_were_overwritten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = OnFiles(tmp_path)

    async def scenario(starts: Starts, waits: list[float]) -> None:
        engine = await model.start()
        starts.go.clear()
        starts.clients[-1].die()
        while starts.begun < 2:
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.001)
        model.overwrite()
        starts.go.set()
        assert "was overwritten" in await ended(engine)
        assert (starts.begun, starts.clients[-1].closed, engine.alive) == (2, True, False)
        with pytest.raises(ModelFormatError, match="was overwritten"):
            await model.start()
        assert starts.begun == 2

    faked(monkeypatch, scenario, files=True)


def test_files_that_cannot_be_read_for_a_while_are_deaths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = OnFiles(tmp_path)

    async def scenario(starts: Starts, waits: list[float]) -> None:
        engine = await model.start()
        model.config.unlink()
        starts.clients[-1].die()
        assert "; the last time: it could not be started: [Errno 2] No such file" in await ended(engine)
        assert (starts.begun, waits) == (1, [0.5, 1.0])

    faked(monkeypatch, scenario, files=True)


def test_three_deaths_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(starts: Starts, waits: list[float]) -> None:
        engine = await fake_engine()
        for number in range(MAX_DEATHS - 1):
            starts.clients[-1].die(f"death {number}")
            await engine.wait_ready()
        starts.clients[-1].die("the last")
        assert await ended(engine) == "the engine died 3 times without an answer between; the last time: the last"
        assert (engine.alive, engine.restarting, starts.begun) == (False, False, 3)
        assert waits == [0.5, 1.0]
        with pytest.raises(EngineDeadError, match="this replica must be restarted"):
            await engine.reset_prefix_cache()
        await engine.close()

    faked(monkeypatch, scenario)


def test_an_answer_between_deaths_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(starts: Starts, waits: list[float]) -> None:
        engine = await fake_engine()
        for _ in range(4):
            starts.clients[-1].die()
            await engine.wait_ready()
            starts.clients[-1].num_finished = 1
        starts.clients[-1].die()
        await engine.wait_ready()
        assert waits == [0.5] * 5
        await engine.close()

    faked(monkeypatch, scenario)


def test_starts_that_fail_are_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(starts: Starts, waits: list[float]) -> None:
        engine = await fake_engine()
        starts.failures = [OSError("no process")]
        starts.clients[-1].die()
        await engine.wait_ready()
        assert waits == [0.5, 1.0]
        starts.clients[-1].num_finished = 1
        starts.failures = [OSError("no process"), EngineDeadError("rank 1 ended")]
        starts.clients[-1].die()
        assert (await ended(engine)).endswith("the last time: it could not be started: rank 1 ended")

    faked(monkeypatch, scenario)


def test_a_first_start_that_fails_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(starts: Starts, waits: list[float]) -> None:
        starts.failures = [EngineDeadError("rank 1 ended")]
        with pytest.raises(EngineDeadError, match="rank 1 ended"):
            await fake_engine()
        assert (starts.begun, waits) == (1, [])

    faked(monkeypatch, scenario)


def test_what_nobody_thought_of_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(starts: Starts, waits: list[float]) -> None:
        engine = await fake_engine()
        starts.failures = [ZeroDivisionError("oops")]
        starts.clients[-1].die()
        assert await ended(engine) == "it could not be kept: ZeroDivisionError: oops"

    faked(monkeypatch, scenario)


def test_close_in_the_middle_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(starts: Starts, waits: list[float]) -> None:
        engine = await fake_engine()
        starts.go.clear()
        waiting = asyncio.create_task(engine.wait_ready())
        starts.clients[-1].die()
        while starts.begun < 2:
            await asyncio.wait([waiting], timeout=0.01)
        await engine.close()
        assert (starts.cancelled, starts.clients[0].closed, engine.alive) == (1, True, False)
        with pytest.raises(EngineDeadError, match="was closed"):
            await waiting

    faked(monkeypatch, scenario)


def test_what_it_says_while_there_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(starts: Starts, waits: list[float]) -> None:
        engine = await fake_engine()
        assert engine.stats == starts.clients[0].stats
        starts.go.clear()
        starts.clients[-1].die()
        told: list[Any] = []
        while starts.begun < 2:  # at once, and all the time
            told.append((engine.stats, engine.info.writer_id, engine.alive, engine.restarting))
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.001)
        stats = EngineStats(num_steps=7, tiers=TierStats(lookups=3))
        assert all(item == (stats, 1, True, True) for item in told)
        assert told
        starts.go.set()
        await engine.wait_ready()
        assert (engine.info.writer_id, engine.stats.num_steps, engine.restarting) == (2, 7, False)
        numbers = [engine.new_request_id() for _ in range(3)]
        assert numbers == [1, 2, 3]
        await engine.close()

    faked(monkeypatch, scenario)
