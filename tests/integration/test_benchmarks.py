"""Every benchmark runs to its end on model M, without peers, and shows the rows it promises; numbers are not judged."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from benchmarks import beyond_device, latency, run_all, throughput
from benchmarks.common import BenchmarkError, Options, Samples, at_least, at_most, interleave, percentile
from benchmarks.contestant import Contestant
from benchmarks.http_load import Arrivals
from benchmarks.model_costs import ModelCosts
from tests.integration.benchmark_tables import Run, check_table, run_quickly
from tournant.workers.model_files import resolve_model

pytestmark = pytest.mark.timeout(600)  # starts six processes that import torch

ROWS = {
    "contestants and correctness": ["tournant", "transformers"],
    "decode, batch 1": ["tournant", "transformers", "bound (bfloat16)"],
    "decode, batch 32": ["tournant", "transformers", "bound (bfloat16)"],
    "prefill of 2,048 tokens": ["tournant", "transformers", "bound (bfloat16)"],
    "control path per decode step, milliseconds": ["schedule", "build input", "postprocess", "sum"],
    "HTTP streams, milliseconds": ["1", "8", "32"],
    "CPU per request": ["bare uvicorn, echo", "chat completion of 1 token", "text completion of 1 token"],
    "CPU per streamed event": ["bare uvicorn, events", "chat completion, streamed"],
    "decode, 1 sequence of 8,192 tokens": ["paged, in place", "contiguous, heads packed", "contiguous, enable_gqa"],
    "decode, 32 sequences of 160 tokens": ["paged, in place", "contiguous, heads packed", "contiguous, enable_gqa"],
    "copies of blocks": ["scattered blocks", "memcpy"],
    "NVMe at queue depth 4": ["restore, 360 KiB", "write, 2 MiB"],
    "Host tier through a client": ["write, 360 KiB", "read, 2 MiB"],
    "core, CPU time": ["open, fetch and close", "used"],
    "logits on real text": ["bfloat16", "bfloat16, KV fp8_e4m3", "bfloat16, fp8_e5m2 below the device"],
    "greedy answers of the engine": ["bfloat16", "bfloat16, KV fp8_e5m2"],
    "attention in bfloat16": ["decode, 32 sequences of 160 tokens", "prefill of 128 tokens"],
    "bfloat16 blocks": ["to fp8_e4m3", "from fp8_e5m2", "copied"],
    "load or recompute": ["fast: an H200's, emulated, 4", "slow, 1"],
    "device pool overflowing": ["generated"],
    "time to first token of a 256-token prefix, raw link": ["recompute", "from RAM", "from disk"],
    "time to first token of a 256-token prefix, emulated link": ["recompute", "from RAM", "from disk"],
    "a decision, CPU time": ["64"],
    "routing replay, generated, head": ["KV-aware, 1 router", "KV-aware, 4 routers", "power of two", "round robin"],
    "routing, real engines with shared prefixes": ["KV-aware", "power of two", "round robin"],
    "a store that gives nothing": ["CPU per token of the engine's own thread, on / off"],
}
BEYOND = {
    "Context of 512 tokens, pool of 64, raw machine": ["all resident", "in place", "streamed", "from disk"],
    "Decode over an emulated link of 1024 MiB/s": ["streamed", "from disk"],
    "Attention of a decode step over 2048 tokens below the device, in place, per layer": ["bfloat16", "float32"],
    "tokens/s of weights in lower tiers": ["all on the device", "half from RAM", "half from disk"],
}


@pytest.fixture(scope="module")
def quick_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All benchmarks without Ray once: model M, one thread, one short round, no peers, no traces."""
    chosen = [one for one in run_all.HERE if one is not beyond_device]
    return run_quickly(tmp_path_factory.mktemp("bench"), tiny_model, chosen)


@pytest.mark.parametrize("title", ROWS)
def test_table_is_there(quick_run: Run, title: str) -> None:
    check_table(quick_run, title, ROWS[title])


def test_tables_of_what_is_larger_than_the_device_are_there(tiny_model: Path, tmp_path: Path) -> None:
    assert beyond_device in run_all.HERE
    found = run_quickly(tmp_path, tiny_model, [beyond_device])
    assert list(dict.fromkeys(row["table"] for row in found.rows)) == list(BEYOND)
    for title, names in BEYOND.items():
        check_table(found, title, names)


def test_json_rows_hold_every_round_and_the_machine(quick_run: Run) -> None:
    of_job = [row for row in quick_run.rows if row["table"] == "decode, batch 1"]
    row = next(row for row in of_job if row["contestant"] == "transformers")
    assert len(row["Tournant / this"]["values"]) == 1
    assert row["tokens/s"]["min"] <= row["tokens/s"]["median"] <= row["tokens/s"]["max"]
    assert row["machine"]["date"][:2] == "20"
    told = [(row["table"], *(cell for cell in row.values() if isinstance(cell, str))) for row in quick_run.rows]
    assert len(told) == len(set(told))  # no row twice
    assert {(table, name) for table, found in ROWS.items() for name in found} <= {(row[0], row[3]) for row in told}


def test_what_was_not_measured_is_said(quick_run: Run) -> None:
    for note in (
        "Not measured: vllm (no --vllm-python).",
        "Not measured: llama.cpp (no --llama-python).",
        "Not counted: azure2023_conv.csv.gz is not in the folder of --traces.",
    ):
        assert note in quick_run.printed
        assert note in quick_run.markdown


