"""Asks other replica groups for a sign that they can be reached, by connecting to their ManagerServers.

Of a connection only the beginning is of interest, and that is the kernels' work: a process that is stopped
or busy answers nevertheless. A refusal is an answer, too; whether a process lives is for the lighthouse to
find out. What is decided from the answers is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib

from lighthouse.address import parse_address
from lighthouse.errors import AddressError
from lighthouse.net import answers_tcp, resolve
from torchft_like.manager.peer_links import Probe

# All of them together are far below the timeout of a process group, and enough where packets are lost.
ATTEMPTS = 4
ATTEMPT_S = 0.5
RESOLVE_S = 0.5
LIMIT_S = RESOLVE_S + (ATTEMPTS + 1) * ATTEMPT_S
REPEAT_S = 3.0
CONNECTIONS_MAX = 64


async def silent_peers(probe: Probe) -> frozenset[str]:
    """Those of the probed who gave no answer within two seconds, names aside; a repeated one waits before.

    Whoever could not be asked, for want of an address, a name server or time, is not among them.
    """
    if probe.is_repeated:
        await asyncio.sleep(REPEAT_S)
    silent: set[str] = set()
    free = asyncio.Semaphore(CONNECTIONS_MAX)

    async def ask(replica_id: str, address: str) -> None:
        async with free:
            if not await _answers(address):
                silent.add(replica_id)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*[ask(*peer) for peer in probe.peers])
    return frozenset(silent)


async def _answers(text: str) -> bool:
    try:
        address = parse_address(text)
    except AddressError:
        return True  # it does not say where it is: nothing can be said about the link, either
    addresses = await resolve(address, RESOLVE_S)
    if not addresses:
        return True  # that is the name server's fault
    loop = asyncio.get_running_loop()
    for _ in range(ATTEMPTS):
        end = loop.time() + ATTEMPT_S
        if await answers_tcp(addresses, ATTEMPT_S):
            return True
        await asyncio.sleep(end - loop.time())
    return False
