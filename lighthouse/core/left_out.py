"""Which replicas a quorum leaves out: for links that do not work, and for what they spoil by themselves.

The process group of a quorum joins every replica with every other one. So one pair that cannot reach each
other keeps all of them from committing, for as long as both are in, and one replica that cannot configure its
own part spoils the step of all, again and again. This is pure.

Only the two ends of a link can notice that it does not work: each replica reports which others it cannot
reach, and takes the report back when it can. A link counts as broken while one of its ends says so; as long
as that is so, both are not in one quorum. The replicas that are left out are a vertex cover of the broken
links: as few as possible, found greedily. The smallest cover is hard to find, and the greedy one is the
smallest in the cases that networks make: one link, one bad host, two halves. A report is believed, within a
limit, and says nothing about which replicas are healthy.

Only a replica itself can tell that it spoils quorums: to the others its failure looks like that of any peer.
So its join says what went wrong with it alone in the last quorum that it was in, and how often that was so
lately (`StepProtocol`). From the second time in a row quorums are formed without it: for a second at first,
twice as long after each further failure, for a minute at the most (`--sick_pause_ms`,
`--sick_pause_max_ms`). Then it is let in again, to try. Each step that it commits takes one failure back. The
replica counts itself. So a restarted lighthouse knows, and what is kept here ends with the join. What others
say of such failures is not asked for, so no replica is accused by another one.

A replica that comes back after each loss cannot tell: where what the lighthouse sends does not arrive, it
hears of no quorum, and the others lose a step with each. From the second in a row its losses count as
failures of its own (`Losses`), until it has committed a step in the quorum in which it was lost last.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

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

    def forget_about(self, replica_id: str) -> None:
        """Forget what others report of a replica, which is another process now, perhaps on another host. Who
        meets it in a quorum, and does not reach it either, reports it again.
        """
        for one, unreachable in list(self._unreachable.items()):
            if replica_id in unreachable:
                self.report(one, [other for other in unreachable if other != replica_id])

    def reporters_of(self, replica_id: str) -> list[str]:
        """Return who reports a replica, sorted."""
        return sorted(one for one, unreachable in self._unreachable.items() if replica_id in unreachable)

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


LOSSES_MAX = 256  # replicas whose losses are counted: the last ones


class _Loss(NamedTuple):
    """How often a replica was lost in a row, and in which quorum, when and why the last time."""

    in_a_row: int
    quorum_id: int
    at: float
    reason: str


class Losses:
    """How often replicas were lost lately, in quorums in which they committed nothing.

    Args:
        lately_s: a loss counts for so long. Members without steps never commit one.
    """

    def __init__(self, lately_s: float) -> None:
        self._lately_s = lately_s
        self._losses: dict[str, _Loss] = {}  # the one that was lost last at the end

    def lost(self, replica_id: str, quorum_id: int, reason: str, now: float) -> None:
        """Count the loss of a member of a quorum."""
        before = self._losses.pop(replica_id, None)
        earlier = before.in_a_row if before is not None and now < before.at + self._lately_s else 0
        self._losses[replica_id] = _Loss(earlier + 1, quorum_id, now, reason)
        if len(self._losses) > LOSSES_MAX:
            del self._losses[next(iter(self._losses))]

    def with_losses(self, member: Member, now: float) -> Member:
        """Return a member that joins, with its losses as failures of its own where these are fewer; forget
        them once it has committed a step since the last one, or none was lately.
        """
        loss = self._losses.get(member.replica_id)
        if loss is None:
            return member
        if member.commit_quorum_id >= loss.quorum_id or now >= loss.at + self._lately_s:
            del self._losses[member.replica_id]
            return member
        if loss.in_a_row - 1 <= member.own_failures:  # the first loss is as likely an accident of the network
            return member
        why = f"lost {loss.in_a_row} times in a row: {loss.reason}"
        return member._replace(own_failure=why, own_failures=loss.in_a_row - 1)


PATIENCE = 2  # failures in a row: the first one may be an accident
_DOUBLINGS_MAX = 30


def pause_s(member: Member, first_s: float, longest_s: float) -> float:
    """Return for how long quorums are formed without a replica that joins, in seconds."""
    if not member.own_failure or member.own_failures < PATIENCE:
        return 0.0
    return min(first_s * 2.0 ** min(member.own_failures - PATIENCE, _DOUBLINGS_MAX), longest_s)


def describe_pause(member: Member, pause_s: float) -> str:
    """Describe why, and for how long, quorums are formed without a replica."""
    lately = f"has spoilt {member.own_failures} quorums lately by itself"
    return f"{lately}, and is out for {pause_s:g} s: {member.own_failure}"


def leave_out_sick(members: Mapping[str, Member], sick: Collection[str], at_least: int) -> frozenset[str]:
    """Choose which of the sick to leave out: the one that has failed most often first, of equals the one that
    is behind, then the one with the greater id.

    Those that cannot be left out are tried: there can be no quorum without them, and the next try may
    succeed. One of those that are ahead of all others always stays, as where links do not work. Where all are
    sick, what they have in common is why, and none is left out.

    Args:
        at_least: as many replicas stay.
    """
    newest = max((member.version for member in members.values()), default=None)
    ahead = {i for i, member in members.items() if member.version == newest}
    by_id = sorted(sick, reverse=True) if len(sick) < len(members) else []
    out: set[str] = set()
    for replica_id in sorted(by_id, key=lambda i: (-members[i].own_failures, members[i].version)):
        if len(members) - len(out) > at_least and ahead != {replica_id}:
            out.add(replica_id)
            ahead.discard(replica_id)
    return frozenset(out)
