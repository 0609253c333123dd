"""The referee: which calls of the ranks belong together, whether they fit, and which ranks are missing.

It is pure: calls, losses and the time go in, rulings come out. It knows specifications of tensors as text
such as `float32[4, 2]`, and nothing about tensors. One referee serves one configuration of a group.

The n-th collective of one rank belongs to the n-th of every other: they are compared when the last
rank has called. A send belongs to the oldest receive of its target that takes its source and tag, a
receive to the oldest such send. No call waits for another one of its own rank, so every order that is
free of deadlocks without a referee is free of them with one.

Ranks that predict calls (`prediction`) state only those that are not as predicted, and say nothing about the
others until they are asked. A rank that states a later call, or says that it has passed this one, has made it
as predicted: its part is the one that it had in the agreement that was predicted.

Collectives have a deadline. A send or a receive has none until its rank says that it has waited long enough
(`overdue`): one for which no rank waits may stay open for as long as its group lives.

A rank in whose backend a call has timed out asks why. Where nothing else is known, the referee asks all ranks
how far they are, and names those that do not answer, or else those that have made the fewest calls.

After a ruling that a rank is missing, every call is refused: some ranks have given up on collectives that
others may still call, so their numbers differ. So is every call after a disagreement with a rank whose call,
as predicted, was under way already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torchft_like.core.agreement.prediction import NO_AGREEMENT, Predictor
from torchft_like.core.agreement.statements import (
    EXCHANGED,
    GATHERED,
    PAIRED,
    SAME,
    SCATTERED,
    SHARED_OUT,
    Statement,
)

COMPARED_MAX = 1000  # calls that ranks which predict have compared, until they compare no more
ENOUGH = COMPARED_MAX + 1  # the agreement of a call that was not compared, as none is from then on
ANSWER_S_MAX = 0.5  # seconds that ranks have to answer how far they are, when a call has timed out
NAMED_MAX = 4  # calls of a rank that an error names
NO_TICKET = 0
_LOST = -1


@dataclass(frozen=True)
class Disagreement:
    """What does not fit, and which rank passed what: rank to text."""

    aspect: str
    calls: Mapping[int, str]


@dataclass(frozen=True)
class Missing:
    """Ranks that have not come in time, or never will, and the calls in which the others wait: rank to texts.

    Attributes:
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
    """The ruling on one call: it may run if `problem` is None.

    Attributes:
        ticket: the call's; `NO_TICKET` if the rank does not wait for a ruling.
        agreement: the number of the agreement that the call follows, where ranks predict calls.
        is_final: whether the group is of no use any more.
    """

    rank: int
    ticket: int
    problem: Problem | None = None
    agreement: int = NO_AGREEMENT
    is_final: bool = False


@dataclass(frozen=True)
class Question:
    """A question to a rank: how far it is, and with each collective until this one how far it is then."""

    rank: int
    number: int


Answer = Ruling | Question


@dataclass(frozen=True)
class Call:
    """One rank's call. A rank never uses a ticket twice.

    Attributes:
        since_s, deadline_s: when the call came, and until when the others may come.
        number: the number of a collective among those of its rank, from 1 on; 0 for a send or a receive.
    """

    rank: int
    ticket: int
    statement: Statement
    since_s: float
    deadline_s: float
    number: int = 0

    def text(self) -> str:
        """Describe the call in a line, for the other ranks' errors."""
        return self.statement.text(self.number or None)


