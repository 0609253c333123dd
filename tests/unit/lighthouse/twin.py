"""A naive twin of the quorum core: the same rules, worked out anew from a list of facts every time.

It is slow, and short enough to be checked by reading. It keeps no counter and no index.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile

from lighthouse.core.claims import Past
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import (
    NO_QUORUM,
    Decision,
    FindMembers,
    HoldQuorum,
    LeftOut,
    Member,
    MemberLost,
    Quorum,
    QuorumBroken,
    QuorumFormed,
    QuorumOver,
    QuorumReleased,
    Refused,
    SessionSuperseded,
)
from lighthouse.core.identity import Identity, why_foreign
from lighthouse.core.left_out import describe_pause
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import ALARMS_PER_QUORUM_MAX


@dataclass(frozen=True)
class Open:
    """A session that is open."""

    number: int
    replica_id: str
    last: QuorumNumber


@dataclass(frozen=True)
class Joined:
    """A replica that has joined, and the way in which it gets its answer."""

    member: Member
    since: float
    in_session: bool
    in_call: bool
    pause: float
    let_in: float
    left_out: bool = False
    told: bool = False
    unproven: bool = False

    @property
    def believed(self) -> Member:
        return self.member._replace(step=0, commit_quorum_id=-1) if self.unproven else self.member


@dataclass
class Standing:
    """What the members of a quorum that stands have said: the step before which they hold, or that they end
    it at.
    """

    held_for: str | None = None
    ask_at: int | None = None
    holds: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)


class Twin:
    """The rules as `QuorumCore` has them: events in, decisions out."""

    def __init__(self, config: LighthouseConfig, first_quorum_id: int) -> None:
        self.config = config
        self.sessions: list[Open] = []
        self.calling: list[str] = []
        self.seen: list[tuple[str, float]] = []
        self.expected: list[str] = []
        self.expected_until = 0.0
        self.joined: list[Joined] = []
        self.last: tuple[QuorumNumber, frozenset[str]] = (QuorumNumber(NO_QUORUM, 0), frozenset())
        self.departed: list[str] = []
        self.alive: list[str] = []  # those of them that have said so themselves
        self.silent: set[str] = set()  # members whose sessions have ended
        self.missed: dict[str, float] = {}  # those of earlier quorums, and when the others went on
        self.losses: list[tuple[str, int, float, str]] = []  # who was lost in which quorum, when and why
        self.alarms = 0
        self.highest_id = first_quorum_id - 1
        self.leap = first_quorum_id % 1_000_003
        self.highest_round = 0
        self.formed = False
        self.identities: dict[str, Identity] = {}
        self.job_began = 0  # the first quorum of the job
        self.unreachable: dict[str, tuple[str, ...]] = {}
        self.left_out: tuple[set[str], list[tuple[str, str]], set[str]] = (set(), [], set())
        self.standing: Standing | None = None
        self.given_up: set[str] = set()
        self.told: float | None = None  # when members of the last quorum were told to give it up
        self.ended: float | None = None  # when one of them had joined, or was gone
        self.healing: tuple[set[str], float] = set(), 0.0  # those that heal, and until when they are awaited
        self.heard = 0.0  # the last word from them, or to them
        self.looked: float | None = None  # when this lighthouse last looked for them
        self.began: float | None = None  # when the first event came
        self.since: dict[str, float] = {}  # of the healthy: when they registered, or were in a quorum
        self.quorums: list[Quorum] = []  # all of them, in the order in which they were formed
        # What is stated, of a quorum before, for those that were in none of them.
        self.reports: dict[str, Past] = {}

    # -- facts

    def healthy(self) -> set[str]:
        return {s.replica_id for s in self.sessions} | {*self.calling, *self.expected, *dict(self.seen)}

    def has_session(self, replica_id: str) -> bool:
        return replica_id in [s.replica_id for s in self.sessions]

    def owner(self, number: int) -> str | None:
        return next((s.replica_id for s in self.sessions if s.number == number), None)

    def numbers(self, replica_ids: AbstractSet[str]) -> tuple[int, ...]:
        return tuple(
            s.number for s in sorted(self.sessions, key=lambda s: s.replica_id) if s.replica_id in replica_ids
        )

    def clear(self, replica_id: str, *, joined: bool = True) -> None:
        self.sessions = [s for s in self.sessions if s.replica_id != replica_id]
        self.calling = [i for i in self.calling if i != replica_id]
        self.seen = [(i, t) for i, t in self.seen if i != replica_id]
        self.expected = [i for i in self.expected if i != replica_id]
        self.unreachable.pop(replica_id, None)
        if joined:
            self.identities.pop(replica_id, None)
            self.reports.pop(replica_id, None)
            self.joined = [j for j in self.joined if j.member.replica_id != replica_id]

    # -- events

    def register(
        self,
        number: int,
        replica_id: str,
        last: QuorumNumber,
        ids: list[str],
        now: float,
        stands: bool = False,
    ) -> list[Decision]:
        out = self.advance(now)
        older = [s for s in self.sessions if s.replica_id == replica_id]
        self.clear(replica_id, joined=False)
        if last.quorum_id <= 0:
            self.unreachable = {
                one: tuple(other for other in others if other != replica_id)
                for one, others in self.unreachable.items()
            }
        self.sessions.append(Open(number, replica_id, last))
        self.since[replica_id] = now
        for session in older:
            out.append(SessionSuperseded(session.number, replica_id))
            self.answer_no_more(replica_id, session=True)
        self.use_up(last.quorum_id)
        self.highest_round = max(self.highest_round, last.round)
        if last.quorum_id > 0 and last > self.last[0] and ids and not self.formed:
            self.learn(last, frozenset(ids), now, out, stands)
        if last != self.last[0]:
            self.depart(replica_id, "came back without the quorum", now, out)
        elif self.standing and self.standing.held_for:
            if self.standing.ask_at is None:
                self.standing.holds.pop(replica_id, None)
                out.append(HoldQuorum(*last, self.standing.held_for, (number,)))
            else:
                out.append(QuorumReleased(*last, self.standing.ask_at, (number,)))
        out += self.over([s for s in self.sessions if s.number == number])
        return out + self.form(now)

    def use_up(self, quorum_id: int) -> None:
        if quorum_id > self.highest_id:
            self.highest_id = quorum_id + self.leap

    def over(self, sessions: list[Open]) -> list[Decision]:
        """Return the alarms that these sessions missed."""
        return [
            QuorumOver(
                s.number, s.replica_id, s.last.quorum_id, s.last == self.last[0] and self.told is not None
            )
            for s in sorted(sessions, key=lambda s: s.replica_id)
            if s.last.quorum_id > 0
            and (self.alarms if s.last == self.last[0] else s.last < self.last[0] or self.formed)
        ]

    def learn(
        self, last: QuorumNumber, ids: frozenset[str], now: float, out: list[Decision], stands: bool
    ) -> None:
        if not self.expected:
            self.expected_until = now + self.config.reconnect_grace_ms / 1000
        self.miss(ids, now)
        self.last, self.departed, self.alive, self.silent, self.alarms = (last, ids), [], [], set(), 0
        self.given_up, self.told, self.ended, self.healing = set(), None, None, (set(), 0.0)
        self.standing = Standing() if stands else None
        self.heard, self.looked = now, None
        out += self.over(self.sessions)
        self.expected = []
        self.expected = sorted(ids - self.healthy())
        for session in sorted(self.sessions, key=lambda s: s.replica_id):
            if session.last != last:
                self.depart(session.replica_id, "came back without the quorum", now, out)
        for joined in sorted(self.joined, key=lambda j: j.member.replica_id):
            self.end_standing(joined.member.replica_id, joined.member.step, now, out)

    def miss(self, ids: frozenset[str], now: float) -> None:
        """The others go on without those that are silent."""
        self.missed |= dict.fromkeys(self.silent, now)
        self.missed = {i: t for i, t in self.missed.items() if i not in ids}

    def gone(self, replica_id: str, now: float) -> list[Decision]:
        out = self.advance(now)
        self.silent.discard(replica_id)
        self.missed.pop(replica_id, None)
        return out + self.form(now)

    def end_standing(self, replica_id: str, step: int, now: float, out: list[Decision]) -> None:
        """End the quorum that stands for a replica that asks at this step, or leaves before it."""
        if self.standing:
            if replica_id in self.last[1]:
                self.standing.holds.pop(replica_id, None)
                self.standing.ends[replica_id] = step
            elif any(now < j.let_in for j in self.joined if j.member.replica_id == replica_id):
                return
            self.all_hold(replica_id, out)

    def all_hold(self, replica_id: str, out: list[Decision]) -> None:
        number, ids = self.last
        if not (standing := self.standing):
            return
        if not standing.held_for:
            standing.held_for = replica_id
            if told := self.numbers(ids - {*standing.holds, *standing.ends}):
                out.append(HoldQuorum(*number, replica_id, told))
        steps = standing.holds | standing.ends
        was_named = standing.ask_at is not None
        if not was_named and ids <= steps.keys():
            standing.ask_at = max((standing.holds or steps).values())
        if (ask_at := standing.ask_at) is not None:
            early = [i for i, step in standing.ends.items() if step != ask_at]
            if early:
                self.break_quorum(min(early, key=standing.ends.__getitem__), out)
            elif not was_named and (told := self.numbers(set(standing.holds))):
                out.append(QuorumReleased(*number, ask_at, told))

    def hold(self, session: int, number: QuorumNumber, step: int, now: float) -> list[Decision]:
        out = self.advance(now)
        replica_id = self.owner(session)
        if replica_id in self.last[1] and self.standing and number == self.last[0]:
            if replica_id not in self.standing.ends:
                self.standing.holds[str(replica_id)] = step
            self.all_hold(str(replica_id), out)
        return out

    def give_up(self, session: int, number: QuorumNumber, now: float) -> list[Decision]:
        out = self.advance(now)
        replica_id = self.owner(session)
        if replica_id in self.last[1] and number == self.last[0]:
            self.given_up.add(str(replica_id))
            out += self.form(now)
        return out

    def join(self, number: int, member: Member, now: float) -> list[Decision]:
        out = self.advance(now)
        if self.owner(number) == member.replica_id and not self.refuse_foreign(member.replica_id, out):
            self.enter(self.with_losses(member, now), now, session=True)
            self.hear_broken(member, out)
            self.end_standing(member.replica_id, member.step, now, out)
        return out + self.form(now)

    def identify(self, number: int, identity: Identity, now: float) -> list[Decision]:
        out = self.advance(now)
        replica_id = self.owner(number)
        if replica_id is not None:
            self.identities[replica_id] = identity
            if replica_id in self.last[1] and identity.first_quorum_id:
                self.job_began = identity.first_quorum_id
            self.refuse_foreign(replica_id, out)
        return out + self.form(now)

    def refuse_foreign(self, replica_id: str, out: list[Decision]) -> bool:
        """Refuse a newcomer that differs from the lighthouse's job, or from all members."""
        own = self.identities.get(replica_id)
        if own is None or replica_id in self.last[1]:
            return False
        members = [self.identities[i] for i in sorted(self.last[1]) if i in self.identities]
        members = [replace(m, first_quorum_id=self.job_began or m.first_quorum_id) for m in members]
        reasons = [why_foreign(own, member) for member in members]
        why = why_foreign(own, Identity(self.config.job_id))
        if not why and reasons and all(reasons):
            why = reasons[0]
        if why:
            self.refuse(replica_id, why, out)
        return bool(why)

    def refuse(self, replica_id: str, why: str, out: list[Decision]) -> None:
        out += [Refused(number, replica_id, why) for number in self.numbers({replica_id})]
        self.clear(replica_id)
        self.missed.pop(replica_id, None)

    def foreign(self) -> dict[str, str]:
        """Return why some of those that have joined are not of the job that most of them are of."""
        jobs: list[tuple[Identity, list[Joined]]] = []
        for j in self.joined:
            own = self.identities.get(j.member.replica_id)
            if own is None:
                continue
            index = next((i for i, (job, _) in enumerate(jobs) if not why_foreign(own, job)), len(jobs))
            if index == len(jobs):
                jobs.append((own, []))
            job, some = jobs[index]
            filled = Identity(
                job.job_id or own.job_id,
                job.first_quorum_id or own.first_quorum_id,
                job.forms or own.forms,
                job.protocol or own.protocol,
            )
            jobs[index] = filled, [*some, j]
        if not jobs:
            return {}

        def weight(some: list[Joined]) -> tuple[int, int, tuple[int, int]]:
            of_last = sum(j.member.replica_id in self.last[1] for j in some)
            newest = max((j.member.step, j.member.commit_quorum_id) for j in some)
            return of_last, len(some), max(newest, (0, 0))

        best = max(weight(some) for _, some in jobs)
        chosen = next(job for job, some in jobs if weight(some) == best)
        why = {
            j.member.replica_id: why_foreign(self.identities[j.member.replica_id], chosen)
            for _, some in jobs
            for j in some
        }
        return {i: text for i, text in why.items() if text and i not in self.last[1]}

    def is_divided(self) -> bool:
        return len(self.joined) - len(self.foreign()) < self.config.min_replicas

    def hear_broken(self, member: Member, out: list[Decision]) -> None:
        if 0 < member.broken_quorum_id == self.last[0].quorum_id:
            self.break_quorum(member.replica_id, out)

    def break_quorum(self, replica_id: str, out: list[Decision]) -> None:
        (quorum_id, _), ids = self.last
        if replica_id in ids and not self.alarms:
            self.alarms = 1
            self.standing = None
            self.alive += [] if replica_id in self.departed else [replica_id]
            self.departed.append(replica_id)
            told = self.numbers(set(ids) - set(self.departed))
            out.append(QuorumBroken(quorum_id, replica_id, told))

    def report_links(self, number: int, unreachable: tuple[str, ...], now: float) -> list[Decision]:
        out = self.advance(now)
        replica_id = self.owner(number)
        if replica_id is not None:
            self.unreachable[replica_id] = unreachable
        return out

    def leave(self, number: int, now: float, step: int = 0, quorum_id: int = 0) -> list[Decision]:
        out = self.advance(now)
        replica_id = self.owner(number)
        if replica_id is not None:
            self.clear(replica_id)
            self.silent.discard(replica_id)
            self.missed.pop(replica_id, None)
            if replica_id in self.last[1]:
                if quorum_id not in (0, self.last[0].quorum_id):
                    self.break_quorum(replica_id, out)
                self.departed.append(replica_id)
                self.alive = [one for one in self.alive if one != replica_id]
                self.end_standing(replica_id, step, now, out)
        return out + self.form(now)

    def lost(self, number: int, reason: str, now: float) -> list[Decision]:
        out = self.advance(now)
        replica_id = self.owner(number)
        if replica_id is not None:
            self.lose(replica_id, reason, now, out)
        return out + self.form(now)

    def call(self, member: Member, now: float) -> list[Decision]:
        out = self.advance(now)
        if not self.has_session(member.replica_id):
            self.showed(member.replica_id, now)
            self.clear(member.replica_id, joined=False)
            self.calling.append(member.replica_id)
        self.enter(member, now, session=False)
        self.end_standing(member.replica_id, member.step, now, out)
        return out + self.form(now)

    def withdraw(self, replica_id: str, now: float) -> list[Decision]:
        out = self.advance(now)
        self.end_call(replica_id, now)
        self.answer_no_more(replica_id, session=False)
        return out + self.form(now)

    def heartbeat(self, replica_id: str, now: float) -> list[Decision]:
        out = self.advance(now)
        if not self.has_session(replica_id) and replica_id not in self.calling:
            self.showed(replica_id, now)
            self.clear(replica_id, joined=False)
            self.seen.append((replica_id, now))
        return out + self.form(now)

    def showed(self, replica_id: str, now: float) -> None:
        """Record since when a unary caller is healthy."""
        if replica_id not in self.calling and replica_id not in dict(self.seen):
            self.since[replica_id] = now

    def advance(self, now: float) -> list[Decision]:
        out: list[Decision] = []
        self.began = now if self.began is None else self.began
        silent = [
            i
            for i, t in sorted(self.seen, key=lambda s: s[1])
            if now >= t + self.config.heartbeat_timeout_ms / 1000
        ]
        missed = self.expected if now >= self.expected_until else []
        for replica_id in silent:
            self.lose(replica_id, "no heartbeat within heartbeat_timeout", now, out)
        for replica_id in missed:
            self.lose(replica_id, "did not come back within reconnect_grace", now, out)
        for replica_id in sorted(j.member.replica_id for j in self.joined if 0 < j.let_in <= now):
            self.all_hold(replica_id, out)
        return out + self.form(now)

    # -- the rules

    def form(self, now: float) -> list[Decision]:
        out: list[Decision] = []
        joined = {j.member.replica_id for j in self.joined}
        if self.ended is None and (self.departed or joined & self.last[1]):
            self.ended = now
        awaited = (self.healing[0] & self.healthy()) - joined - self.given_up - {*self.departed}
        self.healing = awaited, self.healing[1]
        if self.lacks_majority(now) and self.is_late(now) and not self.expected:
            out += self.tell_to_give_up(now)
        if self.is_ready(now) and not self.is_divided() and self.would_go_back(now):
            out += self.look_for_members(now)
        while self.is_quorum(now) and not self.is_divided():
            if foreign := self.foreign():
                for replica_id, why in foreign.items():
                    self.refuse(replica_id, why, out)
                return out + self.form(now)
            unproven = self.unproven()
            self.joined = [replace(j, unproven=j.member.replica_id in unproven) for j in self.joined]
            last_id = self.last[0].quorum_id
            pauses = {j.member.replica_id: j for j in self.joined if now < j.let_in}
            sick = {i: j.member for i, j in pauses.items()}
            well = self.without_sick(self.chosen(now), sick, self.counted(now))
            chosen, links = self.without_broken_links(well, self.counted(now))
            formed = self.next_quorum(chosen, now)
            waiting = {j.member.replica_id for j in self.joined}
            left = [s for s in self.sessions if s.replica_id in set(formed.left) - waiting]
            out += [
                QuorumOver(s.number, s.replica_id, last_id) for s in sorted(left, key=lambda s: s.replica_id)
            ]
            out.append(formed)
            out += self.tell_left_out(links, pauses)
        return out

    def without_sick(self, joined: list[Joined], sick: dict[str, Member], counted: set[str]) -> list[Joined]:
        stay = {j.member.replica_id: j.believed for j in joined}
        versions = {i: (member.step, member.commit_quorum_id) for i, member in stay.items()}
        order = sorted(
            sorted(sick, reverse=True),
            key=lambda i: (-sick[i].own_failures, *versions.get(i, (0, 0))),
        )
        for i in [i for i in order if i in stay and stay.keys() - sick]:
            newest = [k for k in stay if versions[k] == max(versions.values())]
            is_enough = len(stay) > self.config.min_replicas and 2 * (len(stay) - 1) >= len(counted)
            if is_enough and newest != [i]:
                del stay[i]
        return [j for j in joined if j.member.replica_id in stay]

    def without_broken_links(
        self, joined: list[Joined], counted: set[str]
    ) -> tuple[list[Joined], list[tuple[str, str]]]:
        members = {j.member.replica_id: j.believed for j in joined}
        links = {
            (min(one, other), max(one, other))
            for one, others in self.unreachable.items()
            for other in others
            if one != other and {one, other} <= members.keys()
        }
        stay = set(members)
        while bad := [link for link in links if set(link) <= stay]:
            versions = {i: (members[i].step, members[i].commit_quorum_id) for i in members}
            ahead = [i for i in stay if versions[i] == max(versions.values())]
            ends = {end for link in bad for end in link} - set(ahead if len(ahead) == 1 else ())
            count = {end: sum(end in link for link in bad) for end in ends}
            goes = [end for end in ends if count[end] == max(count.values())]
            goes = [end for end in goes if versions[end] == min(versions[i] for i in goes)]
            stay.remove(max(goes))
        if len(stay) < self.config.min_replicas or 2 * len(stay) < len(counted):
            stay = set(members)
        return [j for j in joined if j.member.replica_id in stay], sorted(links)

    def tell_left_out(self, links: list[tuple[str, str]], sick: dict[str, Joined]) -> list[Decision]:
        out = {j.member.replica_id for j in self.joined} & (
            {end for link in links for end in link} | sick.keys()
        )
        news = {j.member.replica_id for j in self.joined if not j.told} & out
        is_news = bool(links or sick) and (bool(news) or self.left_out != (out, links, set(sick)))
        self.left_out = out, links, set(sick)
        self.joined = [
            replace(j, left_out=True, told=True, member=j.member._replace(shrink_only=False))
            if j.member.replica_id in news
            else j
            for j in self.joined
        ]
        told = sorted((s.replica_id, s.number) for s in self.sessions if s.replica_id in news)
        sessions = tuple((number, i) for i, number in told)
        reasons = tuple((i, describe_pause(sick[i].member, sick[i].pause)) for i in sorted(sick))
        left_out = LeftOut(self.last[0].quorum_id, tuple(sorted(out)), tuple(links), sessions, reasons)
        return [left_out] if is_news else []

    def chosen(self, now: float) -> list[Joined]:
        last = self.last[1]
        there, members = last & self.healthy(), [j for j in self.joined if j.member.replica_id in last]
        if not any(j.member.shrink_only for j in members) or len(there) < self.config.min_replicas:
            return self.joined
        is_late = self.is_late(now)
        needed = max(self.config.min_replicas, len(self.counted(now)) // 2 + 1)
        is_void = is_late and len(members) < min(needed, len(there))
        return self.joined if is_void else members

    def is_quorum(self, now: float) -> bool:
        return self.is_ready(now) and not self.would_go_back(now)

    def is_ready(self, now: float) -> bool:
        joined, last = {j.member.replica_id for j in self.joined}, self.last[1]
        if last and last <= joined and len(self.chosen(now)) >= self.config.min_replicas:
            return True
        return self.has_majority(now) and self.all_have_joined(now)

    def would_go_back(self, now: float) -> bool:
        """Return whether the last quorum had steps that nobody who has joined has, and others may have."""
        known = [(m.step, m.commit_quorum_id) for m in self.quorums[-1].participants] if self.quorums else []
        if not known and self.reports:
            known = [(max((past.quorum_id, past.step) for past in self.reports.values())[1], 0)]
        newest = max(known, default=(0, 0))
        joined = {j.member.replica_id: (j.member.step, j.member.commit_quorum_id) for j in self.joined}
        have = [i for i in self.last[1] if i in joined and joined[i] >= newest]
        are_there = bool((self.last[1] & self.healthy()) - joined.keys())
        are_there = are_there or self.awaits_silent(now) or bool(self.awaited_still(now))
        return newest[0] > 0 and not have and are_there

    def awaits_silent(self, now: float) -> bool:
        """Return whether there are members without a session whose processes may live."""
        has_time = self.looked is None or now < self.heard + self.lease_s()
        return self.config.standing_lease_ms > 0 and has_time and bool(self.silent - self.healthy())

    def lease_s(self) -> float:
        ping = self.config.keepalive_time_ms + self.config.keepalive_timeout_ms
        return (self.config.standing_lease_ms + 2 * ping) / 1000 if self.config.standing_lease_ms > 0 else 0.0

    def awaited_still(self, now: float) -> set[str]:
        """Return the silent ones of earlier quorums whose lease has not passed."""
        return {i for i, t in self.missed.items() if now < t + self.lease_s()} - self.healthy()

    def has_majority(self, now: float) -> bool:
        return self.is_large_enough(now) and len(self.joined) > len(self.counted(now)) // 2

    def lacks_majority(self, now: float) -> bool:
        joined = {j.member.replica_id for j in self.joined}
        is_fast = bool(self.last[1]) and self.last[1] <= joined
        is_broken = bool(self.departed or joined & self.last[1])
        return self.is_large_enough(now) and is_broken and not is_fast and not self.has_majority(now)

    def is_large_enough(self, now: float) -> bool:
        if not self.joined or len(self.chosen(now)) < self.config.min_replicas:
            return False
        return bool(self.last[1]) or now >= (self.began or 0.0) + self.config.start_grace_ms / 1000

    def all_have_joined(self, now: float) -> bool:
        joined = {j.member.replica_id for j in self.joined}
        return joined == self.healthy() or self.is_late(now)

    def is_late(self, now: float) -> bool:
        since = max(self.first_join(), self.ended or 0.0)
        is_awaited = bool(self.healing[0]) and now < self.healing[1]
        return now >= since + self.config.join_timeout_ms / 1000 and not is_awaited

    def look_for_members(self, now: float) -> list[Decision]:
        is_looking = self.awaits_silent(now)
        out = self.tell_to_give_up(now) if is_looking or self.standing is not None else []
        missed = self.awaited_still(now)
        if (is_looking or missed) and (self.looked is None or now >= self.looked + 1):
            self.looked = now
            out.append(FindMembers(tuple(sorted((self.silent - self.healthy()) | missed))))
        return out

    def tell_to_give_up(self, now: float) -> list[Decision]:
        absent = (self.last[1] & self.healthy()) - {j.member.replica_id for j in self.joined}
        if self.told is not None or not absent:
            return []
        self.told = self.heard = now
        self.alarms, self.standing = self.alarms + 1, None
        there = [s for s in self.sessions if s.replica_id in absent]
        return [
            QuorumOver(s.number, s.replica_id, self.last[0].quorum_id, True)
            for s in sorted(there, key=lambda s: s.replica_id)
        ]

    def first_join(self) -> float:
        return min([j.since for j in self.joined if not j.left_out] or [j.since for j in self.joined])

    def counted(self, now: float) -> set[str]:
        """Return the replicas of which a quorum needs more than half."""
        limit = self.config.join_timeout_ms / 1000
        joined = {j.member.replica_id for j in self.joined}
        young = {i for i in self.healthy() - self.last[1] if now < self.since.get(i, now) + limit}
        members = set(self.last[1] & self.healthy()) - self.given_up
        if self.told is not None and now >= self.told + limit:
            members = {i for i in members if now < self.since.get(i, now) + limit}
        released = {i for i in self.given_up & self.healthy() if now < self.since.get(i, now) + limit}
        return joined | members | young | released

    def next_quorum(self, chosen: list[Joined], now: float) -> QuorumFormed:
        chosen = sorted(chosen, key=lambda j: j.member.replica_id)
        ids = frozenset(j.member.replica_id for j in chosen)
        (last_id, _), last = self.last
        keeps = ids == last and not self.departed and all(j.member.commit_failures <= 0 for j in chosen)
        quorum_id = last_id if keeps else self.highest_id + 1
        self.highest_id = max(self.highest_id, quorum_id)
        self.highest_round += 1
        if not ids & last:
            self.job_began = 0
        began = [self.identities[i].first_quorum_id for i in sorted(ids) if i in self.identities]
        self.job_began = self.job_began or next((b for b in began if b), quorum_id)
        self.last = (QuorumNumber(quorum_id, self.highest_round), ids)
        self.miss(ids, now)
        self.departed, self.alive, self.silent, self.alarms = [], [], set(), 0
        self.given_up, self.told, self.ended, self.healing = set(), None, None, (set(), 0.0)
        self.formed = True
        self.since |= dict.fromkeys((last | ids) & self.healthy(), now)
        self.joined = [replace(j, since=now) for j in self.joined if j not in chosen]
        versions = {(j.believed.step, j.believed.commit_quorum_id) for j in chosen}
        stands = all(now < j.let_in for j in self.joined) and len(versions) == 1 < len(chosen)
        for j in chosen:
            stands = stands and j.in_session and j.member.may_stand and not j.member.commit_failures
        stands = stands and min(step for step, _ in versions) > 0
        self.standing = Standing() if stands else None
        self.heard, self.looked = now, None
        callers = [j.member.replica_id for j in chosen if j.in_call]
        for replica_id in callers:
            self.end_call(replica_id, now)
        members = tuple(j.believed for j in chosen)
        behind = {m.replica_id: m.timeout_ms for m in members if (m.step, m.commit_quorum_id) < max(versions)}
        others = [m.timeout_ms for m in members if m.replica_id not in behind]
        self.healing = set(behind), now + min([max([*behind.values(), 0]), *others]) / 1000
        self.reports = {i: report for i, report in self.reports.items() if i not in ids}
        self.quorums.append(Quorum(quorum_id, self.highest_round, members, stands, self.job_began))
        return QuorumFormed(
            self.quorums[-1],
            self.numbers({j.member.replica_id for j in chosen if j.in_session}),
            tuple(callers),
            quorum_id != last_id,
            tuple(sorted(ids - last)),
            tuple(sorted(last - ids)),
            tuple(j.member.replica_id for j in chosen if j.unproven),
        )

    def unproven(self) -> set[str]:
        """Return whose claims nothing shows, while those of others show how far the job is."""
        claims = {j.member.replica_id: j.member for j in self.joined}
        reports = {i: report for i, report in self.reports.items() if i in claims}
        pasts = sorted(reports.values(), key=lambda past: (past.quorum_id, past.step))
        known: dict[int, Past] = {}
        for quorum in self.quorums:
            known.pop(quorum.quorum_id, None)
            steps = {m.replica_id: m.step for m in quorum.participants}
            numbers = quorum.quorum_id, frozenset(steps), max(steps.values())
            known[quorum.quorum_id] = Past(*numbers, quorum.stands)
        pasts += known.values()
        remembered = {i for i, m in claims.items() if self.is_shown(m, known, pasts)}
        reported = {
            i
            for i, past in reports.items()
            if claims[i].commit_quorum_id != -1 and claims[i].step <= self.limit(past, claims[i], pasts)
        }
        if not self.quorums and not reports:
            return set()
        showing = remembered if self.quorums else reported
        there = {i: claims[i].step for i in showing if claims[i].commit_quorum_id != -2}
        is_ahead = any(step >= pasts[-1].step for step in there.values())
        with_state = [i for i in pasts[-1].members if there.get(i, 0) > 0]
        if not is_ahead and len(with_state) <= len(pasts[-1].members) / 2:
            return set()
        least = (0, 0) if is_ahead else (pasts[-1].step, pasts[-1].quorum_id)
        shown = remembered | reported
        return {i for i, m in claims.items() if (m.step, m.commit_quorum_id) > least and i not in shown}

    def limit(self, past: Past, member: Member, pasts: list[Past]) -> float:
        """Return the greatest step that is believed of a member of this quorum that has committed in it."""
        if not past.stood:
            return past.step + 1
        back = [j.member for j in self.joined if j.member.replica_id in past.members - {member.replica_id}]
        others = [m.step for m in back if m.commit_quorum_id in (past.quorum_id, -2)]
        unmoved = [m for m in back if m.step == past.step and m.commit_quorum_id != -1]
        others += [
            m.step for m in unmoved if m.commit_quorum_id != 0 or m.step == 0
        ]  # a checkpoint's names none
        after = pasts[len(pasts) - pasts[::-1].index(past) :]
        anew = {
            m.replica_id: q.quorum_id
            for q in self.quorums
            for m in q.participants
            if m.commit_quorum_id == -1
        }
        kept = {i for i in past.members if anew.get(i, 0) <= past.quorum_id}
        later = [other.step for other in after if other.quorum_id != past.quorum_id and other.members & kept]
        return max(others) + 1 if others else max(past.step, later[0]) + 1 if later else math.inf

    def reported(self, replica_id: str, past: Past) -> None:
        self.reports.pop(replica_id, None)
        was_in = any(m.replica_id == replica_id for q in self.quorums for m in q.participants)
        if replica_id in past.members and not was_in and past.quorum_id > 0:
            self.reports[replica_id] = past

    def is_shown(self, member: Member, known: dict[int, Past], pasts: list[Past]) -> bool:
        own = [(q, m) for q in self.quorums for m in q.participants if m.replica_id == member.replica_id]
        if not own or member.commit_quorum_id == -1:
            return False
        last_rounds = {q.quorum_id: q for q, _ in own}
        had = [(own[-1][1].step, own[-1][1].commit_quorum_id)]
        had += [max((m.step, m.commit_quorum_id) for m in q.participants) for q in last_rounds.values()]
        version = member.step, member.commit_quorum_id
        if version <= (0, 0) or version in had:
            return True
        quorum_id = member.commit_quorum_id if member.commit_quorum_id > 0 else own[-1][0].quorum_id
        past = known[quorum_id] if quorum_id in last_rounds else None
        return past is not None and member.step <= self.limit(past, member, pasts)

    # -- what events have in common

    def enter(self, member: Member, now: float, *, session: bool) -> None:
        self.use_up(member.commit_quorum_id)
        older = next((j for j in self.joined if j.member.replica_id == member.replica_id), None)
        place = self.joined.index(older) if older else len(self.joined)
        if older and older.left_out:
            member = member._replace(shrink_only=False)
        pause = 0.0
        if member.own_failure and member.own_failures > 1:
            first_s, longest_s = self.config.sick_pause_ms / 1000, self.config.sick_pause_max_ms / 1000
            pause = min(longest_s, first_s * 2.0 ** (member.own_failures - 2))
        let_in = now + pause if pause else 0.0
        if older and older.member.own_failures == member.own_failures:
            pause, let_in = older.pause, older.let_in
        self.joined[place : place + 1] = [
            Joined(
                member,
                older.since if older else now,
                session or bool(older and older.in_session),
                not session or bool(older and older.in_call),
                pause,
                let_in,
                bool(older and older.left_out),
            )
        ]

    def with_losses(self, member: Member, now: float) -> Member:
        """Its losses in a row count as failures of its own, but for one."""
        lately = 2 * self.config.sick_pause_max_ms / 1000
        own = [loss for loss in self.losses if loss[0] == member.replica_id]
        if own and (member.commit_quorum_id >= own[-1][1] or now >= own[-1][2] + lately):
            self.losses = [loss for loss in self.losses if loss not in own]
            return member
        gaps = [after - before for (_, _, before, _), (_, _, after, _) in pairwise(own)]
        count = len(list(takewhile(lambda gap: gap < lately, reversed(gaps))))
        if count <= member.own_failures:
            return member
        why = f"lost {count + 1} times in a row: {own[-1][3]}"
        return member._replace(own_failure=why, own_failures=count)

    def end_call(self, replica_id: str, now: float) -> None:
        if replica_id in self.calling:
            self.calling.remove(replica_id)
            self.seen.append((replica_id, now))

    def answer_no_more(self, replica_id: str, *, session: bool) -> None:
        kept = []
        for j in self.joined:
            if j.member.replica_id == replica_id:
                j = replace(j, in_session=False) if session else replace(j, in_call=False)  # noqa: PLW2901
            if j.in_session or j.in_call:
                kept.append(j)
        self.joined = kept

    def lose(self, replica_id: str, reason: str, now: float, out: list[Decision]) -> None:
        self.clear(replica_id)
        if replica_id in self.last[1]:
            self.heard = now
            self.silent.add(replica_id)
        if not self.depart(replica_id, reason, now, out):
            told = {one for one, others in self.unreachable.items() if replica_id in others}
            out.append(MemberLost(NO_QUORUM, replica_id, reason, self.numbers(told)))

    def depart(self, replica_id: str, reason: str, now: float, out: list[Decision]) -> bool:
        (quorum_id, _), ids = self.last
        if replica_id not in ids or (replica_id in self.departed and replica_id not in self.alive):
            return False
        self.alive = [one for one in self.alive if one != replica_id]
        self.departed.append(replica_id)
        self.losses.append((replica_id, quorum_id, now, reason))
        self.alarms += 1
        self.standing = None
        survivors = set(ids) - {replica_id} if self.alarms <= ALARMS_PER_QUORUM_MAX else set()
        out.append(MemberLost(quorum_id, replica_id, reason, self.numbers(survivors)))
        return True
