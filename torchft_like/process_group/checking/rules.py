"""What the ranks' arguments of one collective must have in common.

Pure: descriptions in, a disagreement out. It knows specifications of tensors as text such as
`float32[4, 2]`, and nothing about tensors, backends or connections.

Two questions are asked. The *same* argument on different ranks must have the same shape and dtype
(`SAME`). A tensor and the *place* it goes to on another rank must fit each other; which place that is,
the other rules say. Where all ranks passed exactly the same, with the same for each place, there is no
disagreement between them, and whether the call makes sense is for the backend to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

SAME = "same"  # every argument is the same on every rank
GATHERED = "gathered"  # output i, of whoever has outputs, takes the input of rank i
SCATTERED = "scattered"  # input i, of whoever has inputs, goes to the output of rank i
SHARED_OUT = "shared out"  # the inputs are the same on every rank; input i goes to the output of rank i
EXCHANGED = "exchanged"  # input d of rank s goes to output s of rank d
PAIRED = "paired"  # a send and a receive

TEXT_SPECS_MAX = 6
USUAL_REDUCE_OP = "SUM"  # goes without saying


@dataclass(frozen=True)
class Description:
    """One rank's call of one collective.

    Attributes:
        operation: the name of its row in the table.
        rule: which of the rules above it follows.
        inputs, outputs: the tensors; those that have a place for each rank, in the order of ranks.
        root: the rank that a rooted collective begins or ends at.
        reduce_op: how values are combined.
        peer, tag: of a send or a receive; a peer of None is any.
    """

    operation: str
    rule: str = SAME
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    root: int | None = None
    reduce_op: str | None = None
    peer: int | None = None
    tag: int | None = None

    def text(self, number: int | None = None, tensor: int | None = None) -> str:
        """For people: `allreduce #7 float32[4, 2]`, where 7 counts the group's collectives.

        Long lists are cut short; `tensor` is one of the inputs that is to be seen nevertheless.
        """
        words = [self.operation, *([f"#{number}"] if number is not None else []), *self._where()]
        if self.inputs:
            words.append(_listed(self.inputs, tensor))
        if self.outputs:
            words.append(f"into {_listed(self.outputs)}" if self.inputs else _listed(self.outputs))
        if self.reduce_op not in (None, USUAL_REDUCE_OP):
            words.append(f"by {self.reduce_op}")
        return " ".join(words)

    def _where(self) -> Iterator[str]:
        if self.root is not None:
            yield f"root {self.root}"
        if self.rule == PAIRED:
            other = "any rank" if self.peer is None else f"rank {self.peer}"
            yield f"{'to' if self.operation == 'send' else 'from'} {other}, tag {self.tag},"


@dataclass(frozen=True)
class Disagreement:
    """What does not fit, and who passed what: rank to text."""

    aspect: str
    calls: Mapping[int, str]


def disagreement(calls: Sequence[Description], number: int) -> Disagreement | None:
    """Compare the calls of one collective, in the order of ranks; None where they fit."""
    first = calls[0]
    if all(call is first or call == first for call in calls) and _is_plain(first):
        return None
    found = _difference(calls) or _misfit(calls)
    if found is None:
        return None
    aspect, tensor = found
    return Disagreement(aspect, {rank: call.text(number, tensor) for rank, call in enumerate(calls)})


def pair_disagreement(
    sender: int, sent: Description, receiver: int, received: Description
) -> Disagreement | None:
    """Compare a send with the receive that would take it."""
    found = _first_difference(_without_devices(sent.inputs), _without_devices(received.outputs))
    if found is None:
        return None
    return Disagreement(found[0], dict(sorted([(sender, sent.text()), (receiver, received.text())])))


def _is_plain(call: Description) -> bool:
    """Whether equal descriptions always fit, because no rank's place is another than the others'."""
    if call.rule == SAME:
        return True
    return call.root is None and len(set(call.inputs)) <= 1 and len(set(call.outputs)) <= 1


# What is different, and about which tensor of a list.
_Found = tuple[str, int | None]


def _difference(calls: Sequence[Description]) -> _Found | None:
    """What should be the same on every rank and is not."""
    for aspect, value in _ASPECTS.items():
        if len({value(call) for call in calls}) > 1:
            return aspect, None
    shared = [_shared(call) for call in calls]
    return next(filter(None, (_first_difference(shared[0], other) for other in shared[1:])), None)


_ASPECTS: dict[str, Callable[[Description], object]] = {
    "operation": lambda call: call.operation,
    "root": lambda call: call.root,
    "reduce op": lambda call: call.reduce_op,
}


def _shared(call: Description) -> tuple[str, ...]:
    if call.rule == SAME:
        return (*call.inputs, *call.outputs)
    return call.inputs if call.rule == SHARED_OUT else ()


def _misfit(calls: Sequence[Description]) -> _Found | None:
    """What does not fit the place it goes to."""
    pairs = _PLACES.get(calls[0].rule)
    if pairs is None:
        return None
    wrong = _wrong_places(calls)
    if wrong is None:
        wrong = next((_aspect(one, other) for one, other in pairs(calls) if one != other), None)
    return None if wrong is None else (wrong, None)


def _wrong_places(calls: Sequence[Description]) -> str | None:
    """Lists that have not one place for each rank, or are on the wrong ranks."""
    for rank, call in enumerate(calls):
        has_lists = call.root is None or call.root == rank
        for places, beside in _lists_of(call):
            if places and not has_lists:
                return "root"
            if len(places) != (len(calls) if has_lists else 0) or len(beside) != 1:
                return "number of tensors"
    return None


def _lists_of(call: Description) -> list[tuple[Sequence[str], Sequence[str]]]:
    """The arguments with a place for each rank, each with the single one that belongs to it."""
    if call.rule == GATHERED:
        return [(call.outputs, call.inputs)]
    if call.rule == EXCHANGED:
        return [(call.outputs, _ANY_ONE), (call.inputs, _ANY_ONE)]
    return [(call.inputs, call.outputs)]


_ANY_ONE = ("",)


def _gathered(calls: Sequence[Description]) -> Iterator[tuple[str, str]]:
    for call in calls:
        yield from zip((other.inputs[0] for other in calls), call.outputs, strict=False)


def _scattered(calls: Sequence[Description]) -> Iterator[tuple[str, str]]:
    for call in calls:
        yield from zip(call.inputs, (other.outputs[0] for other in calls), strict=False)


def _exchanged(calls: Sequence[Description]) -> Iterator[tuple[str, str]]:
    for source, sender in enumerate(calls):
        for part, receiver in zip(sender.inputs, calls, strict=True):
            yield part, receiver.outputs[source]


_PLACES: dict[str, Callable[[Sequence[Description]], Iterator[tuple[str, str]]]] = {
    GATHERED: _gathered,
    SCATTERED: _scattered,
    SHARED_OUT: _scattered,
    EXCHANGED: _exchanged,
}


def _first_difference(one: Sequence[str], other: Sequence[str]) -> _Found | None:
    if len(one) != len(other):
        return "number of tensors", None
    places = enumerate(zip(one, other, strict=True))
    return next(((_aspect(a, b), place) for place, (a, b) in places if a != b), None)


def _aspect(one: str, other: str) -> str:
    """What is different about two specifications."""
    (dtype, _, rest), (other_dtype, _, other_rest) = one.partition("["), other.partition("[")
    if dtype != other_dtype:
        return "dtype"
    return "shape" if rest.partition("]")[0] != other_rest.partition("]")[0] else "device"


def _without_devices(specs: Sequence[str]) -> tuple[str, ...]:
    """Between two ranks only bytes travel: the tensors may live on different devices."""
    return tuple(spec.partition("]")[0] for spec in specs)


def _listed(specs: Sequence[str], tensor: int | None = None) -> str:
    """`float32[2] x3, float32[5]`, and how many more."""
    runs: list[tuple[str, int]] = []
    for spec in specs:
        if runs and runs[-1][0] == spec:
            runs[-1] = (spec, runs[-1][1] + 1)
        else:
            runs.append((spec, 1))
    shown = [spec if count == 1 else f"{spec} x{count}" for spec, count in runs[:TEXT_SPECS_MAX]]
    if len(runs) > TEXT_SPECS_MAX:
        asked = "" if tensor is None else f", number {tensor} is {specs[tensor]}"
        shown.append(f"... ({len(specs)} tensors{asked})")
    return ", ".join(shown)