@dataclass
class Referee:
    """The state of one group's calls. Every method returns the answers that follow from its event.

    Args:
        predicts: whether the ranks predict calls, and state only those that are not as predicted.
    """

    world_size: int
    predicts: bool = False
    _collectives: list[deque[Call]] = field(default_factory=list)  # a queue for each rank
    _called: list[int] = field(default_factory=list)  # the last collective that each rank has called
    _open: int = 0  # the number of the next collective to compare; 0 if no rank waits for one
    _present: int = 0  # how many ranks have called it
    _compared: int = 0  # how many were compared
    _settled: int = 0  # the number of the last of them
    _asked: int = 0  # the highest number that ranks were asked about
    _predictor: Predictor = field(default_factory=Predictor)
    _agreements: dict[tuple[Statement, ...], int] = field(default_factory=dict)
    _statements: list[tuple[Statement, ...]] = field(default_factory=lambda: [()])  # of each agreement
    _sends: list[Call] = field(default_factory=list)
    _receives: list[Call] = field(default_factory=list)
    _lost: set[int] = field(default_factory=set)
    _asking: set[int] = field(default_factory=set)  # ranks whose backends have failed, and that wait for why
    _silent: set[int] = field(default_factory=set)  # those that have not answered how far they are
    _waited_s: float = 0.0  # how long the first that asked had waited for its call
    _answers_by_s: float = 0.0
    _verdict: Problem | None = None

    def __post_init__(self) -> None:
        self._collectives = [deque() for _ in range(self.world_size)]
        self._called = [0] * self.world_size

    def hear(self, call: Call) -> list[Answer]:
        """Handle a rank's call.

        Raises:
            ValueError: the rank cannot have made the calls before it.
        """
        if self._verdict is not None:
            return [Ruling(call.rank, call.ticket, self._verdict, is_final=True)]
        if call.statement.rule == PAIRED:
            return self._pair(call)
        if self._is_enough():
            return [Ruling(call.rank, call.ticket, agreement=ENOUGH)]
        number, before = call.number, self._called[call.rank]
        if number <= before or (number > before + 1 and self._predictor.next == NO_AGREEMENT):
            raise ValueError(f"collective #{number} after #{before}")
        self._collectives[call.rank].append(call)
        self._advance(call.rank, number)
        if not 0 < self._open <= number:
            self._open_next()
        return [*self._compare_all(), *(self._give_up_lost() if self._lost else [])]

    def passed(self, rank: int, number: int) -> list[Answer]:
        """Handle a rank's answer: it has made its collectives up to this one."""
        self._silent.discard(rank)
        if number > self._called[rank] != _LOST and self._predictor.next != NO_AGREEMENT:
            self._advance(rank, number)
        answers = self._compare_all()
        return answers if self._silent else [*answers, *self._name_missing()]

    def why(self, rank: int, number: int, waited_s: float, now_s: float) -> list[Answer]:
        """Answer a rank whose backend has failed: with the verdict, if there is one.

        It hears so before it goes on: a rank that was told earlier may have broken its connections.

        Args:
            number: the last collective that the rank has called, if one has timed out; else 0.
            waited_s: how long that took.
        """
        if self._verdict is not None or self._is_enough() or not (number or self._asking):
            return [Ruling(rank, NO_TICKET, self._verdict, is_final=self._verdict is not None)]
        questions: list[Answer] = []
        if not self._asking:
            self._waited_s, self._answers_by_s = waited_s, now_s + ANSWER_S_MAX
            self._silent = {*range(self.world_size)} - self._lost - {rank}
            questions = [Question(other, number) for other in sorted(self._silent)]
        self._asking.add(rank)
        return [*questions, *self.passed(rank, number)]

    def lose(self, rank: int) -> list[Answer]:
        """Handle the loss of a rank: other ranks wait for it in vain, even in what it has called, as it gets
        no ruling.
        """
        self._lost.add(rank)
        self._asking.discard(rank)
        self._silent.discard(rank)
        self._called[rank] = _LOST
        self._collectives[rank].clear()
        self._sends = [call for call in self._sends if call.rank != rank]
        self._receives = [call for call in self._receives if call.rank != rank]
        self._open_next()
        return [*self._give_up_lost(), *([] if self._silent else self._name_missing())]

    def overdue(self, rank: int, ticket: int, now_s: float) -> list[Answer]:
        """Handle a rank's report that it has waited long enough for a call of its own."""
        own = [call for call in self._waiting() if (call.rank, call.ticket) == (rank, ticket)]
        return self._miss(own[0], now_s) if own else []

    def expire(self, now_s: float) -> list[Answer]:
        """Handle the passing of time."""
        if self._asking and self._answers_by_s <= now_s:
            return self._name_missing()
        late = [call for call in self._heads() if call.deadline_s <= now_s]
        return self._miss(late[0], now_s) if late else []

    def next_deadline_s(self) -> float | None:
        """Return when `expire` has something to decide; None if no collective waits, and no rank asks why."""
        answers_by = [self._answers_by_s] if self._asking else []
        return min((*answers_by, *(call.deadline_s for call in self._heads())), default=None)

    def _heads(self) -> Iterable[Call]:
        """Return the next collective of each rank."""
        return (calls[0] for calls in self._collectives if calls)

    def _waiting(self) -> Iterable[Call]:
        return chain(*self._collectives, self._sends, self._receives)

    def _is_enough(self) -> bool:
        return self.predicts and self._compared >= COMPARED_MAX

    def _advance(self, rank: int, number: int) -> None:
        before, self._called[rank] = self._called[rank], number
        self._present += before < self._open <= number

    def _open_next(self) -> None:
        """Turn to the lowest collective that a rank states: what came before it was as predicted."""
        self._open = min((call.number for call in self._heads()), default=0)
        self._present = sum(number >= self._open for number in self._called)

    def _compare_all(self) -> list[Answer]:
        """Compare what all ranks have called; then ask those whose silence may mean that they have, too."""
        answers: list[Answer] = []
        while self._open and self._present == self.world_size:
            answers += self._compare()
        if self._open > self._asked and self._predictor.next != NO_AGREEMENT:
            self._asked = self._open
            answers += [Question(rank, self._open) for rank, n in enumerate(self._called) if n < self._open]
        return answers

    def _compare(self) -> list[Answer]:
        number = self._open
        self._predictor.confirm(number - self._settled - 1)
        predicted = self._predictor.next
        heads = (waiting[0] if waiting else None for waiting in self._collectives)
        calls = [head if head and head.number == number else None for head in heads]
        statements = tuple(
            call.statement if call else self._statements[predicted][rank] for rank, call in enumerate(calls)
        )
        problem = disagreement(statements, number)
        self._settled = number
        self._compared += 1
        if problem is not None and None in calls:
            return self._refuse_all(problem, number)
        agreement = NO_AGREEMENT
        if problem is None and self.predicts:
            # The ranks that are silent follow the agreement that was predicted, so the others have to.
            agreement = predicted if None in calls else self._number_of(statements)
            self._predictor.learn(agreement)
        for call in calls:
            if call is not None:
                self._collectives[call.rank].popleft()
        self._open_next()
        answers: list[Answer] = [
            Ruling(call.rank, call.ticket, problem, agreement) for call in calls if call is not None
        ]
        return answers + (self._let_all_run() if self._is_enough() else [])

    def _number_of(self, statements: tuple[Statement, ...]) -> int:
        number = self._agreements.setdefault(statements, len(self._statements))
        if number == len(self._statements):
            self._statements.append(statements)
        return number

    def _let_all_run(self) -> list[Answer]:
        """Let everything run that waits, as nothing is compared from now on."""
        waiting = [call for calls in self._collectives for call in calls]
        for calls in self._collectives:
            calls.clear()
        self._open_next()
        return [Ruling(call.rank, call.ticket, agreement=ENOUGH) for call in waiting]

    def _pair(self, call: Call) -> list[Answer]:
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

    def _miss(self, late: Call, now_s: float) -> list[Answer]:
        seconds = round(now_s - late.since_s, 1)
        return self._refuse_all(Missing(self._missing_for(late), self._texts(), seconds=seconds), self._open)

    def _name_missing(self) -> list[Answer]:
        """Tell the ranks that ask why their backends have failed who is missing, as far as is known."""
        asking, self._asking = self._asking, set()
        if not asking:
            return []
        called = {rank: number for rank, number in enumerate(self._called) if rank not in self._lost}
        least, most = min(called.values()), max(called[rank] for rank in asking)
        behind = {rank for rank, number in called.items() if number == least < most}
        missing = self._lost or self._silent or behind
        if not missing:
            return [Ruling(rank, NO_TICKET) for rank in sorted(asking)]
        waiting = {rank: (f"collective #{n}",) for rank, n in called.items() if rank not in missing}
        problem = Missing(tuple(sorted(missing)), waiting, lost=bool(self._lost), seconds=self._waited_s)
        return self._refuse_all(problem, min(called[rank] for rank in asking))

    def _refuse_all(self, verdict: Problem, number: int) -> list[Answer]:
        """Refuse everything from now on, and tell the ranks that are in this collective already."""
        self._verdict = verdict
        waiting = list(self._waiting())
        begun = {rank for rank, called in enumerate(self._called) if called >= number > 0}
        tickets = [
            *((call.rank, call.ticket) for call in waiting),
            *((rank, NO_TICKET) for rank in sorted(begun - {call.rank for call in waiting})),
        ]
        for calls in (*self._collectives, self._sends, self._receives):
            calls.clear()
        self._open_next()
        return [Ruling(rank, ticket, verdict, is_final=True) for rank, ticket in tickets]

    def _give_up_lost(self) -> list[Answer]:
        """Refuse the calls that wait for a rank that is gone."""
        vain = [call for call in self._waiting() if self._is_vain(call)]
        if not vain:
            return []
        problem = Missing(tuple(sorted(self._lost)), self._texts(), lost=True)
        for calls in self._collectives:  # of which each one is in vain, as some rank is lost
            calls.clear()
        self._sends = [call for call in self._sends if not self._is_vain(call)]
        self._receives = [call for call in self._receives if not self._is_vain(call)]
        self._open_next()
        return [Ruling(call.rank, call.ticket, problem) for call in vain]

    def _is_vain(self, call: Call) -> bool:
        if call.number:
            return bool(self._lost)
        if (peer := call.statement.peer) is not None:
            return peer in self._lost
        return len(self._lost) == self.world_size - 1

    def _missing_for(self, call: Call) -> tuple[int, ...]:
        if call.number:
            return tuple(rank for rank, called in enumerate(self._called) if called < call.number)
        if (peer := call.statement.peer) is not None:
            return (peer,)
        return tuple(rank for rank in range(self.world_size) if rank != call.rank)

    def _texts(self) -> dict[int, tuple[str, ...]]:
        calls: dict[int, list[Call]] = {}
        for call in self._waiting():
            calls.setdefault(call.rank, []).append(call)
        return {rank: _named(of_rank) for rank, of_rank in calls.items()}


