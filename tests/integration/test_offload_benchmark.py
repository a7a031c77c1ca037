"""Load or recompute within its bar, counted in virtual time; the overflowing pool and the demo on model M."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import offload
from benchmarks.common import BenchmarkError, Options, Samples
from benchmarks.offload_choice import Machine, replay
from benchmarks.offload_engine import TieredEngine, Tiers, model_of, thread_cpu
from benchmarks.offload_traces import BLOCK, ENDLESS, Prompt, Workload, workloads
from benchmarks.traces import GeneratorConfig, generate
from examples import demo_offload

FAST, NEAR, SLOW = (Machine(*link) for link in offload.LINKS.values())
TRACE = generate(1, GeneratorConfig(num_requests=120))


@pytest.mark.parametrize("users", offload.USERS)
@pytest.mark.parametrize("machine", [FAST, NEAR, SLOW], ids=["fast", "near", "slow"])
def test_the_estimate_is_nearly_as_good_as_the_better_policy(machine: Machine, users: int) -> None:
    seconds = {policy: replay(TRACE, machine, policy, users).total_s for policy in offload.POLICIES}
    assert seconds["auto"] <= offload.MAX_CHOICE * min(seconds["always"], seconds["never"]), seconds


def test_the_links_are_what_they_are_called() -> None:
    fast, slow = (
        replay(TRACE, machine, "always", 1).total_s / replay(TRACE, machine, "never", 1).total_s
        for machine in (FAST, SLOW)
    )
    assert fast < 1 / offload.MAX_CHOICE  # so that a planner which only ever recomputed, or only loaded, would fail
    assert slow > offload.MAX_CHOICE
    blocks = sum(len(request.keys) for request in TRACE.requests) / len(TRACE.requests)
    near = NEAR.host_bytes_per_s / NEAR.break_even(blocks * TRACE.block_tokens / 2, TRACE.block_tokens)
    assert 0.5 < near < 2


def test_virtual_seconds_are_those_of_the_machine() -> None:
    once = generate(1, GeneratorConfig(num_requests=8, oneshot_share=1.0, num_system_prompts=1, system_blocks=0))
    machine = Machine(1e9, 1e9, position_s=0.0, step_s=0.0, decode_s=0.0)
    outcome = replay(once, machine, "always", users=1, max_tokens=1)
    tokens = sum(len(request.keys) * once.block_tokens + 1 for request in once.requests)
    assert outcome.stats.prompt_tokens == tokens
    lookups = outcome.stats.tiers.lookups * machine.lookup_s
    assert outcome.total_s == pytest.approx(tokens * machine.token_s + lookups, rel=1e-3)


def test_a_shrunken_trace_keeps_its_structure(traces: Path) -> None:
    sessions, chats = workloads(traces, quick=False)
    assert (len(sessions.prompts), len(chats.prompts)) == (467, 600)
    assert max(prompt.num_tokens for prompt in (*sessions.prompts, *chats.prompts)) < offload.OVERFLOW_POOL
    assert round(sessions.hit_ratio(ENDLESS), 2) == 0.95  # of the whole trace, README of the traces: 0.951
    first, second = chats.prompts[0], chats.prompts[1]
    shared = sum(a == b for a, b in zip(first.keys, second.keys, strict=False)) * BLOCK
    assert first.tokens(49152)[:shared] == second.tokens(49152)[:shared]
    assert len(first.tokens(49152)) == first.num_tokens


def test_hit_ratio_counts_whole_blocks_of_all_prompt_tokens() -> None:
    workload = Workload("w", (Prompt((1, 2), 8), Prompt((1, 3), 8), Prompt((1, 2), 8)), "")
    assert workload.hit_ratio(ENDLESS) == (1 + 2) * BLOCK / (3 * 40)
    assert workload.hit_ratio(2) == (1 + 1) * BLOCK / (3 * 40)


def test_the_overflowing_pool_reaches_its_ceiling(tiny_model: Path, tmp_path: Path) -> None:
    options = Options(quick=True, rounds=1, threads=1, model=str(tiny_model), traces=tmp_path)
    (table,) = offload.run(options, only=["overflow"]).tables
    row = dict(zip(table.columns, table.rows[0], strict=True))
    share = row["share of the ceiling"]
    assert isinstance(share, Samples)
    assert share.median >= offload.MIN_SHARE, row
    assert int(str(row["computed on"]).replace(",", "")) < int(str(row["computed off"]).replace(",", ""))


def test_an_engine_of_a_benchmark_says_what_it_cost_and_leaves_nothing(tiny_model: Path) -> None:
    files = model_of(Options(model=str(tiny_model)))
    with TieredEngine(files, 256, 1, Tiers(1 << 24)) as engine:
        folder, pid = Path(engine._folder.name), engine.client.process.pid
        before = engine.engine_cpu()[True], engine.store_cpu()
        engine.ask([list(range(100))], 4)
        engine.settle()
        assert engine.engine_cpu()[True] > before[0]
        assert engine.store_cpu() > before[1]
        assert pid in thread_cpu(pid)
        with pytest.raises(BenchmarkError, match="at most 255"):
            engine.ask([list(range(300))], 1)
    assert not folder.exists()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.usefixtures("_small_demo")
def test_the_demo_shows_both_services(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[Path, str]] = []
    monkeypatch.setattr(demo_offload, "draw", lambda found, path, model: drawn.append((path, model)))
    picture = tmp_path / "demo.png"
    arguments = ["--model", str(tiny_model), "--threads", "1", "--chats", "3", "--turns", "2", "--png", str(picture)]
    assert demo_offload.main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "All 6 answers are the same" in printed
    assert "first token of a returning turn, p95" in printed
    rows = {name: printed.split(f"found: {name} ")[1].split("│")[1:3] for name in ("RAM", "disk")}
    without, beside = zip(*rows.values(), strict=True)
    assert [cell.strip() for cell in without] == ["0.0%", "0.0%"]
    assert any(cell.strip() != "0.0%" for cell in beside)
    assert drawn == [(picture, tiny_model.name)]


@pytest.fixture
def _small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats that fit model M, on a pool that does not hold them all; M computes as fast as anything is loaded."""
    sizes = {"FIRST_CHARACTERS": 300, "MORE_CHARACTERS": 100, "POOL_TOKENS": 700, "TOKEN_BYTES": 1024, "NEW_TOKENS": 4}
    for name, value in (sizes | {"RESTORE": "always"}).items():
        monkeypatch.setattr(demo_offload, name, value)


def test_the_demo_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `demo` is not installed")
    answers = [demo_offload.Answered(chat, turn, 0.1 + chat, (8, 4, 2, 2), [1]) for chat in range(2) for turn in (0, 1)]
    demo_offload.draw({demo_offload.OFF: answers, demo_offload.ON: answers}, tmp_path / "there" / "demo.png", "M")
    assert (tmp_path / "there" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert demo_offload.shares(answers) == [0.5, 0.25, 0.125, 0.125]
    assert demo_offload.percentile(demo_offload.returning(answers), 50) == pytest.approx(600)
