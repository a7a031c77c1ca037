"""Groups of ranks: forming, telling, two batches in flight, and what happens when a rank differs, stops or dies."""

from __future__ import annotations

import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from safetensors.torch import load_file, save_file

from tests.workers.harness import Session, files_of, make_engine
from tests.workers.parallel_harness import Ranks, Replica, prompts_of, replica
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.batch import Batch, RowState
from tournant.workers.batch_messages import batch_from_wire, batch_to_wire
from tournant.workers.errors import ConfigError
from tournant.workers.messages import FRAME_HEADER, pack_frame
from tournant.workers.rank_group import RankLost
from tournant.workers.rank_lines import RankLine
from tournant.workers.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    found.start(2)  # one for each test that kills one
    yield found
    found.close()


def batch_of(row: int, prompt: list[int], block: int) -> Batch:
    """A whole prompt of less than a block in one step, answered greedily."""
    return Batch(
        step=row,
        rows=[row],
        starts=[0],
        counts=[len(prompt)],
        rope_offsets=[0],
        token_ids=prompt,
        sampling=[0],
        new_rows=[RowState(row, prompt, len(prompt), SamplingParams(temperature=0.0), seed=0, index=0)],
        block_updates=[(row, 0, [block])],
    )


def receive(line: RankLine, data: bytes) -> None:
    """Let a line have got bytes that nobody sent."""
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    line._socket.close()
    line._socket = ours
    theirs.close()


def test_batches_survive_the_wire() -> None:
    params = SamplingParams(temperature=0.5, repetition_penalty=1.5, logit_bias=((3, 1.5),), stop_token_ids=(1, 2))
    batch = batch_of(1, [5, 6, 7], 9)
    batch.new_rows = [RowState(1, [5, 6, 7], 3, params, seed=2**64 - 1, index=2)]
    batch.prompt_logprobs = [(0, 2, None)]
    batch.copies = [(1, 2)]
    assert batch_from_wire(msgpack.unpackb(msgpack.packb(batch_to_wire(batch)))) == batch
    with pytest.raises(ValueError, match="unpack"):
        batch_from_wire(batch_to_wire(batch)[1:])


def test_messages_of_any_size(ranks: Ranks, tiny_model: Path) -> None:
    """Rows with penalties carry their tokens along: many answers of one prompt begin in the same step."""
    (prompt,) = prompts_of((700,), seed=3)

    def ask(session: Session) -> list[list[int]]:
        request = session.submit(prompt, n=32, temperature=1.0, seed=7, repetition_penalty=1.3, max_tokens=4)
        session.drain()
        return [session.tokens(request, index) for index in range(32)]

    want = ask(Session(make_engine(tiny_model, num_blocks=200)))
    running, told = Replica(ranks, tiny_model, 2, 1), []
    tell = running.group.tell

    def counted(message: list[Any]) -> None:
        told.append(len(msgpack.packb(message)))
        tell(message)

    running.group.tell = counted  # type: ignore[method-assign]
    assert ask(Session(running.engine)) == want
    assert running.close() == [""]
    assert max(told) > 100 * min(told)


def test_other_weights_form_no_group(ranks: Ranks, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="ranks 1 of m have another weights_id than rank 0"):
        Replica(ranks, tiny_model, 2, 1, weights_id=b"others")
    assert ranks.running[0].ending().startswith("ConfigError: ranks 1 of m")


