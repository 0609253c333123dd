"""Waiting for what a test only sees when it looks."""

from __future__ import annotations

import asyncio
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


async def await_fact(fact: Callable[[], object]) -> None:
    """Wait until something is true, and let others use the loop meanwhile."""
    async with asyncio.timeout(LIMIT_S):
        while not fact():
            await asyncio.sleep(POLL_S)
