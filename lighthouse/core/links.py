"""Links between replica groups that do not work, and which replicas a quorum leaves out for them. It is pure.

The process group of a quorum joins every replica with every other one, so a single pair that cannot reach
each other keeps all of them from committing, for as long as both are in. Only these two can notice: each
replica reports which others it cannot reach, and takes the report back when it can. A link counts as broken
while one of its ends says so; as long as that is so, both are not in one quorum.

The replicas that are left out are a vertex cover of the broken links: as few as possible, found greedily. The
smallest cover is hard to find, and the greedy one is the smallest in the cases that networks make: one link,
one bad host, two halves. A report is believed, within a limit, and says nothing about which replicas are
healthy.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from heapq import heapify, heappop, heappush

from lighthouse.core.decisions import Link, Member

# The most peers that one replica may report. A replica that cannot reach more is left out itself, so the rest
# of them does not matter.
REPORTED_MAX = 64
REPORTED_CHARACTERS_MAX = 16 * 1024  # characters of all ids in a report


class Links:
    """The replicas that each replica cannot reach; false, and free of cost, while no replica reports any."""

    def __init__(self) -> None:
        self._unreachable: dict[str, tuple[str, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._unreachable)

    def report(self, replica_id: str, unreachable: Sequence[str]) -> None:
        """Record that the replica cannot reach these others any more, and no others."""
        if unreachable:
            self._unreachable[replica_id] = tuple(unreachable[:REPORTED_MAX])
        else:
            self.forget(replica_id)

    def forget(self, replica_id: str) -> None:
        """Forget the reports of a replica that is gone or begins anew."""
        self._unreachable.pop(replica_id, None)

    def among(self, replica_ids: Container[str]) -> tuple[Link, ...]:
        """Return the broken links between these replicas, sorted, each once."""
        found = {
            (min(one, other), max(one, other))
            for one, unreachable in self._unreachable.items()
            if one in replica_ids
            for other in unreachable
            if other in replica_ids and other != one
        }
        return tuple(sorted(found))


def leave_out(members: Mapping[str, Member], links: Collection[Link], at_least: int) -> frozenset[str]:
    """Choose the replicas to leave out so that none of the links is left. The same members and links give the
    same answer.

    Of two replicas with as many links, the one that is ahead stays, then the one with the smaller id. One of
    those that are ahead of all others always stays: its work must not be done again, or undone.

    Args:
        at_least: if fewer replicas than this would stay, none is left out: the answer is empty.
    """
    peers: dict[str, set[str]] = {}
    for one, other in links:
        peers.setdefault(one, set()).add(other)
        peers.setdefault(other, set()).add(one)
    newest = max((member.version for member in members.values()), default=None)
    ahead = sum(member.version == newest for member in members.values())
    # The first to go is the one that is behind; of equals, the one with the greater id.
    order = sorted(sorted(peers, reverse=True), key=lambda i: members[i].version)
    place = {replica_id: n for n, replica_id in enumerate(order)}
    heap = [(-len(peers[i]), place[i]) for i in order]
    heapify(heap)
    out = set()
    while heap:
        count, n = heappop(heap)
        gone, is_ahead = order[n], members[order[n]].version == newest
        if -count != len(peers[gone]) or (is_ahead and ahead == 1):
            continue  # it has fewer links by now, or it has to stay, so that its peers go
        ahead -= is_ahead
        out.add(gone)
        for peer in peers[gone]:
            peers[peer].discard(gone)
            if peers[peer]:
                heappush(heap, (-len(peers[peer]), place[peer]))
        peers[gone] = set()
    return frozenset(out) if len(members) - len(out) >= at_least else frozenset()