def _named(calls: Sequence[Call]) -> tuple[str, ...]:
    """Describe a rank's calls. Each of them is told so, and thousands may wait: the rest is counted."""
    texts = tuple(call.text() for call in calls[:NAMED_MAX])
    return texts if len(calls) <= NAMED_MAX else (*texts, f"and {len(calls) - NAMED_MAX} more")


def _belong_together(one: Call, other: Call) -> bool:
    """Return whether a send and a receive name each other, and the same tag."""
    return (
        one.statement.tag == other.statement.tag
        and one.statement.peer in (None, other.rank)
        and other.statement.peer in (None, one.rank)
    )


# -- what the ranks' arguments of one call must have in common: statements in, a disagreement out
#
# There are two kinds of rules. The *same* argument on different ranks must have the same shape and dtype
# (`SAME`). A tensor and the *place* it goes to on another rank must fit each other; the other rules say which
# place that is. If all ranks passed exactly the same, with the same for each place, they do not disagree, and
# the backend decides whether the call makes sense.


def disagreement(calls: Sequence[Statement], number: int | None = None) -> Disagreement | None:
    """Compare the ranks' statements of one call, in the order of ranks; return None if they fit.

    Args:
        number: the number of the call, for the texts.
    """
    first = calls[0]
    if first.refusal is None and all(call is first or call == first for call in calls) and _is_plain(first):
        return None
    found = _difference(calls) or _misfit(calls)
    if found is None:
        return None
    aspect, tensor = found
    return Disagreement(aspect, {rank: call.text(number, tensor) for rank, call in enumerate(calls)})


