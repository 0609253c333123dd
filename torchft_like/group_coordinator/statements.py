"""What a rank says about its call before data moves, as bytes of one fixed length, and whether all fit.

Pure: statements in, a disagreement out. A statement has terms, which must be the same on every rank
(operation, dtype, dim, root), and counts and a payload, which are the rank's own (rows, lengths, a
small object). A rank that cannot take part says why instead: the others hear it, and none of them waits
for data that will not come.

What is too long for its place is cut, and a digest of the whole stands for the rest. Whether the terms are
depends on them alone: they must be the same on every rank still, whatever else it has to say.
"""

from __future__ import annotations

import hashlib
import json
import string
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torchft_like.errors import CollectiveMismatchError, GroupCoordinatorError

STATEMENT_BYTES = 2048
_HEAD = struct.Struct("<HH")
ROOM_BYTES = STATEMENT_BYTES - _HEAD.size
PAYLOAD_BYTES_MAX = 1024
_COUNTS_MAX = 8
_COUNT_CHARACTERS_MAX = 20  # with a comma
_CALL_BYTES_MAX = ROOM_BYTES - PAYLOAD_BYTES_MAX - _COUNTS_MAX * _COUNT_CHARACTERS_MAX
_TERM_CHARACTERS_MAX = 80
_TEXT_CHARACTERS_MAX = 240
_PLAIN = frozenset(string.printable) - frozenset("\t\n\r\x0b\x0c")
_Terms: TypeAlias = "tuple[tuple[str, str], ...]"


@dataclass(frozen=True)
class Statement:
    """One rank's part in one call.

    Attributes:
        operation: the name of the method.
        terms: aspect and value, each of which must be the same on every rank.
        counts: whole numbers of the rank's own, at most eight.
        payload: bytes of the rank's own, at most `PAYLOAD_BYTES_MAX`.
        refusal: why the rank cannot take part, None if it does.
    """

    operation: str
    terms: _Terms = ()
    counts: tuple[int, ...] = ()
    payload: bytes = b""
    refusal: str | None = None

    def announcing(self, structure: bytes) -> Statement:
        """The same call, with what a receiver must know of a structure: all of it, if it is small."""
        small = structure if len(structure) <= PAYLOAD_BYTES_MAX else b""
        return replace(self, counts=(len(structure),), payload=small)

    def refused(self, error: Exception) -> Statement:
        """The same call, which this rank cannot make."""
        return replace(self, counts=(), payload=b"", refusal=f"{type(error).__name__}: {error}")

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"{self.operation}: {self.refusal}"
        return " ".join([self.operation, *(f"{aspect} {value}" for aspect, value in self.terms)])


def encode(statement: Statement) -> bytes:
    """`STATEMENT_BYTES` bytes."""
    if len(statement.counts) > _COUNTS_MAX or len(statement.payload) > PAYLOAD_BYTES_MAX:
        raise ValueError(f"too much for a statement: {statement}")
    text = _text(replace(statement, terms=_fitting_terms(statement.operation, statement.terms)))
    if statement.refusal is not None and len(text) + len(statement.payload) > ROOM_BYTES:
        refusal = _cut(statement.refusal, _TEXT_CHARACTERS_MAX)
        text = _text(replace(statement, terms=_as_one(statement.terms), refusal=refusal))
    return (_HEAD.pack(len(text), len(statement.payload)) + text + statement.payload).ljust(
        STATEMENT_BYTES, b"\0"
    )


def decode(data: bytes) -> Statement:
    """What `encode` made bytes of.

    Raises:
        GroupCoordinatorError: it did not.
    """
    try:
        text_length, payload_length = _HEAD.unpack_from(data)
        start, end = _HEAD.size + text_length, _HEAD.size + text_length + payload_length
        if end > len(data):
            raise ValueError("a length goes beyond the end")
        operation, terms, counts, refusal = json.loads(data[_HEAD.size : start])
        return Statement(
            str(operation),
            tuple((str(aspect), str(value)) for aspect, value in terms),
            tuple(_count(count) for count in counts),
            data[start:end],
            None if refusal is None else str(refusal),
        )
    except (ValueError, TypeError, struct.error, RecursionError) as error:
        raise GroupCoordinatorError(
            f"a rank said something that is no statement ({error}): do all run the same version, and are "
            "there calls on this group beside the coordinator's?"
        ) from error


def check(statements: Mapping[int, Statement]) -> None:
    """Whether the calls of some ranks belong together.

    Raises:
        CollectiveMismatchError: they do not.
    """
    first = next(iter(statements.values()))
    if all(_agrees(first, statement) for statement in statements.values()):
        return
    calls = {rank: str(statement) for rank, statement in statements.items()}
    raise CollectiveMismatchError(_aspect(statements.values()), calls)


def _agrees(first: Statement, other: Statement) -> bool:
    return other.refusal is None and (other.operation, other.terms) == (first.operation, first.terms)


def _aspect(statements: Collection[Statement]) -> str:
    """What differs."""
    first = next(iter(statements))
    if any(statement.operation != first.operation for statement in statements):
        return "operation"
    if any(statement.refusal is not None for statement in statements):
        return "arguments"
    if len({tuple(aspect for aspect, _ in statement.terms) for statement in statements}) > 1:
        return "arguments"
    differing = (
        aspect
        for place, (aspect, value) in enumerate(first.terms)
        if any(statement.terms[place][1] != value for statement in statements)
    )
    return next(differing)


def _text(statement: Statement) -> bytes:
    said = [statement.operation, statement.terms, statement.counts, statement.refusal]
    return json.dumps(said, separators=(",", ":")).encode()


def _fitting_terms(operation: str, terms: _Terms) -> _Terms:
    """The terms, their long values cut, or, where there are many, all of them as one."""
    if _is_short(operation, terms):
        return terms
    cut = tuple((aspect, _fitting(value)) for aspect, value in terms)
    return cut if _is_short(operation, cut) else _as_one(terms)


def _is_short(operation: str, terms: _Terms) -> bool:
    """Whether there is room for it beside all that a rank may have to say of its own."""
    return len(_text(Statement(operation, terms))) <= _CALL_BYTES_MAX


def _as_one(terms: _Terms) -> _Terms:
    whole = ", ".join(f"{aspect} {value}" for aspect, value in terms)
    return (("arguments", _fitting(whole)),)


def _fitting(value: str) -> str:
    if len(value) <= _TERM_CHARACTERS_MAX and _PLAIN.issuperset(value):
        return value
    digest = hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{_cut(value, _TERM_CHARACTERS_MAX)} #{digest}"


def _cut(text: str, characters_max: int) -> str:
    """Plain characters only: in JSON others are longer than they look."""
    plain = "".join(character if character in _PLAIN else "?" for character in text[: 2 * characters_max])
    return plain if len(plain) <= characters_max else f"{plain[: characters_max - 3]}..."


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r:.40} is no count")
    return value
