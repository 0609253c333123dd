"""A quickcheck: 50,000 random stories, told to the quorum core and to its naive twin."""

from __future__ import annotations

import random
from collections.abc import Callable

from lighthouse.config import LighthouseConfig
from lighthouse.membership import QuorumNumber
from lighthouse.quorum import Decision, Member, QuorumCore, QuorumFormed
from tests.unit.lighthouse.twin import Twin

CASES = 50_000
EVENTS_MAX = 14

Event = tuple[str, tuple[object, ...]]


def test_core_and_twin_decide_alike() -> None:
    quorums = sum(_compare(seed) for seed in range(CASES))
    assert quorums > CASES  # the stories are about something


def _compare(seed: int) -> int:
    """Tell one story to both; returns how many quorums there were in it."""
    chance = random.Random(seed)
    config = LighthouseConfig(
        min_replicas=chance.choice((1, 1, 2, 3)),
        join_timeout_ms=chance.choice((0, 1000, 4000)),
        heartbeat_timeout_ms=2000,
        reconnect_grace_ms=chance.choice((0, 1500)),
    )
    core, twin = QuorumCore(config, 100), Twin(config, 100)
    at_once = 0 in (config.join_timeout_ms, config.reconnect_grace_ms)
    story = _Story(chance)
    quorums, now = 0, 0.0
    for _ in range(chance.randint(4, EVENTS_MAX)):
        now += chance.choice((0.0, 0.0, 0.5, 1.0, 3.0))
        name, arguments = story.next()
        ours, theirs = _tell(core, name, arguments, now), _tell(twin, name, arguments, now)
        assert ours == theirs, f"seed {seed}, {name}{arguments} at {now}"
        assert len(core) == len(twin.healthy()), f"seed {seed}"
        deadline = core.next_deadline()
        assert deadline is None or deadline > now or at_once, f"seed {seed}"
        quorums += sum(isinstance(decision, QuorumFormed) for decision in ours)
    return quorums


def _tell(who: QuorumCore | Twin, name: str, arguments: tuple[object, ...], now: float) -> list[Decision]:
    event: Callable[..., list[Decision]] = getattr(who, name)
    return event(*arguments, now)


class _Story:
    """Random events about four replicas, most of them plausible."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._sessions: list[tuple[int, str]] = []
        self._replicas = "abcd"
        self._joins = chance.choice((3, 8))

    def next(self) -> Event:
        chance = self._chance
        kinds = ["register", "lost", "leave", "call", "withdraw", "heartbeat", "advance"]
        kind = chance.choice([*kinds, "register", *["join"] * self._joins])
        replica_id = chance.choice(self._replicas)
        if kind == "register" or (kind in {"join", "lost", "leave"} and not self._sessions):
            return self._register(replica_id)
        if kind in {"join", "lost", "leave"}:
            number, replica_id = chance.choice(self._sessions)
            arguments: dict[str, tuple[object, ...]] = {
                "join": (number, self._member(replica_id)),
                "lost": (number, "gone"),
                "leave": (number,),
            }
            return kind, arguments[kind]
        if kind == "call":
            return kind, (self._member(replica_id),)
        return kind, () if kind == "advance" else (replica_id,)

    def _register(self, replica_id: str) -> Event:
        number = len(self._sessions) + 1
        self._sessions.append((number, replica_id))
        quorum_id = self._chance.choice((0, 0, 0, 100, 101, 102, 7, 8, 150))
        ids = self._chance.sample(self._replicas, self._chance.randint(0, 4)) if quorum_id else []
        last = QuorumNumber(quorum_id, self._chance.randint(0, 3) if quorum_id else 0)
        return "register", (number, replica_id, last, ids)

    def _member(self, replica_id: str) -> Member:
        chance = self._chance
        return Member(
            replica_id,
            step=chance.randint(0, 3),
            shrink_only=chance.random() < 0.1,
            commit_failures=int(chance.random() < 0.1),
            commit_quorum_id=chance.choice((0, 0, 0, 99, 104, 160)),
            broken_quorum_id=chance.choice((0, 0, 100, 101, 102, 103)),
        )
