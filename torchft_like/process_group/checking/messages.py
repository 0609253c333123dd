"""What the ranks and the referee say to each other, as bytes.

A header of fixed size, then JSON of bounded length. Nothing that arrives is trusted: what does not read
as one of these messages raises ValueError, and whoever sent it is treated as lost.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchft_like.process_group.checking.referee import Missing, Problem
from torchft_like.process_group.checking.rules import Description, Disagreement

CALL, OVERDUE = 1, 2
BODY_BYTES_MAX = 4 * 1024 * 1024
TENSORS_MAX = 1_000_000
REMEMBERED_BYTES_MAX = 16 * 1024
REQUEST = struct.Struct("<BQdI")  # what, ticket, timeout (seconds), length of the body
MESSAGE_BYTES_MAX = REQUEST.size + BODY_BYTES_MAX
RULING = struct.Struct("<QI")  # ticket, length of the body; none means that the call may run


@dataclass(frozen=True)
class Request:
    """From a rank: a call, or that it has waited long enough for one."""

    kind: int
    ticket: int
    timeout_s: float = 0.0
    body: bytes = b""

    def encode(self) -> bytes:
        """On the wire."""
        return REQUEST.pack(self.kind, self.ticket, self.timeout_s, len(self.body)) + self.body


def take_request(buffer: bytearray) -> Request | None:
    """Cut the first message off what has arrived; None while it is incomplete.

    Raises:
        ValueError: it is none.
    """
    if len(buffer) < REQUEST.size:
        return None
    kind, ticket, timeout_s, length = REQUEST.unpack_from(buffer)
    if kind not in (CALL, OVERDUE) or length > BODY_BYTES_MAX or not 0 <= timeout_s < math.inf:
        raise ValueError(f"no message of kind {kind}, {timeout_s} s and {length} bytes")
    if len(buffer) < REQUEST.size + length:
        return None
    body = bytes(buffer[REQUEST.size : REQUEST.size + length])
    del buffer[: REQUEST.size + length]
    return Request(kind, ticket, timeout_s, body)


def encode_ruling(ticket: int, body: bytes) -> bytes:
    """To a rank: what becomes of its call."""
    return RULING.pack(ticket, len(body)) + body


def encode_description(call: Description) -> bytes:
    """The body of a call."""
    tensors = _shortened(call.inputs), _shortened(call.outputs)
    fields = [call.operation, call.rule, *tensors, call.root, call.reduce_op, call.peer, call.tag]
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_description(body: bytes) -> Description:
    """Equal bodies of usual length give the same object: most calls are repeated, and by all ranks.

    Raises:
        ValueError: the body describes no call.
    """
    return _remembered(body) if len(body) <= REMEMBERED_BYTES_MAX else _decoded(body)


@functools.lru_cache(maxsize=256)
def _remembered(body: bytes) -> Description:
    return _decoded(body)


def _decoded(body: bytes) -> Description:
    fields = _from_json(body)
    if not isinstance(fields, list) or len(fields) != 8:
        raise ValueError("a call has eight fields")
    operation, rule, inputs, outputs, root, reduce_op, peer, tag = fields
    for text in (operation, rule, *([reduce_op] if reduce_op is not None else [])):
        _check(isinstance(text, str))
    for number in (root, peer, tag):
        _check(number is None or isinstance(number, int))
    return Description(operation, rule, _lengthened(inputs), _lengthened(outputs), root, reduce_op, peer, tag)


def encode_problem(problem: Problem | None) -> bytes:
    """The body of a ruling."""
    if problem is None:
        return b""
    if isinstance(problem, Disagreement):
        return json.dumps(["disagreement", problem.aspect, problem.calls]).encode()
    fields = [problem.ranks, problem.waiting, problem.lost, problem.seconds]
    return json.dumps(["missing", *fields]).encode()


def decode_problem(body: bytes) -> Problem | None:
    """What the referee found.

    Raises:
        ValueError: the body describes no problem.
    """
    if not body:
        return None
    try:
        match _from_json(body):
            case ["disagreement", str(aspect), dict(calls)]:
                return Disagreement(aspect, {int(rank): str(text) for rank, text in calls.items()})
            case ["missing", list(ranks), dict(waiting), bool(lost), float(seconds) | int(seconds)]:
                texts = {int(rank): tuple(map(str, of_rank)) for rank, of_rank in waiting.items()}
                return Missing(tuple(map(int, ranks)), texts, lost, seconds)
    except (TypeError, OverflowError) as error:
        raise ValueError("a field of a problem has another type") from error
    raise ValueError("this is no problem")


def _from_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _shortened(specs: Sequence[str]) -> list[Any]:
    """Runs of the same specification as [specification, count]: most lists are one run."""
    return [[spec, sum(1 for _ in run)] for spec, run in itertools.groupby(specs)]


def _lengthened(runs: Any) -> tuple[str, ...]:
    _check(isinstance(runs, list))
    specs: list[str] = []
    for run in runs:
        match run:
            case [str(spec), int(count)] if 0 < count <= TENSORS_MAX - len(specs):
                specs += [spec] * count
            case _:
                raise ValueError("this is no list of tensors")
    return tuple(specs)


def _check(is_so: bool) -> None:
    if not is_so:
        raise ValueError("a field of a call has another type")
