"""Values from one rank to another, or to all: a statement, a structure, and the tensors of the value.

Every message has this form, be it a tensor, an object or a dict of tensors. So a receiver always knows how
to take what comes, and one that expected something else can take it out of the way and say so.

INVARIANT: whoever has announced a message sends all of it, and whoever has heard of one receives all of
it, or the groups are taken down.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from torchft_like.errors import GroupCoordinatorError
from torchft_like.group_coordinator.arguments import Terms
from torchft_like.group_coordinator.cargo import Cargo
from torchft_like.group_coordinator.handle import Handle
from torchft_like.group_coordinator.statements import STATEMENT_BYTES, Statement, check, decode, encode
from torchft_like.group_coordinator.transport import Flight, Transport, from_bytes
from torchft_like.plain_data import Message, PlainDataError, assemble, disassemble, tensor_specs
from torchft_like.plain_data.schema import STRUCTURE_BYTES_MAX

FOR_EVER = timedelta(days=365)  # until the group ends


class Begun(NamedTuple):
    """A message that is announced, and whose tensors are under way."""

    flights: list[Flight]
    finish: Callable[[], Any]

    def land(self) -> Any:
        """Wait for it; its value, which is None for the sender of one."""
        for flight in self.flights:
            flight.land()
        return self.finish()

    def is_over(self) -> bool:
        """Whether its tensors have come, or are gone, or never will be."""
        return all(flight.work.is_completed() for flight in self.flights)


# ------------------------------------------------------------------------------ one to all


def start_broadcast(
    transport: Transport, operation: str, give: Callable[[], object], src: int, prepare: Callable[[], Terms]
) -> Begun:
    """Begin to bring the value of rank `src` to all; returns when every rank knows what will come.

    Args:
        give: gives the value; called on `src` alone.
        prepare: gives what the ranks must agree on; may refuse the caller's arguments.

    Raises:
        CollectiveMismatchError, PlainDataError, ValueError: some rank's arguments are wrong.
    """

    def state() -> tuple[Statement, tuple[object, Message] | None]:
        statement = Statement(operation, prepare())
        if transport.rank != src:
            return statement, None
        value = give()
        message = taken_apart(transport, value)
        return statement.announcing(message.structure), (value, message)

    said, given = transport.agree(state, operation)
    if given is not None:
        value, message = given
        if transport.world_size == 1:
            return Begun([], lambda: value)
        flats = Cargo.outgoing(transport, message.tensors).flats
        if not said[src].payload:
            transport.broadcast(from_bytes(message.structure), src).land()
        return Begun([transport.broadcast(flat, src) for flat in flats], lambda: value)
    structure = said[src].payload
    if not structure:
        data = torch.empty(_structure_length(said[src]), dtype=torch.uint8, device="cpu")
        transport.broadcast(data, src).land()
        structure = data.numpy().tobytes()
    cargo = _memory_for(transport, structure)
    flights = [transport.broadcast(flat, src) for flat in cargo.flats]
    return Begun(flights, lambda: _assembled(structure, cargo))


# ------------------------------------------------------------------------------ one to one


def start_sending(
    transport: Transport, dst: int, kind: str, prepare: Callable[[], tuple[Terms, object]]
) -> Begun:
    """Begin to send a value; its tensors must stay as they are until that has landed.

    Args:
        prepare: gives what is said of the value, and the value; may refuse the caller's arguments.

    Raises:
        PlainDataError, ValueError, TypeError: it cannot be sent. The receiver is told, once it comes.
    """
    tag = transport.tag("to", dst)
    try:
        terms, value = prepare()
        message = taken_apart(transport, value)
    except (ValueError, TypeError) as error:
        refusal = transport.send(from_bytes(encode(Statement(kind).refused(error))), dst, tag)
        # Aside: the receiver may be about to send, too. And for ever: if it never comes, a timeout would end
        # the group, which the caller, who has an error of his own, goes on to use.
        Handle("a refusal", lambda: refusal.land(FOR_EVER), lambda _: None)
        raise
    statement = Statement(kind, terms).announcing(message.structure)
    head = [encode(statement), *([] if statement.payload else [message.structure])]
    flats = [*map(from_bytes, head), *Cargo.outgoing(transport, message.tensors).flats]
    return Begun([transport.send(flat, dst, tag) for flat in flats], lambda: None)


def start_receiving(transport: Transport, src: int, tag: int, kind: str, terms: Terms | None = None) -> Begun:
    """Wait until `src` begins to send under `tag`, and begin to receive.

    Args:
        terms: what the sender must have said; None takes any.

    Raises:
        CollectiveMismatchError: from `land`; it refuses to send, or sent something else, which was taken out
            of the way.
    """
    head = torch.empty(STATEMENT_BYTES, dtype=torch.uint8, device="cpu")
    transport.recv(head, src, tag).land()
    statement = decode(head.numpy().tobytes())
    calls = {src: statement, transport.rank: Statement(kind, statement.terms if terms is None else terms)}
    if statement.refusal is not None:
        return Begun([], lambda: check(calls))
    structure = statement.payload
    if not structure:
        data = torch.empty(_structure_length(statement), dtype=torch.uint8, device="cpu")
        transport.recv(data, src, tag).land()
        structure = data.numpy().tobytes()
    cargo = _memory_for(transport, structure)

    def finish() -> object:
        check(calls)
        return _assembled(structure, cargo)

    return Begun([transport.recv(flat, src, tag) for flat in cargo.flats], finish)


# ------------------------------------------------------------------------------ what both need


def taken_apart(transport: Transport, value: object) -> Message:
    """A value as what travels.

    Raises:
        PlainDataError: it holds something that does not travel, or too much.
    """
    message = disassemble(value)
    nbytes = sum(tensor.nbytes for tensor in message.tensors)
    if nbytes > transport.options.message_bytes_max:
        raise PlainDataError(
            f"its tensors have {nbytes} bytes, and message_bytes_max of the CoordinatorOptions is "
            f"{transport.options.message_bytes_max}: send it in parts, or raise that on every rank"
        )
    return message


def _structure_length(statement: Statement) -> int:
    length = statement.counts[0] if statement.counts else 0
    if not 0 < length <= STRUCTURE_BYTES_MAX:
        raise GroupCoordinatorError(f"a rank announces a structure of {length} bytes: {statement}")
    return length


def _memory_for(transport: Transport, structure: bytes) -> Cargo:
    try:
        specs = tensor_specs(structure)
    except PlainDataError as error:
        raise GroupCoordinatorError(str(error)) from error
    nbytes = sum(spec.nbytes for spec in specs)
    if nbytes > transport.options.message_bytes_max:
        raise GroupCoordinatorError(
            f"a rank sends tensors of {nbytes} bytes, and message_bytes_max is "
            f"{transport.options.message_bytes_max} here: it must be the same on every rank"
        )
    return Cargo.incoming(transport, specs)


def _assembled(structure: bytes, cargo: Cargo) -> object:
    try:
        return assemble(structure, cargo.unload())
    except PlainDataError as error:
        raise GroupCoordinatorError(str(error)) from error
