"""Layers of which each rank of a tensor-parallel group holds a share: wrappers around those a model has.

Owns which sums and which joins make the shares one again. How tensors get from rank to rank is the business of `Ranks`;
which share a rank holds, that of parallel.py. A model with one rank has none of these.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import embedding


class Ranks(Protocol):
    """The ranks that hold one stage of a model, this one included; every one of them makes the same calls in the same
    order. rank: of this one, from 0.
    """

    @property
    def rank(self) -> int: ...

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of dense [N, M] over all ranks; `part` may be overwritten. All ranks get the same bits."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[ranks, N, M] of every rank's dense [N, M]."""


class Product(Protocol):
    """x[N, I] -> [N, O], as `Linear` and `QuantizedLinear` do it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def to(self, device: torch.device) -> Product: ...


class SummedLinear:
    """A product whose inputs are spread over ranks: each has some columns of the weight, and rank 0 the bias."""

    def __init__(self, linear: Product, ranks: Ranks) -> None:
        self._linear = linear
        self._ranks = ranks

    def to(self, device: torch.device) -> SummedLinear:
        """The same weights on a device."""
        self._linear = self._linear.to(device)
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product, the same on every rank."""
        return self._ranks.sum(self._linear(x))


class GatheredLinear:
    """A product whose outputs are spread over ranks, as many on each, those beyond `outputs` in all being padding."""

    def __init__(self, linear: Product, ranks: Ranks, outputs: int) -> None:
        self._linear = linear
        self._ranks = ranks
        self._outputs = outputs

    def to(self, device: torch.device) -> GatheredLinear:
        """The same weights on a device."""
        self._linear = self._linear.to(device)
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product [N, outputs], the same on every rank."""
        parts = self._ranks.gather(self._linear(x))
        return parts.transpose(0, 1).flatten(1)[:, : self._outputs].contiguous()


class SplitEmbedding:
    """A table whose rows are spread over ranks, as many on each, in order."""

    def __init__(self, table: torch.Tensor, ranks: Ranks) -> None:
        self._table = table
        self._ranks = ranks
        self._first = ranks.rank * len(table)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[N, hidden] of token ids [N]: exact, since all ranks but one add zeros."""
        own = token_ids - self._first
        elsewhere = (own < 0) | (own >= len(self._table))
        found = embedding(own.masked_fill(elsewhere, 0), self._table)
        return self._ranks.sum(found.masked_fill_(elsewhere[:, None], 0.0))
