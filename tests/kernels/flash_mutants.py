"""Named mutants of the twin of training attention: each is a mistake that such kernels are known for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.simulation.mutants import Mutant
from tournant.kernels import flash_attention as module
from tournant.kernels.flash_attention import Rule

_FOLD, _TILES, _UNSEEN, _DLOGITS, _BACKWARD, _LOGITS, _WEIGHTS, _FORWARD = (
    getattr(module, name) for name in ("fold", "tiles", "unseen", "dlogits", "backward", "logits", "weights", "forward")
)


def _only_head_0(*args: Any) -> tuple[torch.Tensor, ...]:
    found = _BACKWARD(*args)
    for gradient in found:
        gradient[:, 1:] = 0
    return found


def _only_sequence_0(*args: Any) -> tuple[torch.Tensor, ...]:
    found = _BACKWARD(*args)
    for gradient in found:
        gradient[1:] = 0
    return found


def _first_of_the_group(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    group = q.shape[1] // k.shape[1]
    silent = torch.arange(q.shape[1]) % group != 0
    dq, _, _ = _BACKWARD(dout, q, k, *rest)
    _, dk, dv = _BACKWARD(dout.masked_fill(silent[:, None, None], 0), q, k, *rest)
    return dq, dk, dv


def _heads_in_turn(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                   lse: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, ...]:  # fmt: skip
    kv_heads, heads = k.shape[1], q.shape[1]
    order = torch.arange(heads).view(-1, kv_heads).T.flatten()
    dq, dk, dv = _BACKWARD(dout[:, order], q[:, order], k, v, out[:, order], lse[:, order].contiguous(), rule)
    return dq[:, order.argsort()], dk, dv


def _without_scale(*args: Any) -> tuple[torch.Tensor, ...]:
    dq, dk, dv = _BACKWARD(*args)
    return dq / args[-1].scale, dk, dv


def _without_delta(s: torch.Tensor, p: torch.Tensor, dp: torch.Tensor, delta: torch.Tensor, rule: Rule) -> torch.Tensor:
    return _DLOGITS(s, p, dp, torch.zeros_like(delta), rule)


def _straight_cap(s: torch.Tensor, p: torch.Tensor, dp: torch.Tensor, delta: torch.Tensor, rule: Rule) -> torch.Tensor:
    ds: torch.Tensor = _DLOGITS(s, p, dp, delta, rule._replace(softcap=0.0))
    return ds * (rule.softcap or 1.0)


def _never_faded(acc: torch.Tensor, peak: torch.Tensor, *rest: Any) -> Any:
    kept = acc.clone(), rest[0].clone()
    acc, higher, total = _FOLD(acc.zero_(), peak, rest[0].zero_(), *rest[1:])
    return acc + kept[0], higher, total + kept[1]


def _one_more(rule: Rule, rows: slice, column: slice, shift: int) -> torch.Tensor | None:
    return _UNSEEN(rule, rows, column, shift + 1)


def _from_the_left(rule: Rule, rows: slice, column: slice, shift: int) -> torch.Tensor | None:
    return _UNSEEN(rule, rows, column, 0 if shift > 0 else shift)


def _endless(rule: Rule, *rest: Any) -> torch.Tensor | None:
    return _UNSEEN(rule._replace(window=0), *rest)


def _whole_tiles(rule: Rule, num_queries: int, num_keys: int) -> Iterator[tuple[slice, list[slice]]]:
    for rows, columns in _TILES(rule, num_queries, num_keys):
        yield rows, [column for column in columns if column.stop - column.start == module.KEY_TILE] or columns


def _last_rows_left_out(rule: Rule, num_queries: int, num_keys: int) -> Iterator[tuple[slice, list[slice]]]:
    for rows, columns in _TILES(rule, num_queries, num_keys):
        yield rows, columns if rows.stop < num_queries or not rows.start else columns[:1]


def _seen_again(s: torch.Tensor, lse: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    del hidden
    p: torch.Tensor = _WEIGHTS(s, lse, None)
    return p


def _own_scale(q_tile: torch.Tensor, keys: torch.Tensor, rule: Rule) -> torch.Tensor:
    s: torch.Tensor = _LOGITS(q_tile * (keys.shape[2] ** -0.5 / rule.scale), keys, rule)
    return s


def _peak_alone(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _FORWARD(*args)
    return out, lse - 0.01


def _mutant(name: str, target: str, replacement: Any) -> Mutant:
    return Mutant(name, (), (), ((module, target, replacement),))


MUTANTS = (
    _mutant("only head 0 has gradients", "backward", _only_head_0),
    _mutant("only sequence 0 has gradients", "backward", _only_sequence_0),
    _mutant("no sum over the heads of a group", "backward", _first_of_the_group),
    _mutant("heads dealt out in turn, not in groups", "backward", _heads_in_turn),
    _mutant("dq without scale", "backward", _without_scale),
    _mutant("no delta", "dlogits", _without_delta),
    _mutant("a soft-cap without a derivative", "dlogits", _straight_cap),
    _mutant("what came before is not faded", "fold", _never_faded),
    _mutant("a row sees one key too many", "unseen", _one_more),
    _mutant("queries stand at the beginning of the keys", "unseen", _from_the_left),
    _mutant("no window", "unseen", _endless),
    _mutant("a tile that is not full is left out", "tiles", _whole_tiles),
    _mutant("the last rows see the first tile alone", "tiles", _last_rows_left_out),
    _mutant("hidden keys have gradients", "weights", _seen_again),
    _mutant("scale is always that of the head size", "logits", _own_scale),
    _mutant("lse is a little off", "forward", _peak_alone),
)
