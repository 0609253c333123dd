"""Which members of a group do not reach each other: for the errors of a group whose time is up.

A backend says that a peer is missing, and not which one; and a member that reaches all others waits as well,
for one that waits for a third. So whoever gives up asks the listeners of all others first. As long as they
have the store in which they meet, the members exchange there what they have found.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import timedelta

from lighthouse.address import Address
from lighthouse.starvation import SilenceClock
from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.store import AbortableStore, GroupMembers
from torchft_like.runtime.event_loop import coordination_loop
from torchft_like.runtime.reach import PEERS_AT_ONCE, is_silence, why_out_of_reach

ASK_S = 2.5  # for the answers of all
# In which the others say what they have found: most of them give up at the same time, and ask for a second.
REPORT_S = 2.0
EXPLAIN_S = 3.0  # what `explain` takes where some do not answer, and are not too many

NAMED_MAX = 4  # ranks whose links a text names

Links = Mapping[int, Iterable[int]]


def explain(store: AbortableStore, members: GroupMembers, listeners: Mapping[int, Address]) -> str:
    """Return what keeps the members from connecting, as far as this one can find out in a few seconds.

    Args:
        store: the one in which they meet.
        listeners: where each rank listens.
    """
    failures = _failures(members.rank, listeners)
    silent = [rank for rank, failure in failures.items() if is_silence(failure)]
    refusing = [rank for rank, failure in failures.items() if isinstance(failure, ConnectionRefusedError)]
    found: dict[int, Iterable[int]] = {members.rank: silent}
    with contextlib.suppress(ProcessGroupError, OSError):  # this rank's own answers are enough for an error
        found |= _exchange(store, members, silent)
    return describe(members.rank, found, refusing, _hosts(listeners))


def unreached(rank: int, listeners: Mapping[int, Address]) -> str:
    """Return which members' hosts give this rank no answer; "" if each does."""
    silent = [other for other, failure in _failures(rank, listeners).items() if is_silence(failure)]
    return describe(rank, {rank: silent}, [], _hosts(listeners)) if silent else ""


def _failures(rank: int, listeners: Mapping[int, Address]) -> dict[int, OSError]:
    """Return why connections to other members fail."""
    loop = coordination_loop()
    return loop.run(_ask({other: at for other, at in listeners.items() if other != rank}, loop.clock))


def _hosts(listeners: Mapping[int, Address]) -> dict[int, str]:
    return {rank: address.host for rank, address in listeners.items()}


async def _ask(listeners: Mapping[int, Address], clock: SilenceClock) -> dict[int, OSError]:
    """Return why connections to some of them fail; nothing if this process may have missed their answers."""
    failures: dict[int, OSError] = {}
    free, began = asyncio.Semaphore(PEERS_AT_ONCE), asyncio.get_running_loop().time()

    async def ask(rank: int, address: Address) -> None:
        async with free:
            if (failure := await why_out_of_reach(address)) is not None:
                failures[rank] = failure

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ASK_S):
            await asyncio.gather(*itertools.starmap(ask, listeners.items()))
    return {} if clock.last_starved > began else failures


def _exchange(store: AbortableStore, members: GroupMembers, silent: Iterable[int]) -> dict[int, list[int]]:
    """Say whom this rank does not reach; return what each rank says that has done so."""
    keys = {rank: f"silent/{rank}" for rank in range(members.world_size)}
    store.set_timeout(timedelta(seconds=REPORT_S))
    store.set(keys[members.rank], ",".join(map(str, silent)))
    try:
        store.wait(list(keys.values()))
    except TimeoutError:
        store.connect(insists=False)
    said = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
    return {rank: read(text, members.world_size) for rank, text in said.items()}


def read(said: bytes, world_size: int) -> list[int]:
    """Read the ranks that a member has named; others than those of the group are left out."""
    return [rank for rank in range(world_size) if str(rank).encode() in said.split(b",")]


def describe(rank: int, found: Links, refusing: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Return a sentence on who does not reach whom, and the cure.

    Args:
        rank: the caller.
        found: the ranks from whose hosts nothing came, by the rank that has asked them.
        refusing: the ranks whose hosts have refused the caller.
        hosts: the host of each rank.
    """

    def named(one: int) -> str:
        return f"{one} ({hosts[one]})" if one in hosts else str(one)

    pairs = {frozenset((one, other)) for one, others in found.items() for other in others if one != other}
    texts = list[str]()
    while pairs and len(texts) < NAMED_MAX:
        counts = Counter(one for pair in sorted(map(sorted, pairs)) for one in pair)
        [(most, _)] = counts.most_common(1)
        partners = sorted(one for pair in pairs if most in pair for one in pair if one != most)
        pairs = {pair for pair in pairs if most not in pair}
        if len(partners) == 1:
            texts.append(f"ranks {named(most)} and {named(partners[0])} do not reach each other")
        else:
            texts.append(f"rank {named(most)} and ranks {partners} do not reach each other")
    if texts:
        return f"{', '.join(texts)}; check the network between them, and their firewalls"
    if refusing:
        return (
            f"ranks {sorted(refusing)} refuse connections: their processes have ended, or gave up before; or "
            "a firewall is between"
        )
    return (
        f"rank {rank} reaches the hosts of all others; two of these may not reach each other, or a process "
        "is stopped: the errors of the others say more"
    )
