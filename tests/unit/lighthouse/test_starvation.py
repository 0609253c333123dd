"""A loop that was kept from running is known to have been."""

from __future__ import annotations

import asyncio
import math
import time

from lighthouse.starvation import RECOVERY_S, StarvationWatch


def test_a_loop_that_was_blocked_was_starved_and_recovers() -> None:
    async def watch() -> None:
        watch = StarvationWatch(late_s=0.2, look_every_s=0.01)
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
