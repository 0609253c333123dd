"""The rules for what the ranks' arguments of one call must have in common: statements in, a disagreement out.

This module knows specifications of tensors as text such as `float32[4, 2]`, and nothing about tensors.

There are two kinds of rules. The *same* argument on different ranks must have the same shape and dtype
(`SAME`). A tensor and the *place* it goes to on another rank must fit each other; the other rules say which
place that is. If all ranks passed exactly the same, with the same for each place, they do not disagree, and
the backend decides whether the call makes sense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchft_like.core.agreement.statements import (
    EXCHANGED,
    GATHERED,
    SAME,
    SCATTERED,
    SHARED_OUT,
    Statement,
)


@dataclass(frozen=True)
class Disagreement:
    """What does not fit, and which rank passed what: rank to text."""

    aspect: str
    calls: Mapping[int, str]


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
    found = _first_difference(_without_devices(sent.inputs), _without_devices(received.outputs))
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


def _without_devices(specs: Sequence[str]) -> tuple[str, ...]:
    """Drop the devices: only bytes go from rank to rank, so the tensors may be on different devices."""
    return tuple(spec.partition("]")[0] for spec in specs)
