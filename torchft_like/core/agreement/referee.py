"""The referee: which calls of the ranks belong together, and which ranks are missing.

It is pure: calls, losses and the time go in, rulings come out. One referee serves one configuration of a
group.

The n-th collective of one rank belongs to the n-th of every other: they are compared when the last
rank has called. A send belongs to the oldest receive of its target that takes its source and tag, a
receive to the oldest such send. No call waits for another one of its own rank, so every order that is
free of deadlocks without a referee is free of them with one.

Collectives have a deadline. A send or a receive has none until its rank says that it has waited long enough
(`overdue`): one for which no rank waits may stay open for as long as its group lives.

After a ruling that a rank is missing, every call is refused: some ranks have given up on collectives that
others may still call, so their numbers differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from torchft_like.core.agreement.rules import (
    Disagreement,
    disagreement,
    pair_disagreement,
)
from torchft_like.core.agreement.statements import PAIRED, Statement


@dataclass(frozen=True)
class Missing:
    """Ranks that have not come in time, or never will, and the calls in which the others wait: rank to texts.

    Attributes:
        ranks: the missing ranks.
        lost: whether their connections are closed.
        seconds: how many seconds the others waited.
    """

    ranks: tuple[int, ...]
    waiting: Mapping[int, tuple[str, ...]]
    lost: bool = False
    seconds: float = 0.0


Problem = Disagreement | Missing


@dataclass(frozen=True)
class Ruling:
    """The ruling on one call: it may run if `problem` is None."""

    rank: int
    ticket: int
    problem: Problem | None = None


@dataclass(frozen=True)
class Call:
    """One rank's call. A rank never uses a ticket twice.

    Attributes:
        since_s, deadline_s: when the call came, and until when the others may come.
        number: the number of a collective among those of its rank.
    """

    rank: int
    ticket: int
    statement: Statement
    since_s: float
    deadline_s: float
    number: int | None = None

    def text(self) -> str:
        """Describe the call in a line, for the other ranks' errors."""
        return self.statement.text(self.number)


