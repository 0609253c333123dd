"""A quickcheck: 4,000 random stories, told to the quorum core and to its naive twin.

Of the broken cores of `tests/simulation/mutants.py` that have to do with no spare, the last one is caught by
story 646.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import cast

import pytest

from lighthouse.core.claims import Past
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import (
    Decision,
    FindMembers,
    LeftOut,
    Member,
    QuorumFormed,
    QuorumOver,
    QuorumReleased,
    Refused,
)
from lighthouse.core.identity import Identity
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import QuorumCore
from lighthouse.core.state_form import form_of_rows
from tests.unit.lighthouse.twin import Twin

CASES = 4_000
EVENTS_MAX = 14

Event = tuple[str, tuple[object, ...]]

_OF_SESSIONS = frozenset({"join", "lost", "leave", "report_links", "hold", "give_up", "identify"})

_MODEL, _STEPPED, _WIDER = (
    (form_of_rows(rows),)
    for rows in (
        [("w", "float32 [4]"), ("optim.state", "")],
        [("w", "float32 [4]"), ("optim.state[0].exp_avg", "float32 [4]")],
        [("w", "float32 [8]")],
    )
)


@pytest.mark.one_quorum_per_step
@pytest.mark.monotonic
@pytest.mark.no_regress
@pytest.mark.progress
@pytest.mark.timeout(600)  # seconds of computing, on a machine that may be busy
def test_core_and_twin_decide_alike() -> None:
    counts = map(sum, zip(*map(_compare, range(CASES)), strict=True))
    quorums, left_out, sick, named, looked_for, told, refused = counts
    assert quorums > CASES  # the stories are about something
    assert left_out > CASES / 50
    assert sick > CASES / 50
    assert named > CASES / 50
    assert looked_for > CASES / 50
    assert told > CASES / 50
    assert refused > CASES / 20


def _compare(seed: int) -> tuple[int, ...]:
    """Tell one story to both; return how many quorums were in it, how often some were left out, and for
    reasons of their own, how often a step was named at which a quorum ends that stood, how often its members
    were looked for, how often one was told to give a quorum up, and how many were refused.
    """
    chance = random.Random(seed)
    config = LighthouseConfig(
        min_replicas=chance.choice((1, 1, 2, 3)),
        join_timeout_ms=chance.choice((0, 1000, 4000)),
        heartbeat_timeout_ms=2000,
        reconnect_grace_ms=chance.choice((0, 1500)),
        start_grace_ms=chance.choice((0, 0, 700)),
        standing_lease_ms=chance.choice((0, 2000)),
        sick_pause_ms=chance.choice((0, 500, 2000)),
        sick_pause_max_ms=3000,
        job_id=chance.choice(("", "", "", "x")),
    )
    core, twin = QuorumCore(config, 100), Twin(config, 100)
    at_once = 0 in (config.join_timeout_ms, config.reconnect_grace_ms)
    story = _Story(chance)
    quorums, left_out, sick, named, looked_for, told, refused, now = 0, 0, 0, 0, 0, 0, 0, 0.0
    for _ in range(chance.randint(4, EVENTS_MAX) + len(story.plan)):
        now += chance.choice((0.0, 0.0, 0.5, 1.0, 3.0))
        name, arguments = story.next()
        ours, theirs = _tell(core, name, arguments, now), _tell(twin, name, arguments, now)
        assert ours == theirs, f"seed {seed}, {name}{arguments} at {now}"
        assert len(core) == len(twin.healthy()), f"seed {seed}"
        deadline = core.next_deadline()
        assert deadline is None or deadline > now or at_once, f"seed {seed}"
        quorums += sum(isinstance(decision, QuorumFormed) for decision in ours)
        named += sum(isinstance(decision, QuorumReleased) for decision in ours)
        looked_for += sum(isinstance(decision, FindMembers) for decision in ours)
        refused += sum(isinstance(decision, Refused) for decision in ours)
        story.hear(ours)
        out = [decision for decision in ours if isinstance(decision, LeftOut) and decision.replica_ids]
        left_out += len(out)
        sick += sum(not set(decision.replica_ids).isdisjoint(dict(decision.reasons)) for decision in out)
        told += sum(isinstance(decision, QuorumOver) and decision.must_answer for decision in ours)
    return quorums, left_out, sick, named, looked_for, told, refused


def _tell(who: QuorumCore | Twin, name: str, arguments: tuple[object, ...], now: float) -> list[Decision]:
    if name == "register":
        number, replica_id, last, ids, stands = cast(
            "tuple[int, str, QuorumNumber, list[str], bool]", arguments
        )
        if len(ids) == 3:  # the lighthouse has stated it
            who.reported(replica_id, Past(last.quorum_id, frozenset(ids), number % 3, stands))
    event: Callable[..., list[Decision]] = getattr(who, name)
    at = {"register": 4, "leave": 1}.get(name, len(arguments))  # the place of the time among the arguments
    return event(*arguments[:at], now, *arguments[at:])


class _Story:
    """Random events about four replicas, most of them plausible."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._sessions: list[tuple[int, str]] = []
        self._replicas = "abcd"
        self._quorum, self._round = 0, 0  # the last one, to hold in
        self._may_stand = chance.random() < 0.5
        self._is_sick = chance.random() < 0.4
        self._joins = chance.choice((3, 8))
        self._identifies = chance.choice((0, 0, 3))
        self.plan = self._rounds() if chance.random() < 0.2 else []
        if self._may_stand and chance.random() < 0.5:
            self.plan = chance.choice((self._standing, self._cut_off))()
        if not self.plan and chance.random() < 0.3:
            self.plan = chance.choice((self._minority, self._jobs))()

    def next(self) -> Event:
        chance = self._chance
        if self.plan and chance.random() < 0.9:
            return self._planned(*self.plan.pop(0))
        kinds = ["register", "lost", "leave", "call", "withdraw", "heartbeat", "advance", "gone"]
        holds = ["hold"] * 4 * self._may_stand
        kinds += ["register", "report_links", "give_up", *["identify"] * self._identifies]
        kind = chance.choice([*kinds, *["join"] * self._joins, *holds])
        replica_id = chance.choice(self._replicas)
        if kind == "register" or (kind in _OF_SESSIONS and not self._sessions):
            return self._register(replica_id)
        if kind in _OF_SESSIONS:
            return self._of_session(kind, *chance.choice(self._sessions))
        if kind == "call":
            return kind, (self._member(replica_id),)
        return kind, () if kind == "advance" else (replica_id,)

    def hear(self, decisions: list[Decision]) -> None:
        """Take up the quorum in which the members hold."""
        for decision in decisions:
            if isinstance(decision, QuorumFormed):
                self._quorum, self._round = decision.quorum.quorum_id, decision.quorum.round

    def _of_session(self, kind: str, number: int, replica_id: str) -> Event:
        chance = self._chance
        arguments: dict[str, tuple[object, ...]] = {
            "join": (number, self._member(replica_id)),
            "lost": (number, "gone"),
            "leave": (
                number,
                chance.randint(0, 3),
                chance.choice((0, self._quorum, self._quorum, self._quorum - 1)),
            ),
            "give_up": (number, QuorumNumber(self._quorum, self._round)),
            "hold": (number, QuorumNumber(self._quorum, self._round), chance.randint(0, 3)),
            "identify": (number, self._identity()),
            "report_links": (number, tuple(chance.sample("abcde", chance.choice((0, 1, 1, 2))))),
        }
        return kind, arguments[kind]

    def _rounds(self) -> list[tuple[str, str]]:
        """All are there, and ask for some quorums, between which they report links."""
        plan = [("register", replica_id) for replica_id in self._replicas]
        for _ in range(self._chance.randint(1, 3)):
            plan += [("report_links", self._chance.choice(self._replicas))]
            plan += [("join", i) for i in self._chance.sample(self._replicas, len(self._replicas))]
        return plan

    def _standing(self) -> list[tuple[str, str]]:
        """Some have a quorum, which perhaps stands; another one comes or one of them goes, and they hold."""
        chance = self._chance
        members = chance.sample(self._replicas, 3)
        (other,) = set(self._replicas) - set(members)
        plan = [(kind, replica_id) for kind in ("register", "join") for replica_id in members]
        plan += chance.choice(([("register", other), ("join", other)], [("leave", members[0])]))
        return plan + [(kind, i) for kind in ("hold", "join") for i in chance.sample(members, 3)]

    def _minority(self) -> list[tuple[str, str]]:
        """All have a quorum; one or two ask for the next one, and the others do not."""
        plan = [(kind, replica_id) for kind in ("register", "join") for replica_id in self._replicas]
        askers = self._chance.sample(self._replicas, self._chance.choice((1, 2)))
        plan += [("join", i) for i in askers]
        absent = [i for i in self._replicas if i not in askers]
        plan += [("advance", "a"), *(("give_up", i) for i in absent)]
        return [*plan, ("advance", "a"), ("advance", "a")]

    def _cut_off(self) -> list[tuple[str, str]]:
        """Two have a quorum that perhaps stands, and two others come; the first two are lost, or hang."""
        members, others = self._replicas[:2], self._replicas[2:]
        plan = [(kind, replica_id) for kind in ("register", "join") for replica_id in members]
        plan += [("lost", i) for i in self._chance.sample(members, self._chance.choice((1, 2, 2)))]
        return plan + [(kind, replica_id) for kind in ("register", "join") for replica_id in others]

    def _jobs(self) -> list[tuple[str, str]]:
        """All say who they are before they join; first some of them, then the others."""
        ids = self._chance.sample(self._replicas, 4)
        some = self._chance.randint(1, 3)
        rounds = ids[:some], ids[some:], ids
        return [(kind, i) for part in rounds for kind in ("register", "identify", "join") for i in part]

    def _planned(self, kind: str, replica_id: str) -> Event:
        if kind == "advance":
            return kind, ()
        numbers = [number for number, owner in self._sessions if owner == replica_id]
        if kind == "register" or not numbers:
            return self._register(replica_id)
        return self._of_session(kind, numbers[-1], replica_id)

    def _register(self, replica_id: str) -> Event:
        number = len(self._sessions) + 1
        self._sessions.append((number, replica_id))
        quorum_id = self._chance.choice((0, 0, 0, 100, 101, 102, 7, 8, 150))
        ids = self._chance.sample(self._replicas, self._chance.randint(0, 4)) if quorum_id else []
        last = QuorumNumber(quorum_id, self._chance.randint(0, 3) if quorum_id else 0)
        return "register", (number, replica_id, last, ids, self._may_stand)

    def _identity(self) -> Identity:
        chance = self._chance
        forms = chance.choice(((), _MODEL, _MODEL, _STEPPED, _WIDER, (*_MODEL, *_MODEL)))
        return Identity(chance.choice(("", "", "", "x", "y")), chance.choice((0, 0, 0, 100, 101, 7)), forms)

    def _member(self, replica_id: str) -> Member:
        chance = self._chance
        return Member(
            replica_id,
            step=1 if self._may_stand and chance.random() < 0.9 else chance.randint(0, 3),
            shrink_only=chance.random() < 0.1,
            commit_failures=int(chance.random() < 0.1),
            commit_quorum_id=0 if self._may_stand else chance.choice((0, 0, 0, 99, 104, 160)),
            broken_quorum_id=0 if self._may_stand else chance.choice((0, 0, 100, 101, 102, 103)),
            may_stand=self._may_stand and chance.random() < 0.9,
            own_failure="it is sick" if self._is_sick and chance.random() < 0.4 else "",
            own_failures=chance.choice((0, 1, 2, 2, 3, 9)) if self._is_sick else 0,
            timeout_ms=chance.choice((0, 0, 100, 3_000, 7_200_000)),
        )
