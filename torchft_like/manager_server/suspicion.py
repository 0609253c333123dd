"""What follows when a rank's session ends without a goodbye, seen from either end of it.

The end of a connection does not tell the end of a process from that of a network, nor from a process that is
stopped or starved. So the other process is asked for, and has time:

    session ends ──► doubted ──RESUME_S──► suspected ──dead_s──► dead
                        └─────── its host refuses connections ──────┘

Whoever doubts a process cancels that when it opens another session. A suspect's collectives are aborted, and
its replica group does without quorums; nothing is ended before it is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lighthouse.address import Address
from lighthouse.net import until_refused
from lighthouse.starvation import RECOVERY_S, SilenceClock

DEAD_S = 30.0
RESUME_S = 0.2  # a process that lives opens another session sooner


async def until_dead(
    address: Address | None, clock: SilenceClock, dead_s: float, suspect: Callable[[], None]
) -> str:
    """Return why a process counts as dead, once it does.

    Args:
        address: where the process listens as long as it lives; None if it has not said, and its session was
          all there is.
        clock: of this process, which may have been starved itself.
        dead_s: how long a suspect may stay silent.
        suspect: is called when the process was not back after a moment.
    """
    if address is None:
        return "its session ended"
    refused = asyncio.create_task(until_refused(address))
    try:
        for wait_s, then in ((RECOVERY_S if clock.is_starved() else RESUME_S, suspect), (dead_s, None)):
            silence = asyncio.create_task(clock.sleep(wait_s))
            try:
                await asyncio.wait([refused, silence], return_when=asyncio.FIRST_COMPLETED)
            finally:
                silence.cancel()
            if refused.done():
                return f"its host refuses connections to {address}: the process has ended"
            if then is not None:
                then()
        return f"silent for longer than dead_after, {dead_s:g} s"
    finally:
        refused.cancel()
