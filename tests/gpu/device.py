"""Helpers that the tests on a GPU have in common."""

from __future__ import annotations

import torch

LONG_CYCLES = 5_000_000_000  # two to five seconds of a GPU


def busy() -> None:
    """Give the current stream something to do for some seconds."""
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
