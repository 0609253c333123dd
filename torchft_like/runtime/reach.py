"""Whether hosts can be reached: within a second, and also where packets are lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from lighthouse.address import Address
from lighthouse.listening import why_unreachable
from lighthouse.starvation import SilenceClock

Peer = TypeVar("Peer")
Found = TypeVar("Found")

# All attempts together take far less than the timeout of a process group, and are enough where packets are
# lost. The kernel would try again only after a second.
ATTEMPTS = 6
ATTEMPT_EVERY_S = 0.12
ANSWER_S = 0.4  # seconds for the answer to the last attempt; earlier ones have longer
PEERS_AT_ONCE = 32
# The last two are a firewall's answers, too: an ICMP error and a route that is prohibited.
_NO_WAY_THERE = (
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.ENETDOWN,
    errno.ENOPROTOOPT,
    errno.EACCES,
)


async def ask_all(
    peers: Iterable[Peer], ask: Callable[[Peer], Awaitable[Found | None]], limit_s: float, clock: SilenceClock
) -> dict[Peer, Found]:
    """Return what is found out about peers in so many seconds, apart from None; nothing if this process was
    starved meanwhile: it may not have heard the answers.
    """
    found: dict[Peer, Found] = {}
    free, began = asyncio.Semaphore(PEERS_AT_ONCE), asyncio.get_running_loop().time()

    async def ask_one(peer: Peer) -> None:
        async with free:
            if (answer := await ask(peer)) is not None:
                found[peer] = answer

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await asyncio.gather(*map(ask_one, peers))
    return {} if clock.last_starved > began else found


async def why_out_of_reach(
    *addresses: Address, insists: bool = False, greeting: bytes = b""
) -> OSError | None:
    """Return why no connection to a host, of which these are the addresses, has begun; None if one has.

    A host that is there may refuse: `is_silence` tells that from one of which nothing comes.

    Args:
        insists: try again where the host refuses, too, as where a process is known to listen.
        greeting: what has to arrive there, too.
    """

    async def attempt(number: int, to: Address) -> OSError | None:
        await asyncio.sleep(number * ATTEMPT_EVERY_S)
        return await why_unreachable(to, (ATTEMPTS - 1 - number) * ATTEMPT_EVERY_S + ANSWER_S, greeting)

    attempts = [asyncio.ensure_future(attempt(n, to)) for n in range(ATTEMPTS) for to in addresses]
    failure: OSError | None = None
    try:
        for answer in asyncio.as_completed(attempts):
            failure = await answer
            if failure is None or not (is_silence(failure) or (insists and is_refusal(failure))):
                return failure
        return failure
    finally:
        for each in attempts:
            each.cancel()


def is_silence(failure: OSError) -> bool:
    """Return whether a connection failed as nothing came from the other host."""
    return isinstance(failure, TimeoutError) or failure.errno in _NO_WAY_THERE


def is_refusal(failure: OSError) -> bool:
    """Return whether a connection failed as the other host, or a firewall in its name, refused it."""
    return isinstance(failure, ConnectionError)
