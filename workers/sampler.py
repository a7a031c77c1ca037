"""From logits to tokens, row by row: biases, penalties, filters, one random number per token.

Owns the sampling state of every row (parameters, token counts for penalties). A row's token depends on its own logits,
parameters, tokens and (seed, answer index, position) alone, so that a resumed request continues with the same numbers
and batch mates do not matter.

Order: logit bias and minimum length, penalties, temperature, top_k, top_p, min_p, then one draw by inverse CDF in
vocabulary order. Log-probabilities are those of the unmodified logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tournant.workers.batch import RowState
from tournant.workers.messages import TokenLogprobs
from tournant.workers.sampling_params import SamplingParams

LOGPROB_FLOOR = -9999.0
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, index: int, position: int) -> float:
    """The random number in [0, 1) of answer `index` at `position` under `seed`: splitmix64 finaliser over the three.

    Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        state = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
        for value in (index, position):
            state = _mix(state + _GOLDEN * np.uint64(value + 1))
    return float(state >> np.uint64(11)) * 2.0**-53


def _mix(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(slots=True)
class _Row:
    """Sampling state of one row. prompt_mask / counts: only for rows with penalties."""

    params: SamplingParams
    seed: int
    index: int
    num_prompt: int
    stop_ids: torch.Tensor | None = None
    bias_ids: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    prompt_mask: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before the choice (then the row leaves the fast path)."""
        return self.stop_ids is not None or self.bias_ids is not None or self.counts is not None


class Sampler:
    """Chooses tokens for rows that were registered with `start`."""

    def __init__(self, vocab_size: int, max_num_seqs: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._rows: list[_Row | None] = [None] * max_num_seqs

    def start(self, state: RowState) -> None:
        """(Re)start a row: everything is derived from the tokens so far, so resuming equals never having stopped."""
        params = state.params
        row = _Row(params, state.seed, state.index, state.num_prompt)
        if params.min_tokens:
            stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos_token_ids))
            row.stop_ids = torch.tensor(sorted(stops), dtype=torch.int64) if stops else None
        if params.logit_bias:
            row.bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64)
            row.bias = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            tokens = torch.tensor(state.token_ids, dtype=torch.int64)
            row.prompt_mask = torch.zeros(self._vocab_size, dtype=torch.bool)
            row.prompt_mask[tokens[: state.num_prompt]] = True
            row.counts = torch.bincount(tokens[state.num_prompt :], minlength=self._vocab_size).float()
        self._rows[state.row] = row

    def sample(
        self, logits: torch.Tensor, rows: list[int], positions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], dict[int, TokenLogprobs]]:
        """One token per row of float32 logits [N, vocab], and log-probabilities by index for rows that asked.

        positions[i]: place in its sequence of the token that is chosen (its number of tokens so far).
        """
        states = [self._state(row) for row in rows]
        wants = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        kept = logits[wants].clone() if wants else None
        for i, state in enumerate(states):
            if state.adjusts:
                self._adjust(logits[i], state, int(positions[i]))
        tokens = logits.argmax(dim=-1).numpy()
        for i, state in enumerate(states):
            if not state.params.greedy:
                draw = uniform(state.seed, state.index, int(positions[i]))
                tokens[i] = _draw(logits[i], state.params, draw)
            if state.counts is not None:
                state.counts[tokens[i]] += 1
        logprobs: dict[int, TokenLogprobs] = {}
        if kept is not None:
            tops = [states[i].params.logprobs or 0 for i in wants]
            logprobs = dict(zip(wants, token_logprobs(kept, tokens[wants].tolist(), tops), strict=True))
        return tokens, logprobs

    def _state(self, row: int) -> _Row:
        state = self._rows[row]
        if state is None:
            raise KeyError(f"row {row} was never started")
        return state

    @staticmethod
    def _adjust(logits: torch.Tensor, row: _Row, position: int) -> None:
        params = row.params
        if row.bias_ids is not None and row.bias is not None:
            logits.index_add_(0, row.bias_ids, row.bias)
        if row.counts is not None and row.prompt_mask is not None:
            if params.repetition_penalty != 1.0:
                seen = row.prompt_mask | (row.counts > 0)
                factor = torch.where(logits > 0, 1.0 / params.repetition_penalty, params.repetition_penalty)
                logits.mul_(torch.where(seen, factor, 1.0))
            logits.sub_(row.counts, alpha=params.frequency_penalty)
            logits.sub_((row.counts > 0).float(), alpha=params.presence_penalty)
        if row.stop_ids is not None and position - row.num_prompt < params.min_tokens:
            logits.index_fill_(0, row.stop_ids, float("-inf"))


def _draw(logits: torch.Tensor, params: SamplingParams, draw: float) -> int:
    """Token of one row of float32 logits [vocab] by inverse CDF in vocabulary order over what the filters keep."""
    if not bool(logits.max().isfinite()):  # all tokens forbidden, or numbers gone wrong: no distribution to draw from
        return int(logits.nan_to_num(nan=float("-inf")).argmax())
    probabilities = (logits / params.temperature).softmax(dim=-1)
    if 0 < params.top_k < len(logits):
        probabilities = probabilities.masked_fill(logits < logits.topk(params.top_k).values[-1], 0.0)
    if params.top_p < 1.0:
        probabilities = probabilities.masked_fill(probabilities < _top_p_threshold(probabilities, params.top_p), 0.0)
    if params.min_p > 0.0:
        probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0.0)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    token = int(torch.searchsorted(cumulative, draw * cumulative[-1:], right=True))
    if token >= len(cumulative) or probabilities[token] == 0.0:  # the draw fell on a rounding edge
        token = int(probabilities.nonzero()[-1])
    return token


def _top_p_threshold(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least probable token of the smallest set whose mass reaches `top_p` of the whole.

    All tokens below (1 - top_p) / vocabulary of the whole weigh less than 1 - top_p together, so none of them is in
    the set: sorting the few others (30 us) replaces sorting the vocabulary (6 ms at 49,152).
    """
    total = probabilities.sum()
    likely = probabilities[probabilities >= total * ((1.0 - top_p) / len(probabilities))]
    ordered = likely.sort(descending=True).values
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    kept = int((before < top_p * total).sum())
    return ordered[max(kept, 1) - 1]


def token_logprobs(logits: torch.Tensor, tokens: list[int], tops: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` and of the tops[i] most probable ones, from float32 logits [N, vocab]."""
    values = logits.log_softmax(dim=-1)
    chosen = values.gather(1, torch.tensor(tokens, dtype=torch.int64)[:, None])[:, 0].clamp_min(LOGPROB_FLOOR).tolist()
    most = max(tops)
    if not most:
        return [TokenLogprobs(value, []) for value in chosen]
    best, ids = values.topk(min(most, values.shape[1]), dim=-1)
    best_list, ids_list = best.clamp_min(LOGPROB_FLOOR).tolist(), ids.tolist()
    return [
        TokenLogprobs(value, list(zip(ids_list[i][: tops[i]], best_list[i][: tops[i]], strict=True)))
        for i, value in enumerate(chosen)
    ]
