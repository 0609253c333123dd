"""Waiting for what a test only sees when it looks."""

from __future__ import annotations

from collections.abc import Callable

from torchft_like.testing.processes import holds_within

LIMIT_S = 60.0
POLL_S = 0.005


def soon(fact: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
    """Wait until something is true; return whether it came true within `limit_s` seconds."""
    return holds_within(limit_s, fact, POLL_S)


def wait_for(fact: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait until something is true, before the test goes on; fail after `limit_s` seconds."""
    assert soon(fact, limit_s), f"it did not come true within {limit_s:g} s"
