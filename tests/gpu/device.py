"""Helpers that the tests on a GPU have in common."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tests.unit.process_group.conftest import LIMIT_S

LONG_CYCLES = 5_000_000_000  # two to five seconds of a GPU


def busy() -> None:
    """Give the current stream something to do for some seconds."""
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until `condition()`; fail the test after LIMIT_S rather than hang."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
