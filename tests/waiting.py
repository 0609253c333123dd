"""Waiting for what a test only sees when it looks."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 60.0
POLL_S = 0.005


def soon(fact: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
    """Wait until something is true; return whether it came true within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def wait_for(fact: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait until something is true, before the test goes on; fail after `limit_s` seconds."""
    assert soon(fact, limit_s), f"it did not come true within {limit_s:g} s"
