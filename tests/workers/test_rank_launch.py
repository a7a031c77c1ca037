"""Engines of several rank processes through their client: tokens, refusals, and that nothing outlives anything."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from tests.workers.harness import files_of
from tests.workers.launch_harness import ENDS_S, HOST, Ranks, check_answers, config_of, described
from tests.workers.test_engine_process import Answer, run
from tournant.workers import engine_client, rank_process
from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import ProcessEngineClient
from tournant.workers.errors import ConfigError, EngineDeadError
from tournant.workers.messages import pack_frame
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.families import describe
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.rank_launch import GroupPlace, LocalRanks
from tournant.workers.split import Split

PLACE = GroupPlace(
    host="127.0.0.1",
    port=1,
    channel_port=2,
    token=b"t" * 32,
    writer_id=(1 << 64) - 1,
    config=EngineConfig(device="cpu", num_threads=3, tensor_parallel_size=2),
    model=described(),
    split=Split(2, 3),
    offload=OffloadConfig("/s.sock"),
)


class Watch:
    """Processes, to see them end whoever their parent is."""

    def __init__(self, pids: list[int]) -> None:
        self._stack = ExitStack()
        self._descriptors = [os.pidfd_open(pid) for pid in pids]
        for descriptor in self._descriptors:
            self._stack.callback(os.close, descriptor)

    def all_end(self) -> bool:
        """Whether all of them end, now or in a while."""
        with self._stack:
            return all(select.select([descriptor], [], [], ENDS_S)[0] for descriptor in self._descriptors)


def test_a_place_survives_the_wire() -> None:
    assert GroupPlace.from_wire(msgpack.unpackb(msgpack.packb(PLACE.to_wire()))) == PLACE
    with pytest.raises(ValueError, match="unpack"):
        GroupPlace.from_wire(PLACE.to_wire()[1:])


def test_nothing_is_started_after_the_kill() -> None:
    ranks = LocalRanks()
    ranks.kill()
    ranks.start(PLACE)
    assert ranks.processes == []


def test_ranks_that_end_by_themselves_have_a_cause() -> None:
    """These find no leader, or are killed; one that this side has killed has none."""
    ranks = LocalRanks()
    ranks.start(replace(PLACE, split=Split(3)))
    os.kill(ranks.processes[1].process.pid, signal.SIGKILL)
    for process in ranks.processes:
        process.wait()
    causes = [
        f"rank 1 on {HOST}: ended with exit code 1; see its log",
        f"rank 2 on {HOST}: killed by signal 9",
    ]
    assert ranks.causes() == causes
    ranks.kill()
    ranks.kill()
    assert ranks.causes() == causes
    stopped = LocalRanks()
    stopped.start(replace(PLACE, split=Split(2)))
    stopped.processes[0].process.send_signal(signal.SIGSTOP)
    stopped.kill()
    assert stopped.causes() == []
    assert stopped.processes[0].process.returncode == -signal.SIGKILL


def test_a_rank_that_is_killed_ends_an_idle_engine(tiny_model: Path) -> None:
    async def scenario() -> None:
        ranks = Ranks()
        client = await ProcessEngineClient.start(config_of(1, 2), files_of(tiny_model), launcher=ranks)
        await check_answers(client, tiny_model)
        assert await client.validate() == ""
        os.kill(ranks.pid(1), signal.SIGKILL)
        why = await client.wait_ended()
        assert why == f"rank 1 on {HOST} (process {ranks.pid(1)}): its process ended"
        with pytest.raises(EngineDeadError):
            Answer(client, [1])
        await client.close()
        assert client.process.returncode == 1

    run(scenario)


def test_a_rank_that_is_killed_ends_all_requests(tiny_model: Path) -> None:
    """While another one is stopped, which is killed then."""

    async def scenario() -> None:
        ranks = Ranks()
        client = await ProcessEngineClient.start(config_of(4, 1), files_of(tiny_model), launcher=ranks)
        await check_answers(client, tiny_model)
        answers = [Answer(client, [number], n=2, max_tokens=900) for number in range(3)]
        await answers[-1].first.wait()
        os.kill(ranks.pid(3), signal.SIGSTOP)
        os.kill(ranks.pid(2), signal.SIGKILL)
        for answer in answers:
            await answer.done.wait()
            ends = [(output.index, output.error or "") for output in answer.outputs if output.finish_reason == "error"]
            assert sorted(index for index, _ in ends) == [0, 1]
            assert all(error.startswith(f"rank 2 on {HOST} (process ") for _, error in ends)
        await client.close()
        assert [process.process.returncode for process in ranks.processes][1:] == [-signal.SIGKILL, -signal.SIGKILL]

    run(scenario)


def test_ranks_end_with_their_engine(tiny_model: Path) -> None:
    """By themselves: nobody kills them here."""

    async def scenario() -> None:
        ranks = Ranks(kills=False)
        client = await ProcessEngineClient.start(config_of(2, 2), files_of(tiny_model), launcher=ranks)
        await check_answers(client, tiny_model)
        answer = Answer(client, [1, 2, 3], max_tokens=900)
        await answer.first.wait()
        os.kill(client.info.pid, signal.SIGKILL)
        await answer.done.wait()
        assert answer.outputs[-1].finish_reason == "error"
        for process in ranks.processes:
            process.process.wait(ENDS_S)
        await client.close()

    run(scenario)


PARENT = """
import asyncio, sys
from pathlib import Path
from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import ProcessEngineClient
from tournant.workers.model_folder import ModelFiles
from tournant.workers.rank_launch import LocalRanks