def test_memory_is_counted_where_the_traces_are(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_all.memory.run(Options(traces=traces))
    conversation = report.tables[0].rows[0]
    assert list(conversation[:2]) == ["conversation", "19,366"]
    assert 0.15 < float(str(conversation[5])) < 0.19  # mean of 1,366 tokens of 8,192
    assert "conversation" in capsys.readouterr().out


def test_rounds_alternate_and_ratios_are_taken_round_by_round() -> None:
    order: list[str] = []

    def contestant(name: str, *values: float) -> Any:
        left = list(values)
        return lambda: (order.append(name), left.pop(0))[1]

    found = interleave({"a": contestant("a", 9, 1, 2, 3), "b": contestant("b", 9, 2, 1, 6)}, rounds=3)
    assert "".join(order) == "abababab"
    assert found["a"].over(found["b"]) == Samples((0.5, 2.0, 0.5))
    assert str(found["a"].over(found["b"])) == "0.5 (0.5-2.00)"
    assert at_least(0.6, Samples((0.5, 2.0, 0.5))) == ">= 0.6: missed"
    assert at_most(0.6, Samples((0.5, 2.0, 0.5))) == "<= 0.6: met"


@pytest.mark.parametrize(
    ("events", "between"),
    [
        ([3.0], [0.0, 0.0, 0.0]),
        ([1.0, 2.0, 5.0], [1000.0, 3000.0, 0.0]),
        ([1.0, 2.0, 4.0, 5.0], [1000.0, 2000.0, 1000.0]),
    ],
)
def test_tokens_of_one_event_have_nothing_between_them(events: list[float], between: list[float]) -> None:
    found = latency.Percentiles()
    found.book([Arrivals(sent=0.5, events=events, body=b"")], new=4, seconds=2.0)
    assert found.samples("first token p99") == Samples(((events[0] - 0.5) * 1e3,))
    assert found.samples("between tokens p50") == Samples((sorted(between)[1],))
    assert found.samples("tokens/s") == Samples((2.0,))
    with pytest.raises(BenchmarkError, match="without an event"):
        found.book([Arrivals(sent=0.5, events=[], body=b"")], new=4, seconds=2.0)


def test_what_never_took_time_is_infinitely_slow_beside_it_and_nothing_has_no_percentile() -> None:
    assert Samples((1.0, 2.0)).over(Samples((0.0, 4.0))) == Samples((float("inf"), 0.5))
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(BenchmarkError, match="p99"):
        percentile([], 99)


def test_costs_count_every_weight_once(tiny_model: Path) -> None:
    costs = ModelCosts.of(tiny_model)
    with safe_open(tiny_model / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118 - not a mapping
    wanted = sum(size for name, size in sizes.items() if "norm" not in name and "embed" not in name)
    assert costs.layer_weights + costs.head_weights == wanted
    assert costs.decode_s(1, 0, bytes_per_s=1.0, flops_per_s=1e18) == 2 * wanted
    assert costs.decode_s(3, 0, bytes_per_s=1e18, flops_per_s=1.0) == 6 * wanted


class WrongContestant:
    """Answers with a token that is wrong from a given place on."""

    facts = "a stub"

    def __init__(self, wrong_from: int) -> None:
        self.wrong_from = wrong_from

    def generate(self, prompts: list[list[int]], new: int, **job: str) -> tuple[list[list[int]], float]:
        return [[int(place >= self.wrong_from) for place in range(new)] for _ in prompts], 1.0


@pytest.mark.parametrize(("wrong_from", "error"), [(5, "in float32 tournant answers"), (99, None)])
def test_wrong_tokens_stop_the_run(tiny_model: Path, wrong_from: int, error: str | None) -> None:
    contestants: Any = {"tournant": WrongContestant(wrong_from), "transformers": WrongContestant(99)}
    files, options = resolve_model(str(tiny_model)), Options(quick=True)
    idle = dict.fromkeys(contestants, 0.0)
    if error is None:
        assert throughput.check_tokens(contestants, idle, files, options).rows[0][2] == "8 of 8"
        contestants["vllm"] = WrongContestant(1)  # leaves the others after one token
        with pytest.raises(BenchmarkError, match="vllm answers"):
            throughput.check_tokens(contestants, idle | {"vllm": 0.0}, files, options)
    else:
        with pytest.raises(BenchmarkError, match=error):
            throughput.check_tokens(contestants, idle, files, options)


STUB = """
import sys
sys.path.insert(0, {peers!r})
from job_loop import serve
def load(arguments):
    print("noise of a library")
    if arguments["fails"]:
        raise SystemExit("no such model")
    return "stub", lambda prompts, new: [[1] * new for _ in prompts]
serve(load)
"""


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_contestant_is_stopped_while_it_has_nothing_to_do(tmp_path: Path) -> None:
    script = tmp_path / "stub.py"
    script.write_text(STUB.format(peers=str(Path(throughput.__file__).parent / "peers")))
    with closing(Contestant("stub", sys.executable, str(script), {"fails": False})) as stub:
        assert stub.facts == "stub"
        assert stub.generate([[1, 2], [3]], 4)[0] == [[1] * 4] * 2
        deadline = time.monotonic() + 10
        while process_state(stub.pid) != "T" and time.monotonic() < deadline:
            pass
        assert process_state(stub.pid) == "T"
        assert stub.generate([[1]], 1)[0] == [[1]]
    assert not Path(f"/proc/{stub.pid}").exists()


def test_contestant_that_fails_shows_its_log(tmp_path: Path) -> None:
    script = tmp_path / "stub.py"
    script.write_text(STUB.format(peers=str(Path(throughput.__file__).parent / "peers")))
    with pytest.raises(BenchmarkError, match=r"stub ended with code 1(.|\n)*noise of a library\nno such model"):
        Contestant("stub", sys.executable, str(script), {"fails": True})
