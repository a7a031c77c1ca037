"""When an engine counts as hung: not while it speaks, computes or is starved, however long; soon when it is stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import test_engine_process as processes
from tournant.workers import engine_client
from tournant.workers.engine_watchdog import MainThread, Watchdog, look_at

WAITING, COMPUTING, STARVED, STOPPED = MainThread("S", 5), MainThread("R", 5), MainThread("R", 5), MainThread("T", 5)


def looks(watchdog: Watchdog, *threads: MainThread | None, has_requests: bool = False) -> list[str]:
    return [watchdog.look(thread, has_requests) for thread in threads]


def test_one_that_is_heard_between_looks_never_hangs() -> None:
    watchdog = Watchdog(still_looks=2, busy_looks=3)
    for _ in range(20):
        watchdog.hear(0)
        assert looks(watchdog, WAITING, WAITING) == ["", ""]


def test_a_long_step_is_no_hang_and_neither_is_a_machine_without_time_for_it() -> None:
    watchdog = Watchdog(still_looks=2, busy_looks=50)
    computing = [MainThread("S", ticks) for ticks in range(20)]  # it pauses whenever it is looked at
    assert set(looks(watchdog, *computing, *[STARVED] * 20, *[MainThread("D", 20)] * 5)) == {""}


@pytest.mark.parametrize(
    ("thread", "why"), [(STOPPED, "it was stopped"), (WAITING, "it waits for something that does not come")]
)
def test_one_that_does_nothing_hangs(thread: MainThread, why: str) -> None:
    watchdog = Watchdog(still_looks=3, busy_looks=50)
    watchdog.hear(1)
    found = looks(watchdog, *[thread] * 4)
    assert found == ["", "", "", f"the engine has said and done nothing for 3 s: {why}"]


def test_a_step_without_an_end_hangs_too() -> None:
    found = looks(Watchdog(still_looks=2, busy_looks=3), *[COMPUTING] * 4)
    assert found == ["", "", "", "the engine has not ended a step for 3 s"]


def test_one_that_has_requests_and_begins_no_step_hangs() -> None:
    watchdog = Watchdog(still_looks=9, busy_looks=3)
    found = []
    for steps in (1, 2, 2, 2):
        watchdog.hear(steps)
        found += looks(watchdog, WAITING, has_requests=True)
    assert found == ["", "", "", ""]
    watchdog.hear(2)
    assert looks(watchdog, WAITING) == [""]  # without requests there is nothing to begin
    for _ in range(3):
        watchdog.hear(2)
        assert looks(watchdog, WAITING, has_requests=True) == [""]
    watchdog.hear(2)
    (why,) = looks(watchdog, WAITING, has_requests=True)
    assert why == "the engine has begun no step for 3 s, though it has requests"


def test_what_linux_says_of_a_process() -> None:
    spin = "import sys\nsys.stdout.write('x')\nsys.stdout.flush()\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = look_at(process.pid)
        while (found := look_at(process.pid)) == first:
            pass
        assert first is not None
        assert found is not None
        assert found.state == "R" or found.cpu_ticks > first.cpu_ticks
        os.kill(process.pid, signal.SIGSTOP)
        while (found := look_at(process.pid)) is None or found.state != "T":
            pass
        assert look_at(process.pid) == found
        process.kill()
    assert look_at(process.pid) is None


@pytest.mark.parametrize(("others", "state"), [("SS", "S"), ("SR", "S"), ("SD", "D")])
def test_one_that_waits_for_a_thread_that_waits_for_a_disk_is_at_work(tmp_path: Path, others: str, state: str) -> None:
    for task, letter in enumerate("S" + others, start=7):
        folder = tmp_path / "7" / "task" / str(task)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{task} (an) engine) {letter} {' '.join(map(str, range(4, 30)))}")
    found = look_at(7, tmp_path)
    assert found == MainThread(state, 14 + 15)
    watchdog = Watchdog(still_looks=3, busy_looks=50)
    assert (looks(watchdog, *[found] * 5)[-1] == "") == (state == "D")


def test_an_engine_that_was_stopped_is_killed_and_its_requests_end_with_the_first_cause(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_client, "STILL_LOOKS", 3)
    monkeypatch.setattr(engine_client, "LOOK_S", 0.5)  # more than a beat passes in three

    async def scenario() -> None:
        async with processes.started(tiny_model) as client:
            await asyncio.sleep(2.5)  # idle for longer than that is no fault
            assert client.alive
            answer = processes.Answer(client, [1, 2, 3], max_tokens=900)
            await answer.first.wait()
            os.kill(client.process.pid, signal.SIGSTOP)
            await answer.done.wait()
            assert (answer.outputs[-1].finish_reason, client.alive) == ("error", False)
            assert "it was stopped" in (answer.outputs[-1].error or "")
            assert await client.wait_ended() == answer.outputs[-1].error

    with caplog.at_level(logging.ERROR, "tournant.engine_client"):
        processes.run(scenario)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the engine has said and done nothing for 3 s: it was stopped" in line
    assert "is killed" in line
