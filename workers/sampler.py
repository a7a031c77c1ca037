"""From logits to tokens, row by row: biases, penalties, filters, one random number per token.

Owns the sampling state of every row (parameters, token counts for penalties). A row's token depends on its own logits,
parameters, tokens and (seed, answer index, position) alone, so that a resumed request continues with the same numbers
and batch mates do not matter.

Order: logit bias and minimum length, penalties, temperature, top_k, top_p, min_p, then one draw by inverse CDF in
vocabulary order. Log-probabilities are those of the unmodified logits.

Everything happens on the device of the logits and nothing waits for it: `sample` returns tensors. The CPU draws row by
row (`_draw`), a GPU for DRAW_ROWS rows at once (`draw_together`), with the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tournant.workers.batch import RowState
from tournant.workers.device import Device
from tournant.workers.messages import TokenLogprobs
from tournant.workers.sampling_params import SamplingParams

LOGPROB_FLOOR = -9999.0
DRAW_ROWS = 64  # rows drawn together: bounds memory at about 64 x vocabulary x 40 bytes
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
    """Sampling state of one row, tensors on the device. prompt_mask / counts: only for rows with penalties."""

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


class Logprobs:
    """Log-probabilities of tokens and of the most probable ones, as `tensors` of the device."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, tops: list[int]) -> None:
        """Of `tokens` int64 [N] and the tops[i] most probable ones, from float32 logits [N, vocab]."""
        self._tops = tops
        values = logits.log_softmax(dim=-1)
        self.tensors = [values.gather(1, tokens[:, None])[:, 0].clamp_min(LOGPROB_FLOOR)]
        if most := max(tops):
            best, ids = values.topk(min(most, values.shape[1]), dim=-1)
            self.tensors += [best.clamp_min(LOGPROB_FLOOR), ids]

    def read(self, tensors: Sequence[torch.Tensor]) -> list[TokenLogprobs]:
        """One item per token, from `tensors` as they arrived on the CPU."""
        chosen: list[float] = tensors[0].tolist()
        if len(tensors) == 1:
            return [TokenLogprobs(value, []) for value in chosen]
        best, ids = tensors[1].tolist(), tensors[2].tolist()
        return [
            TokenLogprobs(value, list(zip(ids[i][:top], best[i][:top], strict=True)))
            for i, (value, top) in enumerate(zip(chosen, self._tops, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: int64 [N] on the device; logprobs: of the rows `wants`, None when no row asked."""

    tokens: torch.Tensor
    wants: list[int]
    logprobs: Logprobs | None


class Sampler:
    """Chooses tokens for rows that were registered with `start`."""

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        eos_token_ids: tuple[int, ...],
        device: Device,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._rows: list[_Row | None] = [None] * max_num_seqs

    def start(self, state: RowState) -> None:
        """(Re)start a row: everything is derived from the tokens so far, so resuming equals never having stopped."""
        params = state.params
        row = _Row(params, state.seed, state.index, state.num_prompt)
        if params.min_tokens:
            stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos_token_ids))
            row.stop_ids = self._ids(sorted(stops)) if stops else None
        if params.logit_bias:
            row.bias_ids = self._ids([token for token, _ in params.logit_bias])
            row.bias = _upload_floats(self._device, [[bias for _, bias in params.logit_bias]])[0].float()
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            tokens = self._ids(state.token_ids)
            generated = tokens[state.num_prompt :]
            where = self._device.torch_device
            row.prompt_mask = torch.zeros(self._vocab_size, dtype=torch.bool, device=where)
            row.prompt_mask.index_fill_(0, tokens[: state.num_prompt], True)
            row.counts = torch.zeros(self._vocab_size, dtype=torch.float32, device=where)
            row.counts.index_add_(0, generated, torch.ones(len(generated), device=where))
        self._rows[state.row] = row

    def _ids(self, values: list[int]) -> torch.Tensor:
        return self._device.upload([np.asarray(values, dtype=np.int64)])[0]

    def sample(self, logits: torch.Tensor, rows: list[int], positions: npt.NDArray[np.int64]) -> Sampled:
        """One token per row of float32 logits [N, vocab], which are overwritten.

        positions[i]: place in its sequence of the token that is chosen (its number of tokens so far).
        """
        states = [self._state(row) for row in rows]
        wants = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        asked = self._ids(wants)
        kept = logits.index_select(0, asked) if wants else None
        for i, state in enumerate(states):
            if state.adjusts:
                self._adjust(logits[i], state, int(positions[i]))
        tokens = logits.argmax(dim=-1)
        drawing = [i for i, state in enumerate(states) if not state.params.greedy]
        draws = [uniform(states[i].seed, states[i].index, int(positions[i])) for i in drawing]
        if logits.is_cpu:
            for i, draw in zip(drawing, draws, strict=True):
                tokens[i] = _draw(logits[i], states[i].params, draw)
        else:
            for start in range(0, len(drawing), DRAW_ROWS):
                part, stop = drawing[start : start + DRAW_ROWS], start + DRAW_ROWS
                at, params = self._ids(part), [states[i].params for i in part]
                found = draw_together(logits.index_select(0, at), params, draws[start:stop], self._device)
                tokens.index_copy_(0, at, found)
        for i, state in enumerate(states):
            if state.counts is not None:
                state.counts.index_add_(0, tokens[i : i + 1], torch.ones(1, device=tokens.device))
        logprobs = None
        if kept is not None:
            tops = [states[i].params.logprobs or 0 for i in wants]
            logprobs = Logprobs(kept, tokens.index_select(0, asked), tops)
        return Sampled(tokens, wants, logprobs)

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


def _upload_floats(device: Device, columns: Sequence[Sequence[float]]) -> list[torch.Tensor]:
    """Columns of numbers as float64 tensors of the device, in one copy: an upload carries any 64 bits."""
    arrays = [np.asarray(column, dtype=np.float64).view(np.int64) for column in columns]
    return [tensor.view(torch.float64) for tensor in device.upload(arrays)]


def draw_together(
    logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float], device: Device
) -> torch.Tensor:
    """Tokens int64 [N] of rows of float32 logits [N, vocab], as `_draw` chooses them, without waiting for the device.

    All rows are sorted when one of them has top_k or top_p: the only costly part.
    """
    vocab = logits.shape[1]
    tops = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    columns = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params], draws, tops]
    temperature, top_p, min_p, draw, top_k = (column[:, None] for column in _upload_floats(device, columns))
    probabilities = (logits / temperature.float()).softmax(dim=-1)
    if any(top < vocab or p.top_p < 1.0 for top, p in zip(tops, params, strict=True)):
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = probabilities.masked_fill(logits < ordered.gather(1, top_k.long() - 1), 0.0)
        likely = probabilities.gather(1, order)
        before = likely.cumsum(dim=-1, dtype=torch.float64) - likely
        kept = (before < top_p * likely.sum(dim=-1, keepdim=True)).sum(dim=-1, keepdim=True).clamp(min=1)
        least = likely.gather(1, kept - 1).masked_fill(top_p >= 1.0, 0.0)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    least = min_p.float() * probabilities.amax(dim=-1, keepdim=True)
    probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)
    places = torch.arange(vocab, device=logits.device)
    edge = torch.where(probabilities > 0.0, places, 0).amax(dim=-1, keepdim=True)  # as in _draw
    missed = (tokens >= vocab) | (probabilities.gather(1, tokens.clamp(max=vocab - 1)) == 0.0)
    tokens = torch.where(missed, edge, tokens)
    usable = logits.amax(dim=-1, keepdim=True).isfinite()
    best = logits.nan_to_num(nan=float("-inf")).argmax(dim=-1, keepdim=True)
    return torch.where(usable, tokens, best)[:, 0]
