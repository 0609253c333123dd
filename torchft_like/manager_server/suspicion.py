"""Whether another process lives, and whether it can be reached.

What follows when a rank's session ends without a goodbye, seen from either end of it.
The end of a connection does not tell the end of a process from that of a network, nor from a process that is
stopped or starved. So the other process is asked for, and has time:

    session ends ──► doubted ──RESUME_S──► suspected ──dead_s──► dead
                        └─────── its host refuses connections ──────┘

The doubt is over when the process opens another session. A suspect's collectives are aborted, and its replica
group does without quorums; nothing is ended before it is dead.

Of the ManagerServers of other replica groups only the beginning of a connection is asked for, which has to
carry large packets, too, and the kernels do that: a process that is stopped or busy answers nevertheless.
Whether a refusal is an answer, too, the probe says. A group may have other hosts than that of its rank 0,
between which a link may be broken as well: the first rank of each of them is asked to probe its counterparts
(`HostProbe`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lighthouse.address import Address, parse_address
from lighthouse.core.hosts import ip_of
from lighthouse.errors import AddressError
from lighthouse.listening import until_refused
from lighthouse.net import long_greeting
from lighthouse.starvation import RECOVERY_S, SilenceClock
from torchft_like.core.peer_links import Probe
from torchft_like.runtime import reach

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


HostAddress = tuple[int, str]  # the first rank of a host, and where it can be reached


class HostProbe(NamedTuple):
    """A message to a rank on another host than rank 0's: find out which groups give no answer there.

    Attributes:
        number: of the probe, for the answer.
        addresses: of the groups, in the same order.
        must_listen: those of which a refusal is no answer.
        is_repeated: as that of a `Probe`.
    """

    number: int
    replica_ids: tuple[str, ...]
    addresses: tuple[str, ...]
    must_listen: tuple[str, ...]
    is_repeated: bool

    @classmethod
    def of(cls, probe: Probe, number: int, addresses: Sequence[str]) -> HostProbe:
        """Have a probe done at other addresses of its groups."""
        replica_ids = tuple(replica_id for replica_id, _ in probe.peers)
        return cls(number, replica_ids, tuple(addresses), tuple(probe.must_listen), probe.is_repeated)

    @property
    def probe(self) -> Probe:
        """What is to be done."""
        peers = tuple(zip(self.replica_ids, self.addresses, strict=False))
        return Probe(peers, self.is_repeated, frozenset(self.must_listen))


def counterpart(hosts: Sequence[HostAddress], group_rank: int, rank_0: str) -> str:
    """Return where a rank meets a group: at the group's host with the same rank.

    Args:
        hosts: the other hosts of that group than its rank 0's.
        rank_0: where its rank 0 listens.
    """
    before = [host for host in hosts if host[0] <= group_rank]
    return max(before, default=(0, rank_0))[1]


RESOLVE_S = 0.5
LIMIT_S = RESOLVE_S + 2 * (reach.ATTEMPTS * reach.ATTEMPT_EVERY_S + reach.ANSWER_S)
REPEAT_S = 1.0


async def silent_peers(
    probe: Probe, clock: SilenceClock, answered: Callable[[str], None] = lambda _: None
) -> frozenset[str]:
    """Return the probed groups that gave no answer within a second, apart from the time for names.

    A repeated probe waits first. A group that could not be asked, for lack of an address, a name server or
    time, is not among them. None is if this process was starved: it may not have heard the answers.

    Args:
        answered: is called with each of the others, as soon as it has answered.
    """
    if probe.is_repeated:
        await asyncio.sleep(REPEAT_S)

    async def ask(peer: tuple[str, str]) -> OSError | None:
        if (failure := await _why_silent(peer, insists=peer[0] in probe.must_listen)) is None:
            answered(peer[0])
        return failure

    silent = await reach.ask_all(probe.peers, ask, LIMIT_S, clock)
    return frozenset(replica_id for replica_id, _ in silent)


async def _why_silent(peer: tuple[str, str], *, insists: bool) -> OSError | None:
    try:
        address = parse_address(peer[1])
    except AddressError:
        return None  # without an address nothing can be said about the link
    addresses = await _resolve(address)  # none: the name server is at fault, not the link
    failure = await reach.why_out_of_reach(*addresses, insists=insists, greeting=long_greeting())
    if failure is None or reach.is_silence(failure) or (insists and reach.is_refusal(failure)):
        return failure
    return None


async def _resolve(address: Address) -> tuple[Address, ...]:
    """Return all addresses of the name; none if the name server gives none within RESOLVE_S."""
    if ip_of(address.host) is not None:
        return (address,)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError:  # a TimeoutError is an OSError
        return ()
    return tuple(Address(host, address.port) for host in sorted({str(target[0]) for *_, target in found}))