def test_a_rank_that_cannot_load_says_why(ranks: Ranks, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(RankLost, match=r"^rank 1 on .*: ModelFormatError: tensor model.layers.1.mlp.up_proj.weight is"):
        Replica(ranks, tiny_model, 2, 1, weights_id=files_of(tiny_model).weights_id, others_folder=folder)
    assert ranks.running[0].ending().startswith("ModelFormatError: ")


def test_an_idle_group_stays_awake(ranks: Ranks, tiny_model: Path) -> None:
    """For longer than any rank waits; then it still answers."""
    running = Replica(ranks, tiny_model, 2, 1, timeout_s=1.0)
    tell, rested, idles = running.group.tell, threading.Event(), []

    def counted(message: list[Any]) -> None:
        idles.append(message)
        if len(idles) > 6:
            rested.set()
        tell(message)

    running.group.tell = counted  # type: ignore[method-assign]
    assert rested.wait(30)
    assert idles[0] == ["idle"]
    assert len(Session(running.engine).ask([[1, 2, 3]], max_tokens=3)[0]) == 3
    assert running.close() == [""]


def test_two_batches_are_in_flight_in_a_pipeline(ranks: Ranks, tiny_model: Path) -> None:
    """Stage 0 has done both before stage 1 does anything, and gets both answers."""
    prompts = prompts_of((9, 14), seed=4)
    want = Session(make_engine(tiny_model)).ask(prompts, max_tokens=1)
    running = Replica(ranks, tiny_model, 1, 2)
    assert running.engine._most_in_flight == 2
    (other,) = running.others
    other.signal(signal.SIGSTOP)
    try:
        pending = [running.runner.run(batch_of(row, prompt, row)) for row, prompt in enumerate(prompts)]
    finally:
        other.signal(signal.SIGCONT)
    assert [step.result().token_ids for step in pending] == want
    assert running.close() == [""]


def test_decodes_overlap_between_stages(ranks: Ranks, tiny_model: Path) -> None:
    """Two halves of the running sequences take turns: stage 0 is through the second half's step before stage 1 has
    begun the first's, and waits for no token.
    """
    prompts = prompts_of((9, 14, 20, 31), seed=6)
    want = Session(make_engine(tiny_model)).ask(prompts, max_tokens=6)
    running = Replica(ranks, tiny_model, 1, 2)
    session, engine = Session(running.engine), running.engine
    asked = [session.submit(prompt, max_tokens=6) for prompt in prompts]
    session.step()  # the prompts are in flight; more cannot be
    session.step()
    (other,) = running.others
    other.signal(signal.SIGSTOP)
    try:
        halves = [engine.scheduler.schedule(0.0) for _ in range(3)]
        assert halves.pop() is None
        begun = [(batch, running.runner.run(batch)) for batch in halves if batch is not None]
        assert [len(batch.rows) for batch, _ in begun] == [2, 2]
        assert len(running.shard._returning) == 2
    finally:
        other.signal(signal.SIGCONT)
    for batch, pending in begun:
        session.book(engine.scheduler.postprocess(batch, pending.result(), 0.0))
    session.drain()
    assert [session.tokens(request) for request in asked] == want
    assert running.close() == [""]


def test_a_rank_with_other_block_tables_ends(ranks: Ranks, tiny_model: Path) -> None:
    """Before it computes; the leader's step fails and names the cause, and so does every later one, at once."""
    running = Replica(ranks, tiny_model, 2, 1)
    session = Session(running.engine)
    session.submit(prompts_of((20,))[0], max_tokens=8)
    session.step()
    row = session.engine.scheduler.running[0].row
    running.shard.inputs.digest(batch_of(row, [1], 99))  # the leader's table alone is changed
    for _ in range(2):
        with pytest.raises(RankLost, match=r"rank 1 on .*: InvariantViolation: step 1: block tables have the digest"):
            session.engine.step()
    (output,) = session.engine.fail_all("lost")
    assert output.finish_reason == "error"
    assert running.close()[0].startswith("InvariantViolation: step 1: block tables")


def test_a_rank_that_counts_otherwise_ends(ranks: Ranks, tiny_model: Path) -> None:
    running = Replica(ranks, tiny_model, 2, 1)
    batch = batch_of(0, [1, 2], 0)
    running.group.tell(["batch", 1, running.shard.inputs.digest(batch), batch_to_wire(batch)])
    assert running.others[0].ending() == "InvariantViolation: the leader is at step 1, this rank at 0"
    running.group.close()


@pytest.mark.parametrize(
    ("told", "ending"),
    [
        (FRAME_HEADER.pack((64 << 20) + 1), "rank 0 sent what is no frame: a frame of 67108865 bytes exceeds"),
        (FRAME_HEADER.pack(1) + b"\xc1", "rank 0 sent what is no frame: "),
        (pack_frame(["batch", 0, 1, [1, 2]]), "the leader told what is no batch: not enough values"),
        (pack_frame(["batch", 0, 1, [None] * 12]), "the leader told what is no batch: 'NoneType' object is not"),
        (pack_frame(["orders", [1], []]), "the leader told 'orders', which no rank knows"),
    ],
    ids=["too long", "garbage", "short batch", "no batch", "no orders"],
)
def test_a_rank_that_hears_rubbish_ends_and_says_why(ranks: Ranks, tiny_model: Path, told: bytes, ending: str) -> None:
    running = Replica(ranks, tiny_model, 2, 1)
    running.group._lines[1].send(told)
    assert running.others[0].ending().startswith(f"InvariantViolation: {ending}")
    with pytest.raises(RankLost, match=r"rank 1 on .*: InvariantViolation: ") as lost:
        running.runner.run(batch_of(0, [1, 2], 0))
    assert ending in str(lost.value)
    running.group.close()


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (FRAME_HEADER.pack((64 << 20) + 1), "rank 1 sent what is no frame: a frame of 67108865 bytes exceeds"),
        (pack_frame(["step", b"x" * 7, None, {}]), "rank 1 returned something else than a step of 1 tokens"),
        (pack_frame(["step", [5], None, {}]), "rank 1 returned something else than a step of 1 tokens"),
        (pack_frame(["step", b"x" * 8, [1], {}]), "the last stage returned what are no log-probabilities or counts: "),
        (
            pack_frame(["step", b"x" * 8, None, {"disk_bytes": "many"}]),
            "the last stage returned what are no log-probabilities or counts: ",
        ),
    ],
    ids=["too long", "too few", "no bytes", "log-probabilities", "counts"],
)
def test_a_leader_that_gets_rubbish_for_tokens_ends_with_it(
    ranks: Ranks, tiny_model: Path, returned: bytes, why: str
) -> None:
    running = Replica(ranks, tiny_model, 1, 2)
    (line,) = running.group._lines.values()
    (other,) = running.others
    other.signal(signal.SIGSTOP)
    try:
        pending = running.runner.run(batch_of(0, [1, 2], 0))
        receive(line, returned)
        with pytest.raises(InvariantViolation, match=why):
            pending.result()
    finally:
        other.signal(signal.SIGCONT)
    with pytest.raises(RankLost, match=f"step 1 failed: {why}"):
        running.runner.run(batch_of(1, [1, 2], 1))
    running.runner.close()
    assert other.ending().startswith("RankLost: could not ")


