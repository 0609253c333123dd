"""Which replicas are healthy, and by what sign of life.

A replica group is healthy by exactly one of four signs, in this order:

* a *session* is open: the transport's PINGs watch it, no time runs;
* a unary Quorum *call* is open: its connection is probed in the same way;
* it was *seen*: a unary call ended or a heartbeat came less than `heartbeat_timeout` ago;
* it is *expected*: it belonged to the last quorum before this lighthouse was restarted, and others
  of that quorum are back already.

A replica that shows none of them is forgotten: nothing here grows with the number of replicas that ever
were. Times are seconds on any clock that does not run backwards; the caller passes them in.

This module does not know what a quorum is, nor which replicas have asked for one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class QuorumNumber(NamedTuple):
    """The id and the round of a quorum; of two quorums, the one that formed later has the greater number."""

    quorum_id: int
    round: int


@dataclass(frozen=True, slots=True)
class Session:
    """An open stream: the number that the shell gave it, and the newest quorum that its replica knew of."""

    number: int
    last: QuorumNumber


class HealthyReplicas:
    """The healthy replicas. Each operation takes constant time, apart from `expect`."""

    def __init__(self, heartbeat_timeout: float) -> None:
        self._heartbeat_timeout = heartbeat_timeout
        self._sessions: dict[str, Session] = {}
        self._owners: dict[int, str] = {}
        self._calling: set[str] = set()
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._expected: set[str] = set()
        self._expected_until = 0.0
        self._since: dict[str, float] = {}

    def __len__(self) -> int:
        """Return how many replicas are healthy."""
        return len(self._sessions) + len(self._calling) + len(self._seen) + len(self._expected)

    def __contains__(self, replica_id: str) -> bool:
        return (
            replica_id in self._sessions
            or replica_id in self._calling
            or replica_id in self._seen
            or replica_id in self._expected
        )

    def sign_of(self, replica_id: str) -> str:
        """Return the sign by which a replica is healthy; "" if it is not."""
        signs = {
            "session": self._sessions,
            "call": self._calling,
            "heartbeat": self._seen,
            "expected": self._expected,
        }
        return next((sign for sign, shown in signs.items() if replica_id in shown), "")

    def ids(self) -> list[str]:
        """Return the ids of the healthy replicas, sorted."""
        return sorted([*self._sessions, *self._calling, *self._seen, *self._expected])

    def expected_ids(self) -> list[str]:
        """Return the ids of the replicas that are awaited after a restart, sorted."""
        return sorted(self._expected)

    def sessions(self) -> list[tuple[str, Session]]:
        """Return the open sessions, sorted by replica."""
        return sorted(self._sessions.items())

    def session_of(self, replica_id: str) -> Session | None:
        """Return the open session of a replica."""
        return self._sessions.get(replica_id)

    def owner_of(self, session: int) -> str | None:
        """Return the replica that speaks through a session; None if it ended or a newer one took over."""
        return self._owners.get(session)

    def since(self, replica_id: str) -> float:
        """Return when the replica registered, or was last in a quorum, whichever came later."""
        return self._since.get(replica_id, -math.inf)

    def were_in_a_quorum(self, replica_ids: Iterable[str], now: float) -> None:
        """Record that these replicas are in a quorum, or were until now."""
        self._since.update({i: now for i in replica_ids if i in self})

    def open_session(self, replica_id: str, session: Session, now: float) -> int | None:
        """Count the replica as healthy by this session; return the number of the session that it replaces."""
        older = self._sessions.get(replica_id)
        if older is None:
            self.forget(replica_id)
        else:
            del self._owners[older.number]
        self._sessions[replica_id] = session
        self._owners[session.number] = replica_id
        self._since[replica_id] = now
        return None if older is None else older.number

    def open_call(self, replica_id: str, now: float) -> None:
        """Count the replica as healthy while its unary Quorum call is open."""
        if replica_id in self._sessions or replica_id in self._calling:
            return
        since = self._since.get(replica_id, now)
        self.forget(replica_id)
        self._calling.add(replica_id)
        self._since[replica_id] = since

    def close_call(self, replica_id: str, now: float) -> None:
        """Record that the call was answered or withdrawn: a sign of life, as it was connected until now."""
        if replica_id in self._calling:
            self._calling.remove(replica_id)
            self._seen[replica_id] = now

    def saw(self, replica_id: str, now: float) -> None:
        """Record a unary heartbeat."""
        if replica_id in self._seen:
            self._seen[replica_id] = now
            self._seen.move_to_end(replica_id)
        elif replica_id not in self._sessions and replica_id not in self._calling:
            self._expected.discard(replica_id)
            self._seen[replica_id] = now
            self._since.setdefault(replica_id, now)

    def expect(self, replica_ids: Iterable[str], until: float) -> None:
        """Await these replicas, unless they are healthy already, instead of those awaited so far.

        A wait that runs keeps its end: a later report must not prolong it.
        """
        if not self._expected:
            self._expected_until = until
        self._expected = set()
        self._expected = {i for i in replica_ids if i not in self}

    def forget(self, replica_id: str) -> None:
        """Count the replica as healthy no more."""
        session = self._sessions.pop(replica_id, None)
        if session is not None:
            del self._owners[session.number]
        self._calling.discard(replica_id)
        self._seen.pop(replica_id, None)
        self._expected.discard(replica_id)
        self._since.pop(replica_id, None)

    def next_expiry(self) -> float:
        """Return when the next replica ceases to be healthy if nothing more is heard; inf if none does."""
        expiry = self._expected_until if self._expected else math.inf
        if self._seen:
            expiry = min(expiry, next(iter(self._seen.values())) + self._heartbeat_timeout)
        return expiry

    def expire(self, now: float) -> tuple[list[str], list[str]]:
        """Forget the replicas whose time is over; return the silent ones and those that did not come back."""
        silent = []
        while self._seen:
            replica_id, seen = next(iter(self._seen.items()))
            if seen + self._heartbeat_timeout > now:
                break
            del self._seen[replica_id], self._since[replica_id]
            silent.append(replica_id)
        if not self._expected or now < self._expected_until:
            return silent, []
        missed, self._expected = sorted(self._expected), set()
        return silent, missed
