"""Replicas that spoil quorums by themselves, and how long quorums are formed without them. It is pure.

The process group of a quorum joins every replica with every other one, so one that cannot configure its own
part spoils the step of all, again and again. Only this replica can tell: to the others its failure looks like
that of any peer. So its join says what went wrong with it alone in the last quorum that it was in, and how
often that was so lately (`StepProtocol`). From the second time in a row quorums are formed without it: for a
second at first, twice as long after each further failure, for a minute at the most (`--sick_pause_ms`,
`--sick_pause_max_ms`). Then it is let in again, to try. Each step that it commits takes one failure back.

The replica counts itself. So a restarted lighthouse knows, and what is kept here ends with the join. What a
replica says of others is not asked for, so no replica is accused by another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lighthouse.core.decisions import Member

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
