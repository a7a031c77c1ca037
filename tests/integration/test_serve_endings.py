"""However `tournant serve` ends, at whatever moment, nothing of it stays: processes, folder, port."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.cluster.service_harness import free_port
from tournant.deploy.supervisor import descendants

pytestmark = [pytest.mark.ray, pytest.mark.soak]

TOURNANT = Path(sys.executable).parent / "tournant"


@contextmanager
def running(model: Path, port: int) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A `tournant serve` with run folders of its own; afterwards everything it started must go.

    After SIGKILL that takes as long as the process below needs to notice, which is the time of its imports at most.
    """
    run_folders = Path("/tmp", f"t{os.getpid()}")
    run_folders.mkdir()
    process = subprocess.Popen(
        [TOURNANT, "serve", model, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(run_folders)},
    )
    below: set[int] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            below.update(descendants(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield process, run_folders
        over.set()
        deadline = time.monotonic() + 30
        while any(Path("/proc", str(pid)).exists() for pid in below) or list(run_folders.iterdir()):
            assert time.monotonic() < deadline, (list(run_folders.iterdir()), below)
            time.sleep(0.05)
        with socket.create_server(("127.0.0.1", port)):
            pass
    finally:
        over.set()
        watcher.join()
        if process.poll() is None:
            process.kill()
        process.communicate()
        shutil.rmtree(run_folders)


@pytest.mark.parametrize("seconds", [1.0, 3.0, 5.0, 8.0, 12.0, 16.0])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_while_it_starts(tiny_model: Path, number: signal.Signals, seconds: float) -> None:
    with running(tiny_model, free_port()) as (process, _):
        time.sleep(seconds)  # any moment will do
        process.send_signal(number)
        process.wait(timeout=20)
        assert process.returncode == (-9 if number == signal.SIGKILL else 0)


def test_kill_while_it_serves(tiny_model: Path) -> None:
    with running(tiny_model, free_port()) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Ready")
        process.kill()
        process.wait(timeout=20)


def test_sigterm_lets_running_requests_end(tiny_model: Path) -> None:
    port = free_port()
    with running(tiny_model, port) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Ready")
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        chunks = client.chat.completions.create(
            model=tiny_model.name, messages=messages, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        reasons = []
        for place, chunk in enumerate(chunks):
            if place == 0:
                process.terminate()
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        assert reasons == ["length"]
        process.wait(timeout=30)
        assert process.returncode == 0
