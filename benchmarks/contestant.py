"""A contestant in a process of its own: started once, stopped (SIGSTOP) while another one works.

Owns the process group and the conversation with it (peers/job_loop.py); what is asked and compared is throughput.py's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError

PEERS = Path(__file__).parent / "peers"
START_TIMEOUT_S, JOB_TIMEOUT_S = 600.0, 600.0
LOG_TAIL_BYTES = 3000


class Contestant:
    """Starts `peers/<script>` (or a script elsewhere) under `python` and waits until it has loaded.

    `facts`: what it says of itself.

    Raises BenchmarkError with the end of its log when it dies or takes longer than START_TIMEOUT_S.
    """

    def __init__(self, name: str, python: str, script: str, arguments: Mapping[str, Any]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        # two OpenBLAS variables of some machines halve numpy's matrix products
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENBLAS_")}
        self._process = subprocess.Popen(
            [python, str(PEERS / script), json.dumps(dict(arguments))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._paused = False
        try:
            with self.awake():
                self.facts = str(self._read(START_TIMEOUT_S)["facts"])
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: list[list[int]], max_new_tokens: int, **job: Any) -> tuple[list[list[int]], float]:
        """New tokens of each prompt and the seconds they took in the contestant. Raises BenchmarkError."""
        job |= {"prompts": prompts, "max_new_tokens": max_new_tokens}
        with self.awake():
            if self._process.stdin is None:
                raise BenchmarkError(f"{self.name} has no stdin")
            with suppress(BrokenPipeError):  # then reading tells how it ended
                self._process.stdin.write(json.dumps(job) + "\n")
                self._process.stdin.flush()
            answer = self._read(JOB_TIMEOUT_S)
        tokens: list[list[int]] = answer["tokens"]
        if [len(found) for found in tokens] != [max_new_tokens] * len(prompts):
            counts = [len(found) for found in tokens]
            raise BenchmarkError(f"{self.name} gave {counts} tokens; {len(prompts)} x {max_new_tokens} were asked for")
        return tokens, float(answer["seconds"])

    def idle_cpu_share(self, seconds: float) -> float:
        """CPU seconds per second that it takes while it has nothing to do."""
        with self.awake():
            before = group_cpu_seconds(self._process.pid)
            time.sleep(seconds)
            return (group_cpu_seconds(self._process.pid) - before) / seconds

    @property
    def pid(self) -> int:
        """Of its process, which leads a process group of its own."""
        return self._process.pid

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run; afterwards it is stopped until the next time."""
        if self._paused:
            os.killpg(self._process.pid, signal.SIGCONT)
        self._paused = False
        yield
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGSTOP)
            self._paused = True

    def close(self) -> None:
        """End it and everything it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            line = "" if self._process.stdout is None else self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            code = self._process.wait()
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - LOG_TAIL_BYTES))
            tail = self._log.read().decode(errors="replace")
            raise BenchmarkError(f"{self.name} ended with code {code} (limit {timeout_s:g} s); end of its log:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def group_cpu_seconds(group: int) -> float:
    """CPU seconds, user and system, that the living processes of a process group have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