def pair_disagreement(
    sender: int, sent: Statement, receiver: int, received: Statement
) -> Disagreement | None:
    """Compare a send with the receive that would take it; return None if they fit."""
    found = _first_difference(_moved_alike(sent.inputs), _moved_alike(received.outputs))
    if found is None:
        return None
    return Disagreement(found[0], dict(sorted([(sender, sent.text()), (receiver, received.text())])))


def _is_plain(call: Statement) -> bool:
    """Return whether equal statements always fit, because all ranks' places are alike."""
    if call.rule == SAME:
        return True
    return call.root is None and len(set(call.inputs)) <= 1 and len(set(call.outputs)) <= 1


# What differs, and the index of the tensor in a list that differs.
_Found = tuple[str, int | None]


def _difference(calls: Sequence[Statement]) -> _Found | None:
    """Return what should be the same on every rank and is not."""
    for aspect, value in _ASPECTS.items():
        if len({value(call) for call in calls}) > 1:
            return aspect, None
    if any(call.refusal is not None for call in calls):
        return "arguments", None
    if (name := _differing_term(calls)) is not None:
        return name, None
    shared = [_shared(call) for call in calls]
    return next(filter(None, (_first_difference(shared[0], other) for other in shared[1:])), None)


_ASPECTS: dict[str, Callable[[Statement], object]] = {
    "operation": lambda call: call.operation,
    "root": lambda call: call.root,
    "reduce op": lambda call: call.reduce_op,
}


