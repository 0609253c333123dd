"""Links between replica groups that do not work, and whom a quorum leaves out for them. Pure.

The process group of a quorum joins every replica with every other one, so a single pair that cannot reach
each other keeps all of them from committing, for as long as both are in. Only the two can notice: each
replica reports whom it cannot reach, and takes the report back when it can. A link counts as broken while
one of its ends says so; as long as that is so, both are not in one quorum.

Whom to leave out is a vertex cover: as few as possible, found greedily (the smallest is hard to find, and
the greedy one is it in all cases that networks make: one link, one bad host, two halves). What is reported
is believed, within a limit, and says nothing about who is healthy.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from heapq import heapify, heappop, heappush

from lighthouse.decisions import Link, Member

__all__ = ["REPORTED_CHARACTERS_MAX", "REPORTED_MAX", "Link", "Links", "leave_out"]

# Of one replica. With more it is the one that is left out, whatever the rest of them is.
REPORTED_MAX = 64
REPORTED_CHARACTERS_MAX = 16 * 1024  # of all ids in a report

Version = tuple[int, int]


class Links:
    """Whom each replica cannot reach. False while nobody complains: that, as ever, has to cost nothing."""

    def __init__(self) -> None:
        self._unreachable: dict[str, tuple[str, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._unreachable)

    def report(self, replica_id: str, unreachable: Sequence[str]) -> None:
        """These, and no others, cannot be reached by the replica any more."""
        if unreachable:
            self._unreachable[replica_id] = tuple(unreachable[:REPORTED_MAX])
        else:
            self.forget(replica_id)

    def forget(self, replica_id: str) -> None:
        """The replica is gone, or begins anew."""
        self._unreachable.pop(replica_id, None)

    def among(self, replica_ids: Container[str]) -> tuple[Link, ...]:
        """The broken links between these replicas, sorted, each once."""
        found = {
            (min(one, other), max(one, other))
            for one, unreachable in self._unreachable.items()
            if one in replica_ids
            for other in unreachable
            if other in replica_ids and other != one
        }
        return tuple(sorted(found))


def leave_out(members: Mapping[str, Member], links: Collection[Link], at_least: int) -> frozenset[str]:
    """Whom to leave out so that none of the links is left; the same members and links, the same answer.

    Where two have as many links, whoever is ahead stays, then whoever has the smaller id. One of those that
    are ahead of all others stays in any case: its work must not be done again, or undone.

    Args:
        at_least: if fewer than so many would stay, nobody is left out: the answer is empty.
    """
    peers: dict[str, set[str]] = {}
    for one, other in links:
        peers.setdefault(one, set()).add(other)
        peers.setdefault(other, set()).add(one)
    newest = max(map(_version, members.values()), default=None)
    ahead = sum(_version(member) == newest for member in members.values())
    # First to go: the one that is behind; of equals, the greater id.
    order = sorted(sorted(peers, reverse=True), key=lambda i: _version(members[i]))
    place = {replica_id: n for n, replica_id in enumerate(order)}
    heap = [(-len(peers[i]), place[i]) for i in order]
    heapify(heap)
    out = set()
    while heap:
        count, n = heappop(heap)
        gone, is_ahead = order[n], _version(members[order[n]]) == newest
        if -count != len(peers[gone]) or (is_ahead and ahead == 1):
            continue  # it has fewer by now, or has to stay: its peers go
        ahead -= is_ahead
        out.add(gone)
        for peer in peers[gone]:
            peers[peer].discard(gone)
            if peers[peer]:
                heappush(heap, (-len(peers[peer]), place[peer]))
        peers[gone] = set()
    return frozenset(out) if len(members) - len(out) >= at_least else frozenset()


def _version(member: Member) -> Version:
    return member.step, member.commit_quorum_id
