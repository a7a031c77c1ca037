"""What the arrangements and the ways in cost: `direct` and `resilient`, behind Serve's proxy and behind HAProxy.

Beside them in the same rounds the app of a replica over its own engine, served by uvicorn alone. All have a model that
computes next to nothing and answer a chat with one token. Counted are requests per second with all users at once, the
time of a lone request until its token, and CPU seconds by process of everything but the engine and the client.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve

from benchmarks.common import BenchmarkError, Options, Report, Samples, Table, apart, run_main, say
from benchmarks.http_load import ServerProcess, load
from benchmarks.ingress import MESSAGES, USERS
from benchmarks.own_ray import own_ray
from tests.helpers.tiny_model import build_tiny_model
from tournant.deploy.app import make_app
from tournant.deploy.config import parse_config
from tournant.deploy.local_ray import QUIET

ARRANGEMENTS = ("direct", "resilient")
CPUS = 8  # as Ray counts them: every deployment asks for one
HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}
ALONE = "uvicorn alone"
TICKS = os.sysconf("SC_CLK_TCK")


def run(options: Options) -> Report:
    """Both ways in, each on a Ray of its own in a process of its own, for Serve reads its settings once."""
    report = Report("HTTP ingress, arrangements")
    report.tables += apart(behind_proxy, options).tables
    if not options.quick:
        with _environment(HAPROXY):
            report.tables += apart(behind_haproxy, options).tables
    return report


def behind_proxy(options: Options) -> Report:
    """Serve as it is by default."""
    return _report("Serve's proxy", options)


def behind_haproxy(options: Options) -> Report:
    """Serve as deploy/configs/high-throughput.yaml sets it: to be called where HAPROXY is in the environment."""
    return _report("HAProxy", options)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -------------------------------------------------------------------- CPU by process


def cpu_by_role(root: int) -> Counter[str]:
    """CPU seconds so far of all processes below `root`, by what they are for."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
                seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    found: Counter[str] = Counter()
    for pid in seconds:
        above = pid
        while above not in (0, root):
            above = parents.get(above, 0)
        if above == root and pid != root:
            with contextlib.suppress(OSError):
                found[_role(pid, parents)] += seconds[pid]
    return found


def _role(pid: int, parents: Mapping[int, int]) -> str:
    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    if line.startswith("ray::ServeReplica:"):
        return line.removeprefix("ray::ServeReplica:").split(".")[0].strip()  # without the method that runs
    if "ProxyActor" in line or "haproxy" in line.split(" ", 1)[0]:
        return "proxy"
    if "tournant.workers.engine_process" in line or "engine_process.py" in line:
        return "engine"
    if "serve_ours.py" in line:
        return ALONE
    return "rest"


# -------------------------------------------------------------------- contestants


@dataclass(frozen=True, slots=True)
class Way:
    """Where a contestant is reached. counts: whether CPU of a process is its own."""

    port: int
    path: str
    counts: Callable[[str], bool]

    def flood(self, body: bytes, count: int) -> tuple[float, float, Counter[str]]:
        """Seconds and CPU seconds by process for so many requests of all users at once."""
        before = cpu_by_role(os.getpid())
        arrivals = load(self.port, USERS, [(self.path, body)] * count)
        used = cpu_by_role(os.getpid())
        used.subtract(before)
        last = max(arrival.events[-1] for arrival in arrivals)
        seconds = last - min(arrival.sent for arrival in arrivals)
        return seconds, sum(amount for role, amount in used.items() if self.counts(role)), used

    def alone(self, body: bytes, count: int) -> list[float]:
        """Seconds until the token of requests one after another, sorted."""
        return sorted(arrival.events[0] - arrival.sent for arrival in load(self.port, 1, [(self.path, body)] * count))


def _config(model: Path, folder: str, arrangement: str) -> dict[str, Any]:
    return {
        "model": str(model),
        "served_model_name": "m",
        "cache_dir": folder,
        "ingress": arrangement,
        "engine": {"device": "cpu", "dtype": "float32", "kv_cache_bytes": 16 << 20, "max_num_seqs": USERS},
        "advanced": {"num_threads": 1},
    }


def _report(way_in: str, options: Options) -> Report:
    report = Report("HTTP ingress, arrangements")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = Path(options.model) if options.model else build_tiny_model(Path(folder, "m"))
        served = ARRANGEMENTS[:1] if options.quick else ARRANGEMENTS
        ours = stack.enter_context(
            closing(ServerProcess("serve_ours.py", {"config": _config(model, folder, "direct")}))
        )
        port = stack.enter_context(_ray_serve(model, folder, served))
        ways = {ALONE: Way(ours.port, "/v1/chat/completions", lambda role: role == ALONE)}
        for name in served:
            others = tuple(other for other in ARRANGEMENTS if other != name)
            ways[f"{name}, {way_in}"] = Way(
                port,
                f"/{name}/v1/chat/completions",
                lambda role, others=others: role not in (ALONE, "engine") and not role.startswith(others),
            )
        report.add(_measured(ways, way_in, options))
    return report


@contextlib.contextmanager
def _ray_serve(model: Path, folder: str, served: tuple[str, ...]) -> Iterator[int]:
    """The port of a Serve that has each arrangement under its name."""
    with own_ray(CPUS):
        port = _free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=QUIET)
        for name in served:
            say(f"starting {name}")
            own = {"logging_config": QUIET, "graceful_shutdown_timeout_s": 2.0}
            app = make_app(parse_config(_config(model, folder, name)), own, None, own)
            serve.run(app, name=name, route_prefix=f"/{name}")
        yield port


def _measured(ways: Mapping[str, Way], way_in: str, options: Options) -> Table:
    body = json.dumps({"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 1, "stream": True}).encode()
    many, few = (2 * USERS, 10) if options.quick else (1000, 200)
    columns = ("requests/s", "p50 ms", "p99 ms", "CPU us per request")
    values: dict[str, dict[str, list[float]]] = {name: {column: [] for column in columns} for name in ways}
    shares: dict[str, Counter[str]] = {name: Counter() for name in ways}
    for turn in range(options.rounds + 1):
        for name, way in ways.items():
            waits = way.alone(body, few)
            seconds, cpu_s, used = way.flood(body, many)
            if not turn:
                continue
            found = (many / seconds, statistics.median(waits) * 1e3, waits[len(waits) * 99 // 100] * 1e3)
            for column, value in zip(columns, (*found, cpu_s / many * 1e6), strict=True):
                values[name][column].append(value)
            shares[name].update({role: amount for role, amount in used.items() if amount > 0 and role != ALONE})
    rows = []
    base = {column: Samples(tuple(values[ALONE][column])) for column in columns}
    for name in ways:
        samples = [Samples(tuple(values[name][column])) for column in columns]
        added = [a - b for a, b in zip(samples[1].values, base["p50 ms"].values, strict=True)]
        parts = ", ".join(
            f"{role} {amount / many / options.rounds * 1e6:.0f}" for role, amount in shares[name].most_common(4)
        )
        rows.append([name, *samples, "" if name == ALONE else Samples(tuple(added)), "" if name == ALONE else parts])
    if not all(rows[0][1].values):
        raise BenchmarkError("nothing was answered")
    return Table(
        f"arrangements, {way_in}",
        ("way", *columns, "added p50 ms", "CPU us per request of"),
        rows,
        [
            f"{many} chats of one streamed token over {USERS} connections; latency of {few} one after another; engines "
            "and the client are left out of CPU per request, but share the machine's cores."
        ],
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


if __name__ == "__main__":
    run_main(run, __doc__)
