"""A loop that was kept from running is known to have been."""

from __future__ import annotations

import asyncio
import math
import time

from lighthouse.starvation import RECOVERY_S, SilenceClock


def test_time_in_which_a_loop_was_blocked_is_not_silence_of_others() -> None:
    async def measure() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        clock = SilenceClock(loop, late_s=0.2, look_every_s=0.01)
        try:
            began, silent_since = loop.time(), clock.now()
            loop.call_later(0.01, time.sleep, 1.0)
            await clock.sleep(0.5)
            return loop.time() - began, clock.now() - silent_since
        finally:
            clock.stop()

    lasted_s, silent_s = asyncio.run(measure())
    assert silent_s >= 0.5
    assert lasted_s >= 1.0 + 0.4


def test_a_loop_that_was_blocked_was_starved_and_recovers() -> None:
    async def watch() -> None:
        watch = SilenceClock(asyncio.get_running_loop(), late_s=0.2, look_every_s=0.01)
        try:
            before = asyncio.get_running_loop().time()
            time.sleep(0.5)
            assert watch.is_starved()  # before its own look, too
            await asyncio.sleep(0)
            assert before < watch.last_starved < math.inf
            while watch.is_starved():
                await asyncio.sleep(RECOVERY_S / 10)
        finally:
            watch.stop()

    asyncio.run(watch())
