"""Which members of a group do not reach each other: for the errors of a group whose time is up.

A backend says that a peer is missing, and not which one; and a member that reaches all others waits as well,
for one that waits for a third. So whoever gives up asks the listeners of all others first. As long as they
have the store in which they meet, the members exchange there what they have found.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import timedelta

from lighthouse.address import Address
from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.store import AbortableStore, GroupMembers
from torchft_like.runtime.event_loop import coordination_loop
from torchft_like.runtime.reach import ask_all, is_silence, why_out_of_reach

ASK_S = 2.5  # for the answers of all
# In which the others say what they have found: most of them give up at the same time, and ask for a second.
REPORT_S = 2.0
EXPLAIN_S = 3.0  # what `explain` takes where some do not answer, and are not too many

NAMED_MAX = 4  # ranks whose links a text names

Links = Mapping[int, Iterable[int]]
Listeners = Mapping[int, Address]  # the members', by rank


def explain(store: AbortableStore, members: GroupMembers, listeners: Listeners) -> str:
    """Return what keeps the members from connecting, as far as this one can find out in a few seconds."""
    failures = _failures(members.rank, listeners)
    refusing = [rank for rank, failure in failures.items() if isinstance(failure, ConnectionRefusedError)]
    silent = [rank for rank, failure in failures.items() if is_silence(failure)]
    found: dict[int, Iterable[int]] = {members.rank: silent}
    with contextlib.suppress(ProcessGroupError, OSError):  # this rank's own answers are enough for an error
        found |= _exchange(store, members, silent)
    return describe(members.rank, found, refusing, listeners)


def unreached(rank: int, listeners: Listeners) -> str:
    """Return which members' hosts give this rank no answer; "" if each does."""
    silent = [other for other, failure in _failures(rank, listeners).items() if is_silence(failure)]
    return describe(rank, {rank: silent}, [], listeners) if silent else ""


def _failures(rank: int, listeners: Listeners) -> dict[int, OSError]:
    """Return why connections to other members fail."""
    loop = coordination_loop()
    others = sorted(listeners.keys() - {rank})
    return loop.run(ask_all(others, lambda other: why_out_of_reach(listeners[other]), ASK_S, loop.clock))


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


def describe(rank: int, found: Links, refusing: Iterable[int], listeners: Listeners) -> str:
    """Return a sentence on who does not reach whom, and the cure.

    Args:
        rank: the caller.
        found: the ranks from whose hosts nothing came, by the rank that has asked them.
        refusing: the ranks whose hosts have refused the caller.
    """

    def named(one: int) -> str:
        return f"{one} ({listeners[one].host})" if one in listeners else str(one)

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
