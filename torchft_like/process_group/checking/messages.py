"""The messages between the ranks and the referee, as bytes.

A message is a header of fixed size and JSON of bounded length: a statement, or what is wrong with a call. No
message is trusted: bytes that are none of these messages raise ValueError, and the rank that sent it is
treated as lost.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass

from torchft_like.core.agreement.referee import Missing, Problem
from torchft_like.core.agreement.rules import Disagreement

CALL, OVERDUE = 1, 2
BODY_BYTES_MAX = 4 * 1024 * 1024
REQUEST = struct.Struct("<BQdI")  # kind, ticket, timeout (seconds), length of the body
MESSAGE_BYTES_MAX = REQUEST.size + BODY_BYTES_MAX
RULING = struct.Struct("<QI")  # ticket, length of the body; an empty body means that the call may run


@dataclass(frozen=True)
class Request:
    """A rank's message: a call, or that it has waited for one longer than its timeout."""

    kind: int
    ticket: int
    timeout_s: float = 0.0
    body: bytes = b""

    def encode(self) -> bytes:
        """Encode the message."""
        return REQUEST.pack(self.kind, self.ticket, self.timeout_s, len(self.body)) + self.body


def take_request(buffer: bytearray) -> Request | None:
    """Cut the first message off what has arrived; None while it is incomplete.

    Raises:
        ValueError: the bytes are no message.
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
    """Encode a ruling about the call with this ticket, for its rank."""
    return RULING.pack(ticket, len(body)) + body


def encode_problem(problem: Problem | None) -> bytes:
    """Encode the body of a ruling."""
    if problem is None:
        return b""
    if isinstance(problem, Disagreement):
        return json.dumps(["disagreement", problem.aspect, problem.calls]).encode()
    fields = [problem.ranks, problem.waiting, problem.lost, problem.seconds]
    return json.dumps(["missing", *fields]).encode()


def decode_problem(body: bytes) -> Problem | None:
    """Decode the body of a ruling; None means that the call may run.

    Raises:
        ValueError: the body describes no problem.
    """
    if not body:
        return None
    try:
        match json.loads(body):
            case ["disagreement", str(aspect), dict(calls)]:
                return Disagreement(aspect, {int(rank): str(text) for rank, text in calls.items()})
            case ["missing", list(ranks), dict(waiting), bool(lost), float(seconds) | int(seconds)]:
                texts = {int(rank): tuple(map(str, of_rank)) for rank, of_rank in waiting.items()}
                return Missing(tuple(map(int, ranks)), texts, lost, seconds)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError("a field of a problem has another type, or it is nested too deeply") from error
    raise ValueError("this is no problem")
