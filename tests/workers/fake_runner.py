"""A device side without a model: KV is a chain of numbers, so that any wrong block, copy or slot changes the tokens."""

from __future__ import annotations

from collections.abc import Callable

from tournant.kvstore.block import Namespace
from tournant.workers.batch import UNKNOWN_TOKEN, Batch, StepResult
from tournant.workers.config import EngineConfig
from tournant.workers.engine import Engine
from tournant.workers.messages import EngineInfo
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.transfer_messages import Link

VOCAB = 997
NAMESPACE = Namespace(weights_id=b"w" * 32, kv_form="fake", numerics="fake", layout_id=b"l" * 32)


def chain(state: int, token: int) -> int:
    """KV of a token after a prefix whose last KV is `state`."""
    return (state * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 61)


def sampled(state: int, seed: int) -> int:
    """The token that a sequence with this KV yields."""
    return (state ^ seed * 7919) % VOCAB


def expected_tokens(prompt: list[int], count: int, seed: int = 0, stop: frozenset[int] = frozenset()) -> list[int]:
    """What the fake model generates from a prompt, computed without any engine."""
    state = 0
    for token in prompt:
        state = chain(state, token)
    out: list[int] = []
    while len(out) < count:
        out.append(sampled(state, seed))
        if out[-1] in stop:
            break
        state = chain(state, out[-1])
    return out


class FakeRunner:
    """Carries batches out on a dict of slots; every entry reads its whole context back before it yields a token."""

    num_in_flight = 1

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.kv: dict[tuple[int, int], int] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.last: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        self.fail_next = False
        self.num_blocks = 0  # of the device
        self.loses: Callable[[], bool] = lambda: False  # whether a block below is lost when it is read
        self.gone: set[int] = set()

    def run(self, batch: Batch) -> StepResult:
        """See `Runner`."""
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("injected")
        for state in batch.new_rows:
            self.tables[state.row] = {}
            self.seeds[state.row] = state.seed * 131 + state.index
        self.gone.difference_update(target for _, target in batch.demotions)
        for source, target in [*batch.demotions, *batch.copies]:
            for offset in range(self.block_tokens):
                if (source, offset) in self.kv:
                    self.kv[target, offset] = self.kv[source, offset]
        for row, first, blocks in batch.block_updates:
            self.tables[row].update(enumerate(blocks, first))
        result = StepResult(token_ids=[])
        tokens, at = result.token_ids, 0
        sampling = set(batch.sampling)
        for index, (row, start, count) in enumerate(zip(batch.rows, batch.starts, batch.counts, strict=True)):
            below = {block for block in self._blocks(row, start) if block >= self.num_blocks}
            self.gone |= {block for block in below if self.loses()}
            if lost := frozenset(below & self.gone):
                result.lost[index] = lost
            state = self._read(row, start)
            for position in range(start, start + count):
                token = batch.token_ids[at]
                at += 1
                token = self.last[row] if token == UNKNOWN_TOKEN else token
                state = chain(state, token)
                self.kv[self._slot(row, position)] = state
            if index in sampling:
                self.last[row] = sampled(state, self.seeds[row])
                tokens.append(self.last[row])
            if lost and index in sampling:
                tokens[-1] = 0
        return result

    def _blocks(self, row: int, num_tokens: int) -> list[int]:
        return [self.tables[row][index] for index in range(-(-num_tokens // self.block_tokens))]

    def _slot(self, row: int, position: int) -> tuple[int, int]:
        return self.tables[row][position // self.block_tokens], position % self.block_tokens

    def _read(self, row: int, num_tokens: int) -> int:
        for position in range(num_tokens):
            self.kv[self._slot(row, position)]  # a KeyError here is a read of KV nobody wrote
        return self.kv[self._slot(row, num_tokens - 1)] if num_tokens else 0


def make_engine(
    num_blocks: int,
    block_tokens: int = 8,
    max_model_len: int = 4096,
    tiers: Callable[[FakeRunner], tuple[Link, OffloadConfig]] | None = None,
    num_below: int = 0,
    **config: object,
) -> Engine:
    """An engine over a fake device; tiers: what makes the link to those below; num_below: places of its overflow;
    keywords are EngineConfig fields.
    """
    info = EngineInfo(
        writer_id=1,
        pid=1,
        max_model_len=max_model_len,
        pool_tokens=num_blocks * block_tokens,
        block_tokens=block_tokens,
        max_num_seqs=64,
        max_queued_requests=64,
        vocab_size=VOCAB,
        eos_token_ids=(),
        dtype="fake",
        device="fake",
        namespace=NAMESPACE,
        overflow_tokens=num_below * block_tokens,
    )
    runner = FakeRunner(block_tokens)
    runner.num_blocks = num_blocks
    link, offload = tiers(runner) if tiers is not None else (None, None)
    return Engine(EngineConfig(**config), runner, info, link, offload)  # type: ignore[arg-type]
