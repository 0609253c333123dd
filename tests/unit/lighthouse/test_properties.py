"""What holds in every history of a lighthouse, restarts included: properties searched with hypothesis."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from lighthouse.core.config import LighthouseConfig
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import (
    Decision,
    LeftOut,
    Member,
    MemberLost,
    QuorumCore,
    QuorumFormed,
    QuorumOver,
    SessionSuperseded,
)

pytestmark = [pytest.mark.one_quorum_per_step, pytest.mark.monotonic, pytest.mark.no_leak]

REPLICAS = st.sampled_from("abcdefg")
RESTART_MS = 10_000  # how far the wall clock is ahead of all ids at the next start

Seen = tuple[QuorumNumber, frozenset[str]]

NOTHING: Seen = (QuorumNumber(0, 0), frozenset())


class LighthouseHistory(RuleBasedStateMachine):
    """Replica groups that behave as ours do, and unary callers, under lighthouses that come and go."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.number = 0
        self.first_id = 1000
        self.ids: dict[int, frozenset[str]] = {}  # every quorum id ever given, and its members
        self.newest_id = 0
        self.last_seen: dict[str, Seen] = {}  # the last quorum each replica was answered with
        self.seen_before: dict[str, Seen] = {}  # and the one before that
        self._start()

    def _start(self) -> None:
        self.config = LighthouseConfig(
            min_replicas=2, join_timeout_ms=5000, heartbeat_timeout_ms=3000, reconnect_grace_ms=2000
        )
        self.core = QuorumCore(self.config, self.first_id)
        self.owners: dict[int, str] = {}  # open sessions
        self.knows: dict[
            str, QuorumNumber
        ] = {}  # by replica with a session: what it was told in it, or reported
        self.waits: dict[str, Seen] = {}  # the same, unless it was told that it need not wait for the others
        self.unreachable: dict[str, set[str]] = {}  # what was reported in open sessions
        self.left: set[str] = set()  # whoever left in good order, and is in no quorum since
        self.joined: dict[str, Member] = {}
        self.since: dict[str, float] = {}  # of these: since when they wait in this round
        self.left_out: set[str] = set()  # of these, for a link: they keep nobody out
        self.calling: set[str] = set()
        self.last = NOTHING  # the quorum that this lighthouse takes for the last one
        self.broken: set[str] = set()  # of these, who was gone since
        self.unary: dict[str, float] = {}  # when a unary caller was last heard of

    # -- events

    @rule(target=sessions, replica_id=REPLICAS, memory=st.sampled_from(["good", "good", "missed", "none"]))
    def register(self, replica_id: str, memory: str) -> int:
        """It reports what it saw; the last answer may have been on its way when the connection broke."""
        self.number += 1
        if memory == "missed":
            self.last_seen[replica_id] = self.seen_before.get(replica_id, NOTHING)
        seen = NOTHING if memory == "none" else self.last_seen.get(replica_id, NOTHING)
        self.owners = {n: r for n, r in self.owners.items() if r != replica_id}
        self.owners[self.number] = replica_id
        self.unreachable.pop(replica_id, None)
        if replica_id not in self.calling:
            self.joined.pop(replica_id, None)
        self.unary.pop(replica_id, None)
        self.knows[replica_id], self.waits[replica_id] = seen[0], seen
        if seen[0] > self.last[0]:
            self.last, self.broken = seen, set()
        self.broken |= {i for i in set(self.owners.values()) & self.last[1] if self.knows[i] != self.last[0]}
        self._check(self.core.register(self.number, replica_id, *seen, self.now))
        return self.number

    @rule(
        session=sessions,
        shrink_only=st.booleans(),
        failures=st.sampled_from([0, 0, 0, 1]),
        step=st.sampled_from([3, 3, 4]),
    )
    def join(self, session: int, shrink_only: bool, failures: int, step: int = 3) -> None:
        replica_id = self.owners.get(session)
        member = Member(replica_id or "a", shrink_only=shrink_only, commit_failures=failures, step=step)
        if replica_id is not None:
            self._joins(member)
        self._check(self.core.join(session, member, self.now))

    @rule(session=sessions, unreachable=st.sets(REPLICAS, max_size=2))
    def report_links(self, session: int, unreachable: set[str]) -> None:
        replica_id = self.owners.get(session)
        if replica_id is not None:
            self.unreachable[replica_id] = unreachable
        self._check(self.core.report_links(session, sorted(unreachable), self.now))

    @rule(session=consumes(sessions))
    def lose(self, session: int) -> None:
        replica_id = self._close(session)
        decisions = self.core.lost(session, "gone", self.now)
        lost = [d.replica_id for d in decisions if isinstance(d, MemberLost)]
        assert replica_id is None or replica_id in lost
        self._check(decisions)

    @rule(session=consumes(sessions))
    def leave(self, session: int) -> None:
        replica_id = self._close(session)
        self.left |= set() if replica_id is None else {replica_id}
        decisions = self.core.leave(session, self.now)
        assert all(d.replica_id != replica_id for d in decisions if isinstance(d, MemberLost))
        self._check(decisions)

    @rule(replica_id=st.sampled_from("xyz"), failures=st.sampled_from([0, 0, 1]))
    def call(self, replica_id: str, failures: int) -> None:
        self._expire()
        member = Member(replica_id, commit_failures=failures)
        self.joined[replica_id] = member
        self.calling.add(replica_id)
        self.unary.pop(replica_id, None)
        self._check(self.core.call(member, self.now))

    @rule(replica_id=st.sampled_from("xyz"))
    def withdraw(self, replica_id: str) -> None:
        if replica_id in self.calling:
            self.calling.remove(replica_id)
            self.joined.pop(replica_id)
            self.unary[replica_id] = self.now
        self._check(self.core.withdraw(replica_id, self.now))

    @rule(replica_id=st.sampled_from("xyz"))
    def heartbeat(self, replica_id: str) -> None:
        if replica_id not in self.calling:
            self.unary[replica_id] = self.now
        self._check(self.core.heartbeat(replica_id, self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._expire()
        self._check(self.core.advance(self.now))
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self.now

    @rule()
    def wait_for_the_deadline(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is None:
            return
        early = self.core.advance(max(self.now, deadline - 0.001))
        assert early == []
        self.now = deadline
        self._expire()
        decisions = self.core.advance(self.now)
        assert decisions or (self.core.next_deadline() or math.inf) > deadline  # one more idle replica
        self._check(decisions)

    @rule(target=sessions)
    def restart(self) -> object:
        self.first_id = self.newest_id + RESTART_MS
        self._start()
        return multiple()

    @rule(target=sessions, order=st.permutations("abcdefg"), missed=st.sets(REPLICAS))
    def crash_while_answering(self, order: list[str], missed: set[str]) -> object:
        """Two quorums, the second keeps the id if it can; some miss it, and all are back in any order."""
        for session in sorted(self.owners) * 2:
            self.join(session, shrink_only=False, failures=0)
        present = [i for i in order if i in self.owners.values()]
        self.restart()
        return multiple(*(self.register(i, "missed" if i in missed else "good") for i in present))

    # -- properties

    @invariant()
    def the_wait_of_each_is_known(self) -> None:
        self.since = {i: self.since.get(i, self.now) for i in self.joined}

    @invariant()
    def nothing_is_kept_of_those_who_are_gone(self) -> None:
        alive = len(set(self.owners.values())) + len(self.calling) + len(self.unary)
        expected = len(self.core._healthy.expected_ids())
        assert len(self.core) == alive + expected
        assert len(self.core._healthy._owners) == len(set(self.owners.values()))
        assert set(self.core._joined) == set(self.joined)
        assert self.core._departed <= self.core._last
        assert self.core._missing == len(self.core._last - self.core._joined.keys())
        assert self.core._shrinking == sum(m.shrink_only for m in self.joined.values())

    @invariant()
    def nobody_waits_for_a_member_that_lacks_the_quorum(self) -> None:
        present = set(self.owners.values()) - self.left
        for replica_id in present:
            number, ids = self.waits.get(replica_id, NOTHING)
            assert all(self.knows[i] == number for i in ids & present), f"{replica_id} waits in {number}"

    @invariant()
    def the_explanation_can_be_had_at_any_time(self) -> None:
        text = self.core.describe(self.now)
        assert "no quorum yet" in text
        assert all(i in text for i in self.joined)

    def _joins(self, member: Member) -> None:
        self.left_out &= self.joined.keys()
        shrink_only = member.shrink_only and member.replica_id not in self.left_out
        self.joined[member.replica_id] = member._replace(shrink_only=shrink_only)

    def _check(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, QuorumFormed):
                self._check_quorum(decision)
            elif isinstance(decision, MemberLost):
                told = {self.owners[n] for n in decision.sessions}
                assert decision.replica_id not in told
                self._told(told, decision.quorum_id)
            elif isinstance(decision, QuorumOver):
                assert self.owners[decision.session] == decision.replica_id
                assert 0 < decision.quorum_id <= self.last[0].quorum_id
                self._told({decision.replica_id}, decision.quorum_id)
            elif isinstance(decision, LeftOut):
                assert set(decision.replica_ids) <= self.joined.keys()
                self.left_out |= set(decision.replica_ids)
                for number, replica_id in decision.sessions:
                    assert self.owners[number] == replica_id
                    self.joined[replica_id] = self.joined[replica_id]._replace(shrink_only=False)
                    self.waits[replica_id] = NOTHING  # it has joined: in the last quorum it waits for nobody
            else:
                assert isinstance(decision, SessionSuperseded)
                assert decision.session not in self.owners

    def _check_quorum(self, formed: QuorumFormed) -> None:
        ids = frozenset(m.replica_id for m in formed.quorum.participants)
        self._check_members(formed, ids)
        number = QuorumNumber(formed.quorum.quorum_id, formed.quorum.round)
        self._check_number(number, ids, formed.new_id)
        assert {self.owners[n] for n in formed.sessions} | set(formed.callers) == ids
        for replica_id in ids:
            self.seen_before[replica_id] = self.last_seen.get(replica_id, NOTHING)
            self.last_seen[replica_id] = self.waits[replica_id] = (number, ids)
            self.knows[replica_id] = number
            del self.joined[replica_id]
        for replica_id in formed.callers:
            self.calling.discard(replica_id)
            self.unary[replica_id] = self.now
        self.since = dict.fromkeys(self.joined, self.now)
        self.left -= ids
        self.last, self.broken = (number, ids), set()

    def _check_members(self, formed: QuorumFormed, ids: frozenset[str]) -> None:
        assert ids
        assert [m.replica_id for m in formed.quorum.participants] == sorted(ids)
        assert len(ids) >= self.config.min_replicas
        assert ids <= self.joined.keys()  # so nobody who is lost
        assert all(self.joined[m.replica_id] == m for m in formed.quorum.participants)
        healthy = set(self.owners.values()) | self.calling | self.unary.keys()
        last = self.last[1]
        fast = bool(last) and last <= self.joined.keys()
        limit = self.config.join_timeout_ms / 1000
        is_late = any(self.now >= since + limit for since in self.since.values())
        assert fast or is_late or len(self.joined) > len(healthy) // 2
        members = self.joined.keys() & last
        is_void = len(members) < self.config.min_replicas or (is_late and not ids <= members)
        shrinking = any(self.joined[i].shrink_only for i in members) and not is_void
        candidates = members if shrinking else set(self.joined)
        assert ids <= candidates
        self._check_links(ids, candidates, 0 if is_late else len(healthy))

    def _check_links(self, ids: frozenset[str], candidates: set[str], healthy: int) -> None:
        """Either all are in, or no two who cannot reach each other, most of the healthy and the newest."""
        links = {(a, b) for a, others in self.unreachable.items() for b in others if a != b}
        links = {link for link in links if candidates.issuperset(link)}
        out = candidates - ids
        if not out:
            return
        assert not any(ids.issuperset(link) for link in links)
        assert all(any(i in link for link in links) for i in out)
        assert len(ids) > healthy / 2
        newest = max(self.joined[i].step for i in candidates)
        assert any(self.joined[i].step == newest for i in ids)

    def _check_number(self, number: QuorumNumber, ids: frozenset[str], new_id: bool) -> None:
        quorum_id = number.quorum_id
        assert number > self.last[0]
        for replica_id in ids & set(self.owners.values()):  # as callers report nothing
            assert number > self.last_seen.get(replica_id, NOTHING)[0]
        if quorum_id in self.ids:
            assert self.ids[quorum_id] == ids, "an id was given to two sets of members"
            assert all(self.joined[i].commit_failures == 0 for i in ids)
            assert not self.broken, "a member was gone in between: the others have aborted their groups"
        else:
            assert new_id
        self.ids[quorum_id] = ids
        self.newest_id = max(self.newest_id, quorum_id)

    # -- bookkeeping

    def _told(self, replica_ids: set[str], quorum_id: int) -> None:
        """They give that quorum up: whatever they wait for in it, they wait no more."""
        for replica_id in replica_ids:
            if self.waits[replica_id][0].quorum_id == quorum_id:
                self.waits[replica_id] = NOTHING

    def _close(self, session: int) -> str | None:
        replica_id = self.owners.pop(session, None)
        if replica_id is not None:
            self.joined.pop(replica_id, None)
            self.unreachable.pop(replica_id, None)
            self.broken |= {replica_id} & self.last[1]
        return replica_id

    def _expire(self) -> None:
        timeout = self.config.heartbeat_timeout_ms / 1000
        silent = {i for i, t in self.unary.items() if self.now >= t + timeout}
        self.unary = {i: t for i, t in self.unary.items() if i not in silent}
        self.broken |= silent & self.last[1]


TestLighthouseHistory = LighthouseHistory.TestCase
TestLighthouseHistory.settings = settings(max_examples=300, stateful_step_count=40)
