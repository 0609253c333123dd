"""The state of a quorum core in words, for operators: why there is no quorum yet, above all. It is pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lighthouse.core.decisions import Link, QuorumState

_NAMES_MAX = 32


@dataclass(frozen=True, slots=True)
class Facts:
    """The state that is described; times are in seconds from now, inf where nothing is waited for."""

    last_id: int
    last: Collection[str]
    departed: Collection[str]
    healthy: Collection[str]
    joined: Collection[str]
    expected: Collection[str]
    left_out: Collection[str]
    links: Collection[Link]
    sick: Mapping[str, str]
    standing: str
    state: QuorumState
    candidates: int
    min_replicas: int
    is_shrinking: bool
    majority: int
    idle: Collection[str]
    spares: Collection[str]
    refused: Mapping[str, str]
    late_s: float
    lease_s: float
    expiry_s: float
    spare_ranks: Collection[str] = ()  # processes that wait for the place of a rank


def describe(facts: Facts) -> str:
    """Describe the last quorum, which replicas have joined, which not, and why there is no new quorum."""
    joined, expected = set(facts.joined), set(facts.expected)
    awaited = [i for i in facts.healthy if i not in joined and i not in expected and i not in facts.idle]
    gone = [i for i in facts.departed if i not in joined]
    links = [f"{one} - {other}" for one, other in facts.links]
    lines = [
        f"last quorum {facts.last_id}: {_names(facts.last)}" if facts.last else "no quorum so far",
        f"gone since: {_names(gone)}" if gone else "",
        facts.standing,
        f"joined: {_names(joined)}",
        f"awaited: {_names(awaited)}",
        f"not awaited any longer, as they do not join: {_names(facts.idle)}" if facts.idle else "",
        f"expected back after a restart: {_names(expected)}" if expected else "",
        f"left out: {_names(facts.left_out)}" if facts.left_out else "",
        f"links that do not work: {_names(links, ', ')}" if links else "",
        *(f"{replica_id} {reason}" for replica_id, reason in facts.sick.items()),
        f"spares: {_names(facts.spares)}" if facts.spares else "",
        f"spare ranks: {_names(facts.spare_ranks)}" if facts.spare_ranks else "",
        *(f"refused {replica_id}, which is foreign: {why}" for replica_id, why in facts.refused.items()),
        why_no_quorum(facts),
    ]
    return "\n".join(line for line in lines if line)


def why_no_quorum(facts: Facts) -> str:
    """Return why there is no quorum yet of those that have joined."""
    state, joined, healthy = facts.state, len(facts.joined), len(facts.healthy)
    details = {
        QuorumState.TOO_FEW: f"{facts.candidates} of {facts.min_replicas}"
        + (", as only members of the last quorum count (shrink_only)" if facts.is_shrinking else ""),
        QuorumState.NO_MAJORITY: f"{joined} of {healthy}, {facts.majority} needed",
        QuorumState.STRAGGLERS: f"{joined} of {healthy}",
    }
    why = f"no quorum yet: {state.value}"
    why += f" ({details[state]})" if state in details else ""
    if state is QuorumState.STRAGGLERS:
        why += f"; they are left behind in {facts.late_s:.3f} s"
    if state is QuorumState.BEHIND and facts.lease_s < math.inf:
        why += f"; for silent ones others wait {facts.lease_s:.3f} s, or until they are known to be gone"
    if joined < healthy and joined and facts.expiry_s < math.inf:
        why += f"; the next silent one is given up in {facts.expiry_s:.3f} s"
    return why


def _names(ids: Collection[str], between: str = " ") -> str:
    names = sorted(ids)
    shown = between.join(names[:_NAMES_MAX]) or "nobody"
    return shown if len(names) <= _NAMES_MAX else f"{shown} and {len(names) - _NAMES_MAX} more"
