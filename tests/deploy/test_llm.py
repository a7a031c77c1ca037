"""Offline use with model M: the reference's tokens, more prompts than the queue holds, errors, endings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.reference import reference_generate
from tournant.cluster.run_folder import store_sockets
from tournant.deploy.errors import PromptTooLong, RequestError
from tournant.deploy.llm import LLM
from tournant.workers.errors import ConfigError, EngineDeadError, ModelFormatError
from tournant.workers.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    cache = tmp_path_factory.mktemp("cache")
    with LLM(str(tiny_model), cache_dir=str(cache), dtype="float32", max_num_seqs=2, max_queued_requests=1) as made:
        pid = made._frontend.engine.info.pid
        yield made
    assert not Path("/proc", str(pid)).exists()
    with pytest.raises(EngineDeadError, match="closed"):
        made.generate("a", use_tqdm=False)


def test_texts_token_ids_and_chats_give_the_references_tokens(llm: LLM, tiny_model: Path) -> None:
    outputs = llm.generate(["abc", "Hello"], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["abc", "Hello"]
    assert [output.prompt_token_ids for output in outputs] == [list(b"abc"), list(b"Hello")]
    outputs += llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    outputs += llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b")]
    outputs += llm.chat(conversations, GREEDY, use_tqdm=False)
    assert len(outputs) == 6
    expected = reference_generate(tiny_model, [output.prompt_token_ids for output in outputs], GREEDY.max_tokens or 0)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_more_prompts_than_the_queue_holds_come_back_in_order(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [[place, 7] for place in range(40)]
    outputs = llm.generate(
        prompts, [SamplingParams(temperature=0, max_tokens=1 + place % 3, ignore_eos=True) for place in range(40)]
    )
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + place % 3 for place in range(40)]
    assert "40/40" in capsys.readouterr().err


def test_n_answers_and_one_prompt_as_text(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3


def test_a_bad_prompt_is_an_error_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        llm.generate([[1], [1] * 5000, [2]], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="holds at most 3"):
        llm.generate("a", SamplingParams(n=4), use_tqdm=False)
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    assert llm.generate([], use_tqdm=False) == []
    assert len(llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6


def test_a_store_comes_and_goes_with_the_llm(tiny_model: Path, tmp_path: Path) -> None:
    options = {"host_bytes": "4MiB", "nvme_bytes": "8MiB", "nvme_folder": tmp_path / "kv", "segment_bytes": "1MiB"}
    with LLM(str(tiny_model), cache_dir=str(tmp_path), dtype="float32", **options) as llm:  # type: ignore[arg-type]
        (socket,) = [path for path in store_sockets() if _owner(path) == os.getpid()]
        outputs = llm.generate("abc", GREEDY, use_tqdm=False)
        tiers = outputs[0].cached_by_tier
        assert tiers is not None
        assert (tiers.device, tiers.host, tiers.nvme) == tiers == (0, 0, 0)
    assert not socket.parent.parent.exists()
    assert (tmp_path / "kv" / "lock").exists()


def _owner(socket: Path) -> int:
    """Parent of the process that listens at a node store's socket."""
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue  # it ended meanwhile
        if str(socket).encode() in line.split(b"\0"):
            return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"host_bytes": "1KiB"}, ConfigError, r"kv_store\.host_bytes is 1024; it must be .*4096"),
        ({"host_bytes": "15TiB"}, ConfigError, "kv_store.host_bytes is .*; it must be at most"),
        ({"max_num_seq": 3}, ConfigError, "unknown key engine.max_num_seq; did you mean engine.max_num_seqs?"),
        ({"block_tokens": 5}, ConfigError, "advanced.block_tokens is 5"),
        ({"model": "/no/such/model"}, ModelFormatError, "/no/such/model"),
        (
            {"overflow_disk_bytes": "1MiB", "overflow_folder": Path("/no/such/folder"), "device": "cpu"},
            ConfigError,
            "no spill file can be made in /no/such/folder: .*; name another folder",
        ),
    ],
)
def test_a_wrong_start_is_an_error(
    tiny_model: Path, tmp_path: Path, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(**{"model": str(tiny_model), "cache_dir": str(tmp_path)} | options)  # type: ignore[arg-type]


def test_the_engine_ends_with_the_interpreter(tiny_model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from tournant.deploy.llm import LLM\n"
        "llm = LLM(sys.argv[1], cache_dir=sys.argv[2]); print(llm._frontend.engine.info.pid)\n"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, tiny_model, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert result.stderr == ""
    assert not Path("/proc", result.stdout.strip()).exists()


SPLIT = """
import os, sys
from tournant.deploy.llm import LLM
from tournant.deploy.supervisor import descendants
from tournant.workers.sampling_params import SamplingParams

llm = LLM(sys.argv[1], cache_dir=sys.argv[2], dtype="float32", num_threads=1, tensor_parallel_size=2)
(output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
print(output.outputs[0].token_ids)
print(*descendants(os.getpid()))
"""


def test_a_split_model_answers_and_ends_with_the_interpreter(tiny_model: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", SPLIT, tiny_model, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    answer, pids = result.stdout.splitlines()
    assert [json.loads(answer)] == reference_generate(tiny_model, [list(b"abc")], 6)
    assert len(pids.split()) == 2
    assert result.stderr == ""
    assert not [pid for pid in pids.split() if Path("/proc", pid).exists()]
