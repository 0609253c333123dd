"""A lighthouse decides which replica groups it believes what they say of their state. It is pure.

A replica group that joins claims a version: a step, and the quorum in which it committed that. The newest
is the source of the next heal, so a claim that nothing shows would make a source of whoever says the
greatest number. The lighthouse remembers who was in its last quorums, with which versions, and holds each
claim against that. One that is *shown* was made by a replica group that was in a quorum of these, and is
either

* a version that it had, or could take over, in one of them, or
* of a step that was committed in one of them: the next one, or, where the quorum stood, in which all
  members commit the same steps, one more than that of any other member that has come back from it.

A member whose state is at step 0 claims nothing. While one whose claim is shown is at least as far as the
last quorum was, or more than half of its members are there and have a state, whoever claims what is not
shown counts as one without a state: it heals. Otherwise nobody who has come can show how far the job is (all
are new, and begin from checkpoints; those that were ahead are gone), and all are believed, as the job could
not go on otherwise.

A restarted lighthouse remembers nothing of its earlier starts. Replica groups that come back report the
quorum in which they were last, and how far that was, with the statement that the lighthouse had made of it;
then that counts as what it remembers. Where it does not know its statements again, as it has no token,
those are believed of whom more than half, of a quorum with others in it, have come and say the same, if
they are more than those who say anything else; otherwise all who report.
"""

from __future__ import annotations

import hmac
import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from heapq import nlargest
from math import inf
from typing import NamedTuple

from lighthouse.core.decisions import NO_STATE, Member, Quorum

QUORUMS_MAX = 16  # remembered, with ids of their own

Version = tuple[int, int]


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
        """Return a digest, as only who has the key can make it."""
        said = json.dumps([self.quorum_id, sorted(self.members), self.step, self.stood])
        return hmac.digest(key, said.encode(), "sha256")


class _Report(NamedTuple):
    """What a replica group says of the quorum of an earlier start in which it was."""

    past: Past
    is_stated: bool


class Claims:
    """The memory of who was in the last quorums, and with what."""

    def __init__(self) -> None:
        self._past: dict[int, Past] = {}  # by id, the last one last
        self._newest: dict[int, Version] = {}  # of these quorums
        self._versions: dict[str, Version] = {}  # in the last of these quorums that each was in
        self._reports: dict[str, _Report] = {}  # of those that were in none of them

    def reported(self, replica_id: str, past: Past, *, is_stated: bool) -> None:
        """Record in which quorum of an earlier start a replica group says that it was last.

        Args:
            is_stated: whether that start has stated it.
        """
        self.forget(replica_id)
        if replica_id in past.members and replica_id not in self._versions and past.quorum_id > 0:
            # One set for all who say the same: it is compared often.
            sets = (report.past.members for report in self._reports.values())
            members = next((ids for ids in sets if ids == past.members), past.members)
            self._reports[replica_id] = _Report(past._replace(members=members), is_stated)

    def forget(self, replica_id: str) -> None:
        """Forget the report of a replica group that is gone. What it was in is remembered."""
        self._reports.pop(replica_id, None)

    def formed(self, quorum: Quorum) -> None:
        """Remember a quorum, whose members are as they were believed."""
        versions = {member.replica_id: _version(member) for member in quorum.participants}
        self._reports = {i: report for i, report in self._reports.items() if i not in versions}
        number, newest = quorum.quorum_id, max(versions.values())
        self._past.pop(number, None)
        self._past[number] = Past(number, frozenset(versions), newest[0], quorum.stands)
        self._newest[number] = newest
        self._versions.update(versions)
        if len(self._past) > QUORUMS_MAX:
            oldest = next(iter(self._past))
            del self._past[oldest], self._newest[oldest]
            members: set[str] = set().union(*(past.members for past in self._past.values()))
            self._versions = {i: v for i, v in self._versions.items() if i in members}

    def unproven(self, joined: Sequence[Member]) -> frozenset[str]:
        """Return which of those that have joined are not believed."""
        limits = {past: _limit(past, joined) for past in self._past.values()}
        shown = {m.replica_id: m.step for m in joined if self._shows(m, limits)}
        is_known = False
        if self._past:
            *_, last = self._past.values()
            have_state = sum(step > 0 and i in last.members for i, step in shown.items())
            is_known = max(shown.values(), default=-1) >= last.step or 2 * have_state > len(last.members)
        reports, are_certain = self._earlier({m.replica_id for m in joined})
        limits = {report.past: _limit(report.past, joined) for report in {*reports.values()}}
        for m in joined:
            report = reports.get(m.replica_id)
            if report is not None and m.commit_quorum_id != NO_STATE and m.step <= limits[report.past]:
                shown[m.replica_id] = m.step
                is_known = is_known or (are_certain and m.step > 0)
        if not is_known:
            return frozenset()
        return frozenset(m.replica_id for m in joined if m.step > 0 and m.replica_id not in shown)

    def _shows(self, member: Member, limits: Mapping[Past, float]) -> bool:
        replica_id, version = member.replica_id, _version(member)
        if replica_id not in self._versions or version[1] == NO_STATE:
            return False
        if version[0] == 0 or version == self._versions[replica_id]:
            return True
        own = {quorum_id: past for quorum_id, past in self._past.items() if replica_id in past.members}
        if any(version == self._newest[quorum_id] for quorum_id in own):
            return True
        # Callers of torchft's protocol, and those that disown their state, name no quorum: it is the last.
        past = own.get(version[1]) if version[1] > 0 else [*own.values()][-1]
        return past is not None and version[0] <= limits[past]

    def _earlier(self, joined: Container[str]) -> tuple[dict[str, _Report], bool]:
        """Return the reports that are believed, and whether they show who the members of the last quorum are:
        by a statement, or as more than half of them say the same.
        """
        reports = {i: report for i, report in self._reports.items() if i in joined}
        if stated := {i: report for i, report in reports.items() if report.is_stated}:
            return stated, True
        ranked = Counter(report.past[:2] for report in reports.values()).most_common(2)
        count, next_count = [*(count for _, count in ranked), 0, 0][:2]
        if count > max(1, next_count) and 2 * count > len((first := ranked[0][0])[1]):
            return {i: report for i, report in reports.items() if report.past[:2] == first}, True
        return reports, False


def _limit(past: Past, joined: Sequence[Member]) -> float:
    """Return the greatest step at which a member can be that has committed one in this quorum.

    Where the quorum stood, that is one more than where the second of its members is: who is further, alone,
    is held against that.
    """
    if not past.stood:
        return past.step + 1
    back = (m for m in joined if m.replica_id in past.members and m.commit_quorum_id != NO_STATE)
    steps = nlargest(2, (m.step for m in back))
    return steps[1] + 1 if len(steps) > 1 else inf


def _version(member: Member) -> Version:
    return member.step, member.commit_quorum_id
