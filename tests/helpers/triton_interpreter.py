"""The Triton kernels under Triton's interpreter, on CPU tensors, without touching anything else in the process.

Triton decides when its functions are decorated, that is when `triton` and tournant.kernels.triton are imported, whether
they will be interpreted, and looks at the environment only then. So this module sets TRITON_INTERPRET, imports both,
and puts the environment back: child processes do not inherit it. A conftest has to import it before anything imports
triton, as torch._dynamo does, and with it transformers. Compiling ahead of time needs a process of its own.

Known traps of the interpreter (Triton 3.6 to 3.9): it multiplies bfloat16 operands of tl.dot as the integers of their
bits, so attention is run in float16 and float32; it cuts float32 off to bfloat16 instead of rounding, so that bfloat16
results of other kernels are a unit in the last place off for each rounding; `tensor & scalar` of conditions is no mask.
"""

from __future__ import annotations

import os
import sys

import torch

if "triton" in sys.modules:
    raise RuntimeError("triton is imported and not interpreted; import tests.helpers.triton_interpreter earlier")
BEFORE = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
try:
    import tournant.kernels.triton.flash_attention  # noqa: F401 - not part of the back end, but interpreted with it
    from tournant.kernels.triton.backend import TritonKernels
    from tournant.kernels.triton.card import H200

    KERNELS = TritonKernels(H200)
    KERNELS.silu_mul(torch.zeros(1, 2))  # the first launch imports the rest of triton
finally:
    if BEFORE is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = BEFORE
