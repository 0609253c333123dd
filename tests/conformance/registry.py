"""Every case by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .calls import CALLS, REDUCING, REDUCTIONS, call
from .scene import Scene

# What ours do and torch's Gloo does not, and how.
BETTER: dict[str, str] = {}

CASES: dict[str, Callable[[Scene], Any]] = {
    **{name: call(name) for name in CALLS},
    **{f"{name} {reduction}": call(name, reduction) for name in REDUCING for reduction in REDUCTIONS},
}


def case(name: str) -> Callable[[Scene], Any]:
    """The function of a case."""
    return CASES[name]