def test_ranks_end_when_their_leader_does(ranks: Ranks, tiny_model: Path) -> None:
    running = Replica(ranks, tiny_model, 2, 1)
    running.group.close()
    assert running.others[0].ending().startswith("RankLost: could not hear from the leader")


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_a_rank_that_sleeps_is_given_up_and_cannot_harm_the_next_group(
    ranks: Ranks, tiny_model: Path, tensor: int, pipeline: int
) -> None:
    """It wakes when its group is no more, says so, and joins the next under another writer id."""
    prompts = prompts_of((20, 30))
    want = Session(make_engine(tiny_model)).ask(prompts, max_tokens=4)
    running = Replica(ranks, tiny_model, tensor, pipeline, timeout_s=1.0)
    session = Session(running.engine)
    session.submit(prompts[0], max_tokens=8)
    session.step()
    (other,) = running.others
    other.signal(signal.SIGSTOP)
    try:
        with pytest.raises(RankLost, match=r"step .* failed: could not"):
            session.drain()
    finally:
        running.group.close()
        other.signal(signal.SIGCONT)
    assert other.ending().startswith("RankLost: ")
    with replica(ranks, tiny_model, tensor, pipeline) as again:
        assert again.ask(prompts, max_tokens=4) == want


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_a_killed_rank_fails_the_step(ranks: Ranks, tiny_model: Path, tensor: int, pipeline: int) -> None:
    running = Replica(ranks, tiny_model, tensor, pipeline)
    session = Session(running.engine)
    session.submit(prompts_of((20,))[0], max_tokens=100)
    session.step()
    ranks.kill(0)
    with pytest.raises(RankLost, match=r"step .* failed: could not"):
        session.drain()
    with pytest.raises(RankLost):
        running.runner.run(batch_of(1, [1], 90))
    running.group.close()