@dataclass
class Referee:
    """The state of one group's calls. Every method returns the rulings that follow from its event."""

    world_size: int
    _collectives: list[deque[Call]] = field(default_factory=list)  # a queue for each rank
    _called: list[int] = field(default_factory=list)  # how many collectives each rank has called
    _present: int = 0  # how many ranks have called the next collective
    _sends: list[Call] = field(default_factory=list)
    _receives: list[Call] = field(default_factory=list)
    _lost: set[int] = field(default_factory=set)
    _verdict: Missing | None = None

    def __post_init__(self) -> None:
        self._collectives = [deque() for _ in range(self.world_size)]
        self._called = [0] * self.world_size

    def hear(self, call: Call) -> list[Ruling]:
        """Handle a rank's call."""
        if self._verdict is not None:
            return [Ruling(call.rank, call.ticket, self._verdict)]
        if call.statement.rule == PAIRED:
            return self._pair(call)
        self._called[call.rank] += 1
        waiting = self._collectives[call.rank]
        waiting.append(replace(call, number=self._called[call.rank]))
        self._present += len(waiting) == 1
        if self._present == self.world_size:
            return self._compare()
        return self._give_up_lost() if self._lost else []

    def lose(self, rank: int) -> list[Ruling]:
        """Handle the loss of a rank: other ranks wait for it in vain, even in what it has called, as it gets
        no ruling.
        """
        self._lost.add(rank)
        self._collectives[rank].clear()
        self._sends = [call for call in self._sends if call.rank != rank]
        self._receives = [call for call in self._receives if call.rank != rank]
        self._count_present()
        return self._give_up_lost()

    def overdue(self, rank: int, ticket: int, now_s: float) -> list[Ruling]:
        """Handle a rank's report that it has waited long enough for a call of its own."""
        own = [call for call in self._waiting() if (call.rank, call.ticket) == (rank, ticket)]
        return self._refuse_all(own[0], now_s) if own else []

    def expire(self, now_s: float) -> list[Ruling]:
        """Handle the passing of time."""
        late = [call for call in self._heads() if call.deadline_s <= now_s]
        return self._refuse_all(late[0], now_s) if late else []

    def next_deadline_s(self) -> float | None:
        """Return when `expire` has something to decide; None if no collective waits."""
        return min((call.deadline_s for call in self._heads()), default=None)

    def _heads(self) -> Iterable[Call]:
        """Return the next collective of each rank."""
        return (calls[0] for calls in self._collectives if calls)

    def _waiting(self) -> Iterable[Call]:
        return chain(*self._collectives, self._sends, self._receives)

    def _compare(self) -> list[Ruling]:
        calls = [waiting.popleft() for waiting in self._collectives]
        self._count_present()
        problem = disagreement([call.statement for call in calls], calls[0].number or 0)
        return [Ruling(call.rank, call.ticket, problem) for call in calls]

    def _count_present(self) -> None:
        self._present = sum(map(bool, self._collectives))

    def _pair(self, call: Call) -> list[Ruling]:
        peer, is_send = call.statement.peer, call.statement.operation == "send"
        if peer is not None and (peer == call.rank or not 0 <= peer < self.world_size):
            return [Ruling(call.rank, call.ticket)]  # there is no such peer: the backend raises the error
        own, others = (self._sends, self._receives) if is_send else (self._receives, self._sends)
        match = next((other for other in others if _belong_together(call, other)), None)
        if match is None:
            own.append(call)
            return self._give_up_lost() if self._lost else []
        others.remove(match)
        sent, received = (call, match) if is_send else (match, call)
        problem = pair_disagreement(sent.rank, sent.statement, received.rank, received.statement)
        return [Ruling(one.rank, one.ticket, problem) for one in (sent, received)]

    def _refuse_all(self, late: Call, now_s: float) -> list[Ruling]:
        missing = self._missing_for(late)
        self._verdict = Missing(missing, self._texts(), seconds=round(now_s - late.since_s, 1))
        rulings = [Ruling(call.rank, call.ticket, self._verdict) for call in self._waiting()]
        self._present = 0
        for calls in (*self._collectives, self._sends, self._receives):
            calls.clear()
        return rulings

    def _give_up_lost(self) -> list[Ruling]:
        """Refuse the calls that wait for a rank that is gone."""
        vain = [call for call in self._waiting() if self._is_vain(call)]
        if not vain:
            return []
        problem = Missing(tuple(sorted(self._lost)), self._texts(), lost=True)
        for calls in (*self._collectives, self._sends, self._receives):
            for call in [call for call in calls if call in vain]:
                calls.remove(call)
        self._count_present()
        return [Ruling(call.rank, call.ticket, problem) for call in vain]

    def _is_vain(self, call: Call) -> bool:
        if call.number is not None:
            return bool(self._lost)
        if (peer := call.statement.peer) is not None:
            return peer in self._lost
        return len(self._lost) == self.world_size - 1

    def _missing_for(self, call: Call) -> tuple[int, ...]:
        if call.number is not None:
            return tuple(rank for rank, calls in enumerate(self._collectives) if not calls)
        if (peer := call.statement.peer) is not None:
            return (peer,)
        return tuple(rank for rank in range(self.world_size) if rank != call.rank)

    def _texts(self) -> dict[int, tuple[str, ...]]:
        texts: dict[int, tuple[str, ...]] = {}
        for call in self._waiting():
            texts[call.rank] = (*texts.get(call.rank, ()), call.text())
        return texts


def _belong_together(one: Call, other: Call) -> bool:
    """Return whether a send and a receive name each other, and the same tag."""
    return (
        one.statement.tag == other.statement.tag
        and one.statement.peer in (None, other.rank)
        and other.statement.peer in (None, one.rank)
    )
