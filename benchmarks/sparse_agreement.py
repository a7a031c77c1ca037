"""What sparse attention changes in answers: greedy tokens against dense attention, and the attention truly missed.

One engine in this process answers prompts cut from the documentation over a pool of some of their blocks. Dense and
sparse steps alternate on the same KV: the sparse answer goes on alone, and at some tokens of the dense answer one
sparse step follows dense ones. Beside every sparse attention the dense one is computed, so that what was missed is
known and not only bounded.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import BenchmarkError, Options, Report, Table, run_main, say
from benchmarks.model_costs import ModelCosts
from benchmarks.offload_engine import model_of
from tournant.deploy.tokenizer import Tokenizer
from tournant.kernels.block_sparse import BlockChoice
from tournant.workers.config import EngineConfig, SparseAttention
from tournant.workers.engine import Engine
from tournant.workers.engine_process import build_engine
from tournant.workers.messages import EngineRequest
from tournant.workers.model_folder import ModelFiles
from tournant.workers.model_runner import ModelRunner
from tournant.workers.models.families import describe
from tournant.workers.overflow_attention import OverflowAttention
from tournant.workers.overflow_pool import OverflowPool
from tournant.workers.sampling_params import SamplingParams
from tournant.workers.sparse_attention import SparseReader, SparseRow

BUDGETS = (0.5, 0.25)
NUM_PROMPTS, NEW_TOKENS, SHORTEST, LONGEST = 20, 32, 1000, 2000
QUICK_PROMPTS, QUICK_NEW = 2, 4
STRIDE = 8  # tokens of the dense answer from one sparse step to the next
POOL_TOKENS, BELOW_TOKENS = 256, 4096


class _Observed(SparseRow):
    """Notes the share of its attention that each head missed."""

    def __init__(self, observer: _Observer, *where: Any) -> None:
        super().__init__(observer, *where)
        self._observer = observer
        self._dense = SparseRow(observer.dense, *where)

    def read(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        choice: BlockChoice,
        scale: float,
        softcap: float,
        lse: torch.Tensor | None = None,
    ) -> frozenset[int]:
        some, whole = torch.empty(2, 1, self._observer.num_heads)
        lost = super().read(out, q, kv_cache, layer, choice, scale, softcap, some)
        everything = replace(choice, mask=np.ones_like(choice.mask))
        self._dense.read(torch.empty_like(out), q, kv_cache, layer, everything, scale, softcap, whole)
        observer = self._observer
        observer.missed.append((1.0 - torch.exp(some - whole)).numpy().ravel())
        observer.estimates.append(float(choice.missed.mean()))
        observer.bounds.append(choice.missed_at_most(some, observer.pool.layout.block_tokens))
        return lost


class _Observer(SparseReader):
    """missed: float32 [heads], of each layer and step; estimates: what the engine takes its mean for; bounds: most that
    any head could have missed.
    """

    in_one_call = False

    def __init__(self, pool: OverflowPool, budget: float, num_heads: int, readers: ThreadPoolExecutor) -> None:
        super().__init__(pool, SparseAttention(budget), num_heads, pool.host_blocks, readers, 1)
        self.dense = SparseReader(pool, SparseAttention(1.0), num_heads, pool.host_blocks, readers, 1)
        self.missed: list[npt.NDArray[np.float32]] = []
        self.estimates: list[float] = []
        self.bounds: list[float] = []

    def row(self, table: npt.NDArray[np.int64], num_device_blocks: int, context: int) -> SparseRow:
        return _Observed(self, table, num_device_blocks, context)


@dataclass
class _Found:
    """Of one budget. same: whole answers; first: tokens before the first other one; next: of single steps."""

    observer: _Observer
    same: list[bool] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    next: list[bool] = field(default_factory=list)

    def compare(self, dense: Sequence[int], sparse: Sequence[int]) -> None:
        """Add an answer."""
        equal = [a == b for a, b in zip(dense, sparse, strict=True)]
        self.same.append(all(equal))
        self.first.append([*equal, False].index(False))

    def cells(self) -> list[Any]:
        """Of a row of the table."""
        missed = np.stack(self.observer.missed)
        return [
            f"{sum(self.same)} of {len(self.same)}",
            statistics.mean(self.first),
            f"{sum(self.next)} of {len(self.next)}",
            float(missed.mean()),
            statistics.mean(self.observer.estimates),
            float(missed.max(1).mean()),
            statistics.mean(self.observer.bounds),
        ]


class _Answers:
    """Greedy answers of an engine whose sparse attention can be exchanged between requests."""

    def __init__(self, files: ModelFiles, threads: int) -> None:
        token_bytes = ModelCosts.of(files.folder).kv_token_bytes
        config = EngineConfig(
            dtype="bfloat16",
            device="cpu",
            num_threads=threads,
            deterministic=True,
            kv_cache_bytes=POOL_TOKENS * token_bytes,
            overflow_host_bytes=BELOW_TOKENS * token_bytes,
            sparse_attention=SparseAttention(1.0),  # so that bounds are kept
        )
        self._engine: Engine = build_engine(config, describe(files, config), 1)[0]
        runner = self._engine.runner
        if not isinstance(runner, ModelRunner) or runner.inputs.overflow is None:
            raise BenchmarkError("the engine has no places below its device")
        self.attention: OverflowAttention = runner.inputs.overflow
        self._number = 0

    def ask(self, prompt: Sequence[int], new: int, sparse: SparseReader | None) -> list[int]:
        """The next `new` tokens."""
        self.attention.sparse = sparse
        self._number += 1
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        outputs = self._engine.add_request(EngineRequest(self._number, list(prompt), params))
        while self._engine.has_work:
            outputs += self._engine.step()
        return [token for output in outputs for token in output.token_ids]


def _prompts(files: ModelFiles, num: int) -> list[list[int]]:
    """Pieces of the documentation, of lengths from SHORTEST to LONGEST."""
    folder = Path(__file__).parents[1] / "docs"
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md")))
    tokens = Tokenizer.from_folder(files.folder).encode(text)
    random = np.random.default_rng(0)
    lengths = random.integers(SHORTEST, LONGEST + 1, num)
    starts = random.integers(0, len(tokens) - LONGEST, num)
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def run(options: Options) -> Report:
    """The table."""
    files = model_of(options)
    num, new = (QUICK_PROMPTS, QUICK_NEW) if options.quick else (NUM_PROMPTS, NEW_TOKENS)
    answers = _Answers(files, options.threads)
    own, readers = answers.attention, ThreadPoolExecutor(1)
    found = {budget: _Found(_Observer(own.pool, budget, own.num_heads, readers)) for budget in BUDGETS}
    for number, prompt in enumerate(_prompts(files, num)):
        say(f"prompt {number + 1} of {num}, {len(prompt)} tokens")
        dense = answers.ask(prompt, new, None)
        for one in found.values():
            one.compare(dense, answers.ask(prompt, new, one.observer))
            for at in range(0, new - 1, STRIDE):
                step = answers.ask([*prompt, *dense[:at]], 2, one.observer)
                one.next.append(step == dense[at : at + 2])
    columns = (
        "blocks below that are read",
        f"all {new} tokens as dense",
        "tokens before the first other one",
        "next token after dense ones as dense",
        "attention missed, mean over heads",
        "the engine's estimate of it",
        "missed by the head that missed most",
        "certain bound of it",
    )
    rows = [[f"{budget:.0%}", *one.cells()] for budget, one in found.items()]
    title = f"Greedy answers of {num} prompts of {SHORTEST} to {LONGEST} tokens, pool of {POOL_TOKENS}"
    report = Report("Agreement of sparse with dense attention")
    report.add(Table(title, columns, rows))
    return report


if __name__ == "__main__":
    run_main(run, __doc__)
