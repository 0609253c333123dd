"""Marks for tests that need something that some versions of torch lack (docs/versions.md)."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

NEEDS_ALLTOALL_OF_LISTS = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.11's Gloo exchanges no lists, only tensors that are split"
)
NEEDS_RESET_OF_FSDP = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP of torch 2.11 has no reset_iter_state"
)
NEEDS_PERMUTE_TENSOR = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.11's permute_tensor cannot be compiled for three ranks"
)
NEEDS_A_GLOO_THAT_IS_SILENCED = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="with torch 2.11 it ends at its own timeout, not with the abort"
)
NEEDS_COMPARABLE_GROUPS = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.11's compiler cannot compare its own group with one in Python"
)