def _differing_term(calls: Sequence[Statement]) -> str | None:
    """Return the name of the first term that differs between ranks; `arguments` if the names differ."""
    if len({tuple(name for name, _ in call.terms) for call in calls}) > 1:
        return "arguments"
    of_all_ranks = zip(*(call.terms for call in calls), strict=True)
    return next((terms[0][0] for terms in of_all_ranks if len({*terms}) > 1), None)


def _shared(call: Statement) -> tuple[str, ...]:
    if call.rule == SAME:
        return (*call.inputs, *call.outputs)
    return call.inputs if call.rule == SHARED_OUT else ()


def _misfit(calls: Sequence[Statement]) -> _Found | None:
    """Return what does not fit its place on another rank."""
    if calls[0].rule not in _WITH_PLACES:
        return None
    wrong = _wrong_places(calls)
    if wrong is None:
        wrong = next((_aspect(sent, taken) for sent, taken in _moved(calls) if sent != taken), None)
    return None if wrong is None else (wrong, None)


_WITH_PLACES = frozenset({GATHERED, SCATTERED, SHARED_OUT, EXCHANGED})


def _wrong_places(calls: Sequence[Statement]) -> str | None:
    """Find lists that do not have one place for each rank, or are on the wrong ranks."""
    for rank, call in enumerate(calls):
        has_lists = call.root is None or call.root == rank
        for places, beside in _lists_of(call):
            if places and not has_lists:
                return "root"
            if len(places) != (len(calls) if has_lists else 0) or len(beside) != 1:
                return "number of tensors"
    return None


def _lists_of(call: Statement) -> list[tuple[Sequence[str], Sequence[str]]]:
    """Return the arguments with a place for each rank, each with the single one that belongs to it."""
    if call.rule == GATHERED:
        return [(call.outputs, call.inputs)]
    if call.rule == EXCHANGED:
        return [(call.outputs, _ANY_ONE), (call.inputs, _ANY_ONE)]
    return [(call.inputs, call.outputs)]


_ANY_ONE = ("",)


def _moved(calls: Sequence[Statement]) -> Iterator[tuple[str, str]]:
    """Yield each tensor that goes from rank to rank, as its sender and as its receiver describe it."""
    for source, sender in enumerate(calls):
        for target, receiver in enumerate(calls):
            sent = sender.inputs if sender.rule == GATHERED else sender.inputs[target : target + 1]
            is_alone = sender.rule in (SCATTERED, SHARED_OUT)
            taken = receiver.outputs if is_alone else receiver.outputs[source : source + 1]
            yield from zip(sent, taken, strict=False)


def _first_difference(one: Sequence[str], other: Sequence[str]) -> _Found | None:
    if len(one) != len(other):
        return "number of tensors", None
    places = enumerate(zip(one, other, strict=True))
    return next(((_aspect(a, b), place) for place, (a, b) in places if a != b), None)


def _aspect(one: str, other: str) -> str:
    """Return what differs between two specifications."""
    (dtype, _, rest), (other_dtype, _, other_rest) = one.partition("["), other.partition("[")
    if dtype != other_dtype:
        return "dtype"
    return "shape" if rest.partition("]")[0] != other_rest.partition("]")[0] else "device"


def _moved_alike(specs: Sequence[str]) -> tuple[str, ...]:
    """Drop the devices, and write [] as [1], as torch's pipelines do: only bytes go from rank to rank."""
    shapes = (spec.partition("]")[0] for spec in specs)
    return tuple(f"{shape}1" if shape.endswith("[") else shape for shape in shapes)
