"""One rank's description of a call before data moves, as a value and as bytes.

A statement has what must fit the other ranks' statements (operation, tensors, root, terms), or the reason why
the rank cannot take part: the other ranks learn it, and none of them waits for its data.

There are two forms of bytes. `encode` returns all of a statement, in any length. A *record* has a fixed
length, so that ranks can exchange records without telling each other sizes: in it a statement that is too
long is cut, and a digest of the whole stands for the rest. Whether it is cut depends on the statement alone,
so the records of ranks that state the same begin with the same bytes. After the statement a record has a
number and a payload of the rank's own.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import string
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lighthouse.core.json_text import read_json

# The rules that the tensors of a call follow; `referee` defines them.
SAME = "same"  # every argument is the same on every rank
GATHERED = "gathered"  # output i, of each rank that has outputs, takes the input of rank i
SCATTERED = "scattered"  # input i, of each rank that has inputs, goes to the output of rank i
SHARED_OUT = "shared out"  # the inputs are the same on every rank; input i goes to the output of rank i
EXCHANGED = "exchanged"  # input d of rank s goes to output s of rank d
PAIRED = "paired"  # a send and a receive

Terms = tuple[tuple[str, str], ...]

TEXT_SPECS_MAX = 6
USUAL_REDUCE_OP = "SUM"  # not mentioned in texts
TENSORS_MAX = 1_000_000
REMEMBERED_BYTES_MAX = 16 * 1024
RECORD_BYTES = 2048
PAYLOAD_BYTES_MAX = 1024
NUMBER_MAX = 2**62
_HEAD = struct.Struct("<HHQ?")  # bytes of the statement, bytes of the payload, the number, whether it refuses
CALL_BYTES_MAX = RECORD_BYTES - PAYLOAD_BYTES_MAX - _HEAD.size
_VALUE_CHARACTERS_MAX = 80
_REASON_CHARACTERS_MAX = 240
_PLAIN = frozenset(string.printable) - frozenset("\t\n\r\x0b\x0c")


class RecordError(ValueError):
    """The bytes are no statement, or no record of one."""


@dataclass(frozen=True)
class Statement:
    """One rank's part in one call.

    Attributes:
        operation: the name of a row in the table of collectives, or of a method.
        rule: the rule that `inputs` and `outputs` follow.
        inputs, outputs: specifications of tensors, as `specification` makes them; lists with a tensor for
        each rank are in the order of ranks.
        root: the rank at which a rooted collective begins or ends.
        reduce_op: the reduce operation.
        peer, tag: the peer and the tag of a send or a receive; a peer of None is any rank.
        terms: the name and the value of each further argument that must be the same on every rank.
        refusal: why the rank cannot take part; None if it does.
    """

    operation: str
    rule: str = SAME
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    root: int | None = None
    reduce_op: str | None = None
    peer: int | None = None
    tag: int | None = None
    terms: Terms = ()
    refusal: str | None = None

    def refused(self, error: Exception) -> Statement:
        """Return the same call, which this rank cannot make because of `error`."""
        return replace(self, refusal=f"{type(error).__name__}: {error}")

    def text(self, number: int | None = None, tensor: int | None = None) -> str:
        """Describe the call in a line, `allreduce #7 float32[4, 2]`, where 7 counts the group's collectives.

        Long lists are cut short; `tensor` is the index of an input that the line names in any case.
        """
        words = [self.operation, *([f"#{number}"] if number is not None else []), *self._where()]
        if self.refusal is not None:
            return f"{' '.join(words)}: {self.refusal}"
        if self.inputs:
            words.append(_listed(self.inputs, tensor))
        if self.outputs:
            words.append(f"into {_listed(self.outputs)}" if self.inputs else _listed(self.outputs))
        if self.reduce_op not in (None, USUAL_REDUCE_OP):
            words.append(f"by {self.reduce_op}")
        return " ".join([*words, *(f"{name} {value}" for name, value in self.terms)])

    def _where(self) -> Iterator[str]:
        if self.root is not None:
            yield f"root {self.root}"
        if self.rule == PAIRED:
            other = "any rank" if self.peer is None else f"rank {self.peer}"
            yield f"{'to' if self.operation == 'send' else 'from'} {other}, tag {self.tag},"


def specification(dtype: object, shape: Sequence[int], open_dim: int | None = None) -> str:
    """Return `float32[4, *]`, where the star stands for a size that each rank chooses for itself."""
    sizes = ", ".join("*" if at == open_dim else str(size) for at, size in enumerate(shape))
    return f"{str(dtype).removeprefix('torch.')}[{sizes}]"


# ---------------------------------------------------------------------------- any length


def encode(statement: Statement) -> bytes:
    """Encode all of a statement."""
    tensors = _as_runs(statement.inputs), _as_runs(statement.outputs)
    who = statement.root, statement.reduce_op, statement.peer, statement.tag
    fields = [statement.operation, statement.rule, *tensors, *who, statement.terms, statement.refusal]
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(body: bytes) -> Statement:
    """Decode what `encode` has encoded; equal bytes of usual length return the same object, as most calls
    repeat.

    Raises:
        RecordError: the bytes are no statement.
    """
    return _remembered(body) if len(body) <= REMEMBERED_BYTES_MAX else _remembered.__wrapped__(body)


@functools.lru_cache(maxsize=256)
def _remembered(body: bytes) -> Statement:
    try:
        fields = read_json(body)
    except ValueError as error:
        raise RecordError(str(error)) from error
    match fields:
        case [
            str(operation),
            str(rule),
            list(inputs),
            list(outputs),
            int() | None as root,
            str() | None as reduce_op,
            int() | None as peer,
            int() | None as tag,
            list(terms),
            str() | None as refusal,
        ]:
            tensors = _from_runs(inputs), _from_runs(outputs)
            return Statement(operation, rule, *tensors, root, reduce_op, peer, tag, _as_terms(terms), refusal)
    raise RecordError("these are not the ten fields of a statement")


def _as_runs(specs: Sequence[str]) -> list[Any]:
    """Return runs of the same specification as [specification, count]: most lists are one run."""
    return [[spec, sum(1 for _ in run)] for spec, run in itertools.groupby(specs)]


def _from_runs(runs: list[Any]) -> tuple[str, ...]:
    specs: list[str] = []
    for run in runs:
        match run:
            case [str(spec), int(count)] if 0 < count <= TENSORS_MAX - len(specs):
                specs += [spec] * count
            case _:
                raise RecordError("this is no list of tensors")
    return tuple(specs)


def _as_terms(terms: list[Any]) -> Terms:
    if not all(isinstance(term, list) and [*map(type, term)] == [str, str] for term in terms):
        raise RecordError("this is no term")
    return tuple((name, value) for name, value in terms)


# ----------------------------------------------------------------------------- records


class Record(NamedTuple):
    """The parts of a record that `pack` has made.

    Attributes:
        call: the statement, as bytes; the same bytes on every rank that states the same.
        number, payload: the rank's own number and payload.
        refuses: whether the statement is a refusal.
    """

    call: bytes
    number: int
    payload: bytes
    refuses: bool


def pack(call: bytes, number: int = 0, payload: bytes = b"", refuses: bool = False) -> bytes:
    """Make a record of `RECORD_BYTES` bytes.

    Args:
        call: the bytes that `encode_briefly` returns.
        number: a number that is not negative, and below `NUMBER_MAX`.
        payload: at most `PAYLOAD_BYTES_MAX` bytes.
    """
    if len(call) > CALL_BYTES_MAX or len(payload) > PAYLOAD_BYTES_MAX or not 0 <= number < NUMBER_MAX:
        raise ValueError(f"too much for a record: {len(call)} and {len(payload)} bytes, number {number}")
    head = _HEAD.pack(len(call), len(payload), number, refuses)
    return (head + call + payload).ljust(RECORD_BYTES, b"\0")


def unpack(data: bytes) -> Record:
    """Return the parts of a record.

    Raises:
        RecordError: the bytes are no record.
    """
    if len(data) != RECORD_BYTES:
        raise RecordError(f"{len(data)} bytes are no record")
    return unpack_all(data)[0]


def unpack_all(data: bytes) -> list[Record]:
    """Return the parts of several records, which follow each other.

    Raises:
        RecordError: some of the bytes are no record.
    """
    records: list[Record] = []
    for at in range(0, len(data), RECORD_BYTES):
        call_length, payload_length, number, refuses = _HEAD.unpack_from(data, at)
        if call_length > CALL_BYTES_MAX or payload_length > PAYLOAD_BYTES_MAX or number >= NUMBER_MAX:
            raise RecordError("a length goes beyond the end, or a number beyond its limit")
        start = at + _HEAD.size
        end = start + call_length
        fields = data[start:end], number, data[end : end + payload_length], refuses
        records.append(tuple.__new__(Record, fields))  # faster than Record's own constructor, which is Python
    return records


def pack_statement(statement: Statement, number: int = 0, payload: bytes = b"") -> bytes:
    """Make a record of a statement, cut if it is long."""
    return pack(encode_briefly(statement), number, payload, statement.refusal is not None)


def encode_briefly(statement: Statement) -> bytes:
    """Encode in at most `CALL_BYTES_MAX` bytes that `decode` takes: long values are cut, or joined."""
    brief = statement
    if brief.refusal is not None:  # a refusal need not be the same on other ranks
        brief = replace(brief, terms=(), inputs=(), refusal=_cut(brief.refusal, _REASON_CHARACTERS_MAX))
    if len(data := encode(brief)) > CALL_BYTES_MAX:
        short = tuple((name, _fitting(value)) for name, value in brief.terms)
        data = encode(replace(brief, terms=short))
    if len(data) > CALL_BYTES_MAX:
        named = (f"{name} {value}" for name, value in brief.terms)
        whole = ", ".join([*brief.inputs, *brief.outputs, *named])
        data = encode(Statement(brief.operation, terms=(("arguments", _fitting(whole)),)))
    if len(data) > CALL_BYTES_MAX:
        raise ValueError(f"the name of an operation is too long: {statement.operation:.100}")
    return data


def _fitting(value: str) -> str:
    if len(value) <= _VALUE_CHARACTERS_MAX and _PLAIN.issuperset(value):
        return value
    digest = hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{_cut(value, _VALUE_CHARACTERS_MAX)} #{digest}"


def _cut(text: str, characters_max: int) -> str:
    """Cut a text, and keep plain characters only: others are longer in JSON than they look."""
    plain = "".join(character if character in _PLAIN else "?" for character in text[: 2 * characters_max])
    return plain if len(plain) <= characters_max else f"{plain[: characters_max - 3]}..."


def _listed(specs: Sequence[str], tensor: int | None = None) -> str:
    """Describe tensors as `float32[2] x3, float32[5]`, and how many more there are."""
    runs = [(spec, count) for spec, count in _as_runs(specs)]
    shown = [spec if count == 1 else f"{spec} x{count}" for spec, count in runs[:TEXT_SPECS_MAX]]
    if len(runs) > TEXT_SPECS_MAX:
        asked = "" if tensor is None else f", number {tensor} is {specs[tensor]}"
        shown.append(f"... ({len(specs)} tensors{asked})")
    return ", ".join(shown)
