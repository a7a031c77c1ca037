"""Rotary position embeddings: which angle a position has, for every scaling type.

Owns the tables that kernels read, and which of two sets of frequencies a position uses. rope_config.py makes the sets
out of a configuration.

 * default, linear, llama3, yarn: one set, whatever the length.
 * dynamic: the set of `max_model_len`, fixed at load, so that KV computed early and late agree.
 * longrope: two sets. A sequence of more than `switch` tokens uses the long one for all of its tokens; one that grows
   beyond is computed again, as the reference does. Short and long sequences have different keys (`Rope.digest`), since
   their KV differs at equal tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rope:
    """Inverse frequencies float32 [rotary_dim / 2], and the factor on cos and sin.

    long_inv_freq, switch: the second set of longrope and the length above which it is used; 0 = no second set.
    """

    inv_freq: torch.Tensor
    scaling: float
    long_inv_freq: torch.Tensor | None = None
    switch: int = 0

    def digest(self, *, long: bool) -> bytes:
        """SHA-256 of everything that decides the rotation of a short or a long sequence."""
        hasher = hashlib.sha256(self.inv_freq.numpy().tobytes())
        hasher.update(torch.tensor([self.scaling], dtype=torch.float64).numpy().tobytes())
        if self.long_inv_freq is not None:
            hasher.update(self.long_inv_freq.numpy().tobytes() + self.switch.to_bytes(8, "little") + bytes([long]))
        return hasher.digest()

    def table(self, num_positions: int) -> torch.Tensor:
        """cos half | sin half, float32 [rows, rotary_dim]: one row per position, and where there is a second set, its
        rows after them (row = position + num_positions).
        """
        positions = torch.arange(num_positions, dtype=torch.float32)[:, None]
        angles = positions * self.inv_freq[None, :]
        if self.long_inv_freq is not None:
            angles = torch.cat([angles, positions * self.long_inv_freq[None, :]])
        return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(self.scaling).contiguous()
