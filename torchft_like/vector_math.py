"""The first calls of a processor's vector functions, made before anything depends on them.

torch computes `sqrt` and the like on the CPU with MKL's vector functions. MKL 2024 looks for the kernel of
each at its first call. If several threads make that call together, one of them may run a kernel of low
accuracy over its part (pytorch/pytorch#188792; 3 of 2,300 processes on a busy machine of two cores). A
replica's first optimizer step had weights that were wrong by 3e-5 of the step, where all others computed from
the same state and gradients. From the second call on the results are right.
"""

from __future__ import annotations

import torch

VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log"),
    *("log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)


def call_first() -> None:
    """Call each vector function of this process once, in this thread alone; 11 ms, the second time 0.1 ms."""
    for dtype in (torch.float32, torch.float64):
        one_number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(one_number)
