"""Tests that need a GPU: each is marked `gpu`, and skipped with the reason where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# The fixtures of the process groups' unit tests: a store, and members in threads.
from tests.unit.process_group.conftest import party, store

__all__ = ["party", "store"]

HERE = Path(__file__).parent
# torch reads it once in a process: how long NCCL may connect to peers that are there and do not answer.
os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", "5")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why_not = _why_not()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if why_not is not None:
                item.add_marker(pytest.mark.skip(reason=why_not))


def _why_not() -> str | None:
    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return None
