"""The first call of the processor's vector functions, made before anything depends on it.

torch computes `sqrt`, `exp` and the like on the CPU with MKL's vector functions. The first call of any of
them in a process finds out which processor it is, and notes its number twice: as it was found, and then as
the table of kernels counts. A thread that reads it in between takes another kernel, on a processor with
AVX-512 one of low accuracy (pytorch/pytorch#188792; 3 of 2,300 processes on a busy machine of two cores). A
replica's first optimizer step had weights that were wrong by 3e-5 of the step, where all others computed from
the same state and gradients.
"""

from __future__ import annotations

import torch


def call_first() -> None:
    """Call one of them in this thread alone, which settles it for all."""
    torch.full((1,), 0.5, dtype=torch.float32, device="cpu").sqrt()
