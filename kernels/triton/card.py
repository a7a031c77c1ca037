"""What tile sizes depend on: the few facts of a GPU that the heuristics look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Card:
    """arch: compute capability times ten (80, 90); num_sms: multiprocessors; shared_bytes: shared memory that one
    program may take, which is also what a multiprocessor has but for 1 KiB per program.
    """

    arch: int
    num_sms: int
    shared_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """The card of a CUDA device; for the CPU, where Triton's interpreter runs, an H200, so that it takes the same
        tiles.
        """
        if device.type != "cuda":
            return H200
        found = torch.cuda.get_device_properties(device)
        shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
        return cls(found.major * 10 + found.minor, found.multi_processor_count, shared)


A100 = Card(arch=80, num_sms=108, shared_bytes=163 << 10)
H200 = Card(arch=90, num_sms=132, shared_bytes=227 << 10)
