"""Tests on a GPU: each is marked `gpu`, and skipped with the reason where there is no GPU.

Those with a `backend` run over Gloo, too, where no GPU is needed.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# The fixtures of the process groups' unit tests: a store, and members in threads.
from tests.isolation import run_isolated
from tests.unit.process_group.conftest import party, store

__all__ = ["party", "store"]

HERE = Path(__file__).parent
TEST_LIMIT_S = 110.0  # below pytest-timeout's, which ends the whole run
# torch reads the variable once in a process: how long NCCL may connect to peers that are there and do not
# answer.
os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", "5")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why_not = _why_not()
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        if _backend(item) == "baby-gloo":
            item.add_marker(pytest.mark.slow)  # it does here what gloo does, in more time
        if _needs_a_gpu(item):
            item.add_marker(pytest.mark.gpu)
            # Warnings of versions that the tests cannot choose.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if why_not is not None:
                item.add_marker(pytest.mark.skip(reason=why_not))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run each test that uses the device in a process of its own: a hang of the device ends that test
    alone.
    """
    if not item.path.is_relative_to(HERE) or not _needs_a_gpu(item) or _why_not() is not None:
        return None
    run_isolated(item, TEST_LIMIT_S)
    return True


def _needs_a_gpu(item: pytest.Item) -> bool:
    return not _backend(item).endswith("gloo")


def _backend(item: pytest.Item) -> str:
    return str(getattr(getattr(item, "callspec", None), "params", {}).get("backend", "nccl"))


@functools.cache
def _why_not() -> str | None:
    """Return why the tests are skipped; None if a GPU is there.

    Another process asks torch: if this one did, none of its forks could use the device.
    """
    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    asks = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if subprocess.run(asks, check=False).returncode:
        return "torch sees no GPU"
    return None
