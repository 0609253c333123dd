"""How the lighthouse decides which replica groups to believe about their own state. It is pure.

A replica group that joins claims a version: a step, and the quorum in which it committed that. The newest is
the source of the next heal, so if every claim were believed, the greatest number would win, true or not. The
lighthouse remembers the members of its last quorums and their versions, and holds each claim against that. A
claim is *shown* if the replica group was in one of these quorums, and the claim is either

* a version that it had, or could take over, in one of them, or
* of a step that was committed in one of them: the next one, or, where the quorum stood, in which all
  members commit the same steps, one more than that of any other member whose state is from it; where there
  is none, one more than the next quorum began with to which some of them came with their state.

A member whose state is at step 0 claims nothing. While some member whose claim is shown is at least as far as
the last quorum was, or more than half of that quorum's members are there and have a state, a replica group
whose claim is not shown counts as one without a state: it heals. Only where all of the shown ones are behind
the last quorum is a claim that is no newer than that quorum believed. Otherwise none of those that have come
can show how far the job is (all are new, and begin from checkpoints; those that were ahead are gone), and all
are believed, as the job could not go on otherwise.

A restarted lighthouse remembers nothing of its earlier starts. Replica groups that come back report the
quorum in which they were last, and how far that was, with the statement that the lighthouse had made of it;
then that counts as what it remembers. Where it makes no statements, as it has no token, what each of them
says counts so, and not what most say: one that had gone on without the others, or with those that are gone,
would lose the steps that it has committed.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from heapq import nlargest
from math import inf
from typing import NamedTuple

from lighthouse.core.decisions import DISOWNED, NO_STATE, Member, Quorum

QUORUMS_MAX = 16  # remembered, with ids of their own; and reported, that differ

Version = tuple[int, int]
Limits = tuple[float, float]


class Past(NamedTuple):
    """A quorum, as it was when it was formed last.

    Attributes:
        step: the newest of its members.
        stood: whether they went on in it without asking for another one.
    """

    quorum_id: int
    members: frozenset[str]
    step: int
    stood: bool

    def digest(self, key: bytes) -> bytes:
        """Return a digest, which only a holder of the key can make."""
        said = json.dumps([self.quorum_id, sorted(self.members), self.step, self.stood])
        return hmac.digest(key, said.encode(), "sha256")


class Claims:
    """The members of the last quorums, and the versions of their states."""

    def __init__(self) -> None:
        self._past: dict[int, Past] = {}  # by id, the last one last
        self._newest: dict[int, Version] = {}  # of these quorums
        self._versions: dict[str, Version] = {}  # in the last of these quorums that each was in
        self._anew: dict[str, int] = {}  # the last quorum to which each came without a state
        # Quorums of earlier starts, and the replica groups that report them and were in none of the above. A
        # report has up to `replicas_max` ids: equal reports are kept once.
        self._reports: dict[Past, set[str]] = {}

    def reported(self, replica_id: str, past: Past) -> None:
        """Record in which quorum of an earlier start a replica group was last, as that start has stated, or
        could not.
        """
        self.forget(replica_id)
        if replica_id not in past.members or replica_id in self._versions or past.quorum_id <= 0:
            return
        if (reporters := self._reports.get(past)) is not None:
            reporters.add(replica_id)
        elif len(self._reports) < QUORUMS_MAX:
            self._reports[past] = {replica_id}

    def forget(self, *replica_ids: str) -> None:
        """Forget the reports of replica groups that are gone. What they were in is remembered."""
        for past, reporters in [*self._reports.items()]:
            reporters.difference_update(replica_ids)
            if not reporters:
                del self._reports[past]

    def formed(self, quorum: Quorum) -> None:
        """Remember a quorum, whose members are as they were believed."""
        versions = {member.replica_id: member.version for member in quorum.participants}
        self.forget(*versions)
        number, newest = quorum.quorum_id, max(versions.values())
        self._past.pop(number, None)
        self._past[number] = Past(number, frozenset(versions), newest[0], quorum.stands)
        self._newest[number] = newest
        self._versions.update(versions)
        self._anew.update({i: number for i, version in versions.items() if version[1] == NO_STATE})
        if len(self._past) > QUORUMS_MAX:
            oldest = next(iter(self._past))
            del self._past[oldest], self._newest[oldest]
            members: set[str] = set().union(*(past.members for past in self._past.values()))
            self._versions = {i: v for i, v in self._versions.items() if i in members}
            self._anew = {i: number for i, number in self._anew.items() if i in members}

    @property
    def newest(self) -> Version:
        """The newest state with which the last quorum began, as far as that is known."""
        if self._past:
            return self._newest[next(reversed(self._past))]
        last = max(self._reports, key=lambda past: past[::2], default=None)
        return (0, 0) if last is None else (last.step, 0)

    def unproven(self, joined: Sequence[Member]) -> frozenset[str]:
        """Return which of those that have joined are not believed."""
        ids = {m.replica_id for m in joined}
        reports = {i: past for past, reporters in self._reports.items() for i in reporters & ids}
        pasts = [*sorted({*reports.values()}, key=lambda past: past[::2]), *self._past.values()]
        limits: dict[Past, Limits] = {}
        for n, past in enumerate(pasts):
            # One to which none of its members came with its state does not tell how far they went on.
            kept = past.members.difference(i for i, number in self._anew.items() if number > past.quorum_id)
            others = (other for other in pasts[n:] if other.quorum_id != past.quorum_id)
            later = next((other for other in others if not other.members.isdisjoint(kept)), None)
            limits[past] = _limits(past, joined, later)
        remembered = [m for m in joined if self._shows(m, limits)]
        reported = [m for m in joined if m.replica_id in reports and m.commit_quorum_id != NO_STATE]
        reported = [m for m in reported if _is_within(limits, reports[m.replica_id], m)]
        if not (self._past or reports):
            return frozenset()
        last = pasts[-1]
        can_show = [m for m in (remembered if self._past else reported) if m.commit_quorum_id != DISOWNED]
        newest = max((m.step for m in can_show), default=-1)
        have_state = sum(m.step > 0 and m.replica_id in last.members for m in can_show)
        if newest < last.step and 2 * have_state <= len(last.members):
            return frozenset()
        believed = {m.replica_id for m in [*remembered, *reported]}
        # Where those that were ahead are gone, a checkpoint may have more than any member that is there.
        least = (last.step, last.quorum_id) if newest < last.step else (0, 0)
        return frozenset(m.replica_id for m in joined if m.version > least and m.replica_id not in believed)

    def _shows(self, member: Member, limits: Mapping[Past, Limits]) -> bool:
        replica_id, version = member.replica_id, member.version
        if replica_id not in self._versions or version[1] == NO_STATE:
            return False
        if version <= (0, 0) or version == self._versions[replica_id]:
            return True
        own = {quorum_id: past for quorum_id, past in self._past.items() if replica_id in past.members}
        if any(version == self._newest[quorum_id] for quorum_id in own):
            return True
        # Callers of torchft's protocol, and those that disown their state, name no quorum: it is the last.
        past = own.get(version[1]) if version[1] > 0 else [*own.values()][-1]
        return past is not None and _is_within(limits, past, member)


def _limits(past: Past, joined: Sequence[Member], later: Past | None) -> Limits:
    """Return the greatest step at which a member can be that has committed one in this quorum: one of which
    `_is_of` does not hold, and one of which it does.

    Where the quorum stood, that is one more than the step of another member of which it holds. A member that
    is the only one is held against how far the next quorum of some of its members was.
    """
    if not past.stood:
        return past.step + 1, past.step + 1
    alone: float = inf if later is None else max(past.step, later.step) + 1
    steps = nlargest(2, (m.step for m in joined if _is_of(past, m)))
    first: float = steps[0] + 1 if steps else alone
    second: float = steps[1] + 1 if len(steps) > 1 else alone
    return first, second


def _is_of(past: Past, member: Member) -> bool:
    """Return whether a member has its state from this quorum.

    A member that names another quorum has been in that one since, or has loaded a checkpoint; one that names
    none has loaded one, or speaks torchft's protocol.
    """
    if member.replica_id not in past.members or member.commit_quorum_id == NO_STATE:
        return False
    if member.commit_quorum_id == 0 < member.step:
        return False
    return member.commit_quorum_id in (past.quorum_id, DISOWNED) or member.step == past.step


def _is_within(limits: Mapping[Past, Limits], past: Past, member: Member) -> bool:
    return member.step <= limits[past][_is_of(past, member)]
