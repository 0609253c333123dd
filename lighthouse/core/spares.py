"""The spares: replicas that are there, and take part in nothing until there is a place for one. It is pure.

To the rules of the quorum core a spare is a replica whose process has yet to start: it is not healthy, has
not joined, and nobody waits for it. What it says is kept, and heard when it takes a place. From then on it is
a replica like any other, also when it comes back: it reports a quorum then, and is no spare any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lighthouse.core.decisions import Member
from lighthouse.core.identity import Identity
from lighthouse.core.membership import Session

IS_A_SPARE = "is a spare, and waits for a place"


@dataclass(slots=True)
class Spare:
    """A spare, since when it is there, and what it has said."""

    replica_id: str
    session: Session
    since: float
    identity: Identity | None = None
    member: Member | None = None


class Spares:
    """The spares in the order in which they came."""

    def __init__(self) -> None:
        self._spares: dict[str, Spare] = {}
        self._names: dict[int, str] = {}  # by session

    def __len__(self) -> int:
        return len(self._spares)

    def __iter__(self) -> Iterator[Spare]:
        return iter(self._spares.values())

    def open(self, spare: Spare) -> None:
        """Add a spare."""
        self._spares[spare.replica_id] = spare
        self._names[spare.session.number] = spare.replica_id

    def named(self, replica_id: str) -> Spare | None:
        """Return the spare with this name."""
        return self._spares.get(replica_id)

    def of_session(self, session: int) -> Spare | None:
        """Return the spare that speaks through a session."""
        return self._spares.get(self._names.get(session, ""))

    def close(self, session: int) -> Spare | None:
        """Forget the spare that speaks through a session, and return it."""
        return self._spares.pop(self._names.pop(session, ""), None)

    @property
    def joined(self) -> int:
        """How many spares ask for a quorum."""
        return sum(spare.member is not None for spare in self)

    def first_joined(self) -> Spare | None:
        """Return the first spare that asks for a quorum."""
        return next((spare for spare in self if spare.member is not None), None)