async def main():
    config = EngineConfig(dtype="float32", kv_cache_bytes=1 << 22, num_threads=1, tensor_parallel_size=2)
    ranks = LocalRanks()
    files = ModelFiles(Path(sys.argv[1]), "m", bytes.fromhex(sys.argv[2]))
    client = await ProcessEngineClient.start(config, files, launcher=ranks)
    print(client.info.pid, *(process.process.pid for process in ranks.processes), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_all_ranks_end_with_the_parent(tiny_model: Path) -> None:
    command = [sys.executable, "-P", "-c", PARENT, str(tiny_model), files_of(tiny_model).weights_id.hex()]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    if parent.stdout is None:
        raise OSError("no pipe")
    with parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    watch = Watch(pids)
    parent.kill()
    parent.wait()
    assert watch.all_end()


class NoRanks:
    """Cannot start any, or they end at once."""

    host = "127.0.0.1"

    def __init__(self, error: Exception | None = None, causes: tuple[str, ...] = ()) -> None:
        self.error = error
        self.found = causes
        self.killed = False

    def start(self, place: GroupPlace) -> None:
        assert place == PLACE
        if self.error is not None:
            raise self.error

    def kill(self) -> None:
        self.killed = True

    def causes(self) -> list[str]:
        return list(self.found)


@pytest.mark.parametrize(
    ("ranks", "error", "words"),
    [
        (NoRanks(OSError("no room")), EngineDeadError, "the engine's ranks could not be started: no room"),
        (NoRanks(ConfigError("no GPU")), ConfigError, "the engine's ranks could not be started: no GPU"),
        (NoRanks(causes=("rank 1 on x: killed by signal 9",)), EngineDeadError, "rank 1 on x: killed by signal 9"),
    ],
)
def test_ranks_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, ranks: NoRanks, error: type[Exception], words: str
) -> None:
    """The engine waits for them and cannot know; whoever starts them does."""
    monkeypatch.setattr(engine_client, "LAUNCH_GRACE_S", 0.0)

    async def scenario() -> None:
        with subprocess.Popen(["sleep", "600"]) as engine:
            client = ProcessEngineClient(engine, ranks)
            ours, theirs = socket.socketpair()
            with theirs:
                await asyncio.get_running_loop().create_unix_connection(lambda: client, sock=ours)
                theirs.sendall(pack_frame(["forming", PLACE.to_wire()]))
                with pytest.raises(error, match=words):
                    await client._until_ready()
            engine.kill()
            await client.close()
        assert ranks.killed

    run(scenario)


def test_an_impossible_split_is_refused_before_weights_are_read(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    ranks = NoRanks()

    async def scenario() -> None:
        files = ModelFiles(tmp_path, "m", b"w" * 32)
        with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3, but .*; possible are 1, 2, 4$"):
            await ProcessEngineClient.start(config_of(3, 1), files, launcher=ranks)

    run(scenario)


def test_a_rank_with_other_weights_is_refused(tiny_model: Path, tiny_models: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "m")
    shutil.copy(tiny_models["tied"] / "model.safetensors", tmp_path / "m")
    files = files_of(tiny_model)

    async def scenario() -> None:
        launcher = Ranks(model=describe(replace(files, folder=tmp_path / "m"), PLACE.config).to_wire())
        with pytest.raises(ConfigError, match=rf"^rank 1 on {HOST} .*: the weights in {tmp_path}/m are not those of"):
            await ProcessEngineClient.start(config_of(2, 1), files, launcher=launcher)
        assert launcher.processes[0].process.returncode is not None, "it is gone"

    run(scenario)


def test_a_rank_that_read_weights_while_they_were_overwritten_computes_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model, folder)
    files = files_of(folder)

    def load(*_: object) -> None:
        with (folder / "config.json").open("a") as config:
            config.write(" ")

    for name in ("find_store", "RankGroup", "Membership"):
        monkeypatch.setattr(rank_process, name, lambda *_, **__: None)
    monkeypatch.setattr(rank_process, "ShardRunner", load)
    place = replace(PLACE, model=describe(files, PLACE.config).to_wire(), offload=None)
    with pytest.raises(ConfigError, match=f"the weights in {folder} are not those of rank 0"):
        rank_process.run_rank(place, 1, 0, SimpleNamespace(address="127.0.0.1"), ExitStack())  # type: ignore[arg-type]
