"""Values from one rank to another, or to all: a statement, a structure, and the tensors of the value.

Every message has this form, be it a tensor, an object or a dict of tensors. So a receiver always knows how
to take what comes, and one that expected something else can take it out of the way and say so. Objects are
plain data of a closed schema (see `torchft_like.plain_data`), never a pickle.

Large tensors are sent from, and received into, their own memory. Small ones are joined in buckets, which
costs a copy, and spares the latency of an operation each.

INVARIANT: a rank that has announced a message sends all of it, and a rank that has heard of one receives all
of it, or the groups are taken down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchft_like.agreement.statements import (
    PAYLOAD_BYTES_MAX,
    RECORD_BYTES,
    RecordError,
    Statement,
    Terms,
    decode,
    encode_briefly,
    pack,
    pack_statement,
    unpack,
)
from torchft_like.communicator.channel import Started
from torchft_like.communicator.communicator import Communicator, call, check
from torchft_like.communicator.handle import Handle
from torchft_like.communicator.sizes import buckets, checked_rank
from torchft_like.communicator.tensors import as_bytes
from torchft_like.errors import GroupCoordinatorError
from torchft_like.plain_data import Message, PlainDataError, TensorSpec, assemble, disassemble, tensor_specs
from torchft_like.plain_data.schema import STRUCTURE_BYTES_MAX

OBJECT = "object"
UNTIL_THE_GROUP_ENDS = timedelta(days=365)


class Begun(NamedTuple):
    """A message that is announced, and whose tensors are under way.

    Attributes:
        value: what `wait` gives, unless `finish` makes it.
    """

    started: Sequence[Started]
    finish: Callable[[], Any] | None = None
    value: Any = None

    def wait(self) -> Any:
        """Wait for it; its value, which is None for the sender of one."""
        for started in self.started:
            started.wait()
        return self.value if self.finish is None else self.finish()

    def is_over(self) -> bool:
        """Whether its tensors have come, or are gone, or never will be."""
        return all(started.work.is_completed() for started in self.started)


# ------------------------------------------------------------------------------ one to all


@call("broadcast_object")
def broadcast_object(communicator: Communicator, obj: object, src: int) -> Any:
    """The object of rank `src`, on every rank."""
    begun = start_broadcast(communicator, "broadcast_object", obj, src)
    return begun.wait() if begun.started or begun.finish is not None else begun.value


@call("broadcast_object_list")
def broadcast_object_list(communicator: Communicator, obj_list: list[Any], src: int) -> list[Any]:
    """Put the objects of rank `src` into the list of every rank; gives that list."""

    def length() -> Terms:
        if type(obj_list) is not list:
            raise TypeError(f"obj_list must be a list on every rank, not {type(obj_list).__name__}")
        return (("length", str(len(obj_list))),)

    arrived = start_broadcast(communicator, "broadcast_object_list", obj_list, src, length).wait()
    if arrived is not obj_list:
        obj_list[:] = arrived
    return obj_list


def start_broadcast(
    communicator: Communicator,
    operation: str,
    value: object,
    src: int,
    more: Callable[[], Terms] = tuple,
    *,
    make: Callable[[], object] | None = None,
) -> Begun:
    """Begin to bring the value of rank `src` to all; returns when every rank knows what will come.

    Args:
        value: looked at on `src` alone.
        more: gives what the ranks must agree on beside `src`; may refuse the caller's arguments.
        make: makes the value, on `src`; may refuse.

    Raises:
        CollectiveMismatchError, PlainDataError, ValueError: some rank's arguments are wrong.
    """
    message: Message | None = None
    try:
        if not (type(src) is int and 0 <= src < communicator.world_size):
            checked_rank(src, communicator.world_size, "src")  # which says what is wrong
        stated = _stated(operation, src, more())
        if communicator.rank == src:
            message = disassemble(value if make is None else make())
            if message.tensors:
                check_size(communicator, message)
            structure = message.structure
            payload = structure if len(structure) <= PAYLOAD_BYTES_MAX else b""
            record = pack(stated, len(structure), payload)
        else:
            record = pack(stated)
    except Exception as error:  # noqa: BLE001 - the others hear of it, whatever it is
        communicator.refuse(operation, error)
    said = communicator.exchange(record)[src]
    if message is None:
        return _start_taking(communicator, src, said.number, said.payload)
    if communicator.world_size == 1 or (said.payload and not message.tensors):
        return Begun((), None, value)
    if not said.payload:
        communicator.broadcast(communicator.control_bytes(message.structure), src).wait()
    flats = _Buckets.outgoing(communicator, message.tensors).flats if message.tensors else []
    return Begun([communicator.broadcast(flat, src) for flat in flats], None, value)


def _start_taking(communicator: Communicator, source: int, length: int, structure: bytes) -> Begun:
    """Begin to receive what `source` broadcasts: `length` bytes of structure, if it is not here yet."""
    if not structure:
        _check_length(length, source)
        data = torch.empty(length, dtype=torch.uint8, device=communicator.control_device)
        communicator.broadcast(data, source).wait()
        structure = data.cpu().numpy().tobytes()
    arriving = _memory_for(communicator, structure)
    started = [communicator.broadcast(flat, source) for flat in arriving.flats]
    return Begun(started, lambda: _assembled(structure, arriving))


@functools.lru_cache(maxsize=1024)
def _stated(operation: str, src: int, terms: Terms) -> bytes:
    return encode_briefly(Statement(operation, terms=(("src", str(src)), *terms)))


# ------------------------------------------------------------------------------ one to one


@call("send_object")
def send_object(communicator: Communicator, obj: object, dst: int) -> None:
    """To one rank; returns when the object may be changed."""
    start_sending(communicator, dst, OBJECT, lambda: (Statement(OBJECT), obj)).wait()


@call("recv_object")
def recv_object(communicator: Communicator, src: int) -> Any:
    """What `src` sent."""
    return start_receiving(communicator, src, communicator.tag("from", src), OBJECT).wait()


def start_sending(
    communicator: Communicator, dst: int, kind: str, prepare: Callable[[], tuple[Statement, object]]
) -> Begun:
    """Begin to send a value; its tensors must stay as they are until that is over.

    Args:
        kind: what the value is, the operation of its statement.
        prepare: gives the statement, and the value; may refuse the caller's arguments.

    Raises:
        PlainDataError, ValueError, TypeError: it cannot be sent. The receiver is told, once it comes.
    """
    tag = communicator.tag("to", dst)
    try:
        statement, value = prepare()
        message = disassembled(communicator, value)
    except (ValueError, TypeError) as error:
        record = communicator.control_bytes(pack_statement(Statement(kind).refused(error)))
        refusal = communicator.send(record, dst, tag)
        # Aside: the receiver may be about to send, too. And without a limit: if it never comes, a timeout
        # would end the group, which the caller, who has an error of his own, goes on to use.
        Handle("a refusal", lambda: refusal.wait(UNTIL_THE_GROUP_ENDS), lambda _: None)
        raise
    small = message.structure if len(message.structure) <= PAYLOAD_BYTES_MAX else b""
    head = [pack_statement(statement, len(message.structure), small), *([] if small else [message.structure])]
    flats = [
        *map(communicator.control_bytes, head),
        *_Buckets.outgoing(communicator, message.tensors).flats,
    ]
    return Begun([communicator.send(flat, dst, tag) for flat in flats])


def start_receiving(
    communicator: Communicator, src: int, tag: int, kind: str, expected: Statement | None = None
) -> Begun:
    """Wait until `src` begins to send under `tag`, and begin to receive.

    Args:
        expected: what the sender must have stated; None takes any value of that kind.

    Raises:
        CollectiveMismatchError: from `wait`; the sender refuses to send, or sent something else, which was
            taken out of the way.
    """
    head = torch.empty(RECORD_BYTES, dtype=torch.uint8, device=communicator.control_device)
    communicator.recv(head, src, tag).wait()
    try:
        record = unpack(head.cpu().numpy().tobytes())
        sent = decode(record.call)
    except RecordError as error:
        raise GroupCoordinatorError(f"rank {src} sent something that is no message: {error}") from error
    if expected is None:
        own = replace(sent, operation=kind, refusal=None)
    else:
        own = decode(encode_briefly(expected))
    calls = {src: sent, communicator.rank: own}
    if sent.refusal is not None:
        return Begun((), lambda: check(calls))
    structure = record.payload
    if not structure:
        _check_length(record.number, src)
        data = torch.empty(record.number, dtype=torch.uint8, device=communicator.control_device)
        communicator.recv(data, src, tag).wait()
        structure = data.cpu().numpy().tobytes()
    arriving = _memory_for(communicator, structure)

    def finish() -> object:
        check(calls)
        return _assembled(structure, arriving)

    return Begun([communicator.recv(flat, src, tag) for flat in arriving.flats], finish)


# ------------------------------------------------------------------------------ what both need


def disassembled(communicator: Communicator, value: object) -> Message:
    """A value as what travels.

    Raises:
        PlainDataError: it holds something that does not travel, or too much.
    """
    message = disassemble(value)
    check_size(communicator, message)
    return message


def check_size(communicator: Communicator, message: Message) -> None:
    """Whether a message is small enough.

    Raises:
        PlainDataError: it is not.
    """
    nbytes = sum(tensor.nbytes for tensor in message.tensors)
    if nbytes > communicator.options.message_bytes_max:
        raise PlainDataError(
            f"its tensors have {nbytes} bytes, and message_bytes_max of the CoordinatorOptions is "
            f"{communicator.options.message_bytes_max}: send it in parts, or raise that on every rank"
        )


class _Buckets:
    """The tensors of one message that leave, or the memory for those that come.

    Attributes:
        flats: what moves, contiguous uint8 tensors of one dimension, on each rank in the same order.
    """

    def __init__(
        self,
        communicator: Communicator,
        tensors: Sequence[Tensor],
        device_types: Sequence[str],
        *,
        is_incoming: bool,
    ) -> None:
        self._communicator, self._device_types = communicator, device_types
        self._tensors = list(tensors)
        self._buckets = buckets([tensor.nbytes for tensor in tensors], device_types)
        join = _joined_memory if is_incoming else _joined
        self.flats = [join([as_bytes(tensors[index]) for index in bucket]) for bucket in self._buckets]

    @classmethod
    def outgoing(cls, communicator: Communicator, tensors: Sequence[Tensor]) -> _Buckets:
        """Of a message's tensors, as the sender holds them."""
        movable = [communicator.movable(tensor) for tensor in tensors]
        return cls(communicator, movable, [tensor.device.type for tensor in tensors], is_incoming=False)

    @classmethod
    def incoming(cls, communicator: Communicator, specs: Sequence[TensorSpec]) -> _Buckets:
        """Memory for what `specs` describe."""
        tensors = [communicator.empty(spec.shape, spec.dtype, spec.device_type) for spec in specs]
        return cls(communicator, tensors, [spec.device_type for spec in specs], is_incoming=True)

    def unload(self) -> list[Tensor]:
        """The tensors of an incoming message, once all of `flats` have arrived."""
        for flat, bucket in zip(self.flats, self._buckets, strict=True):
            if len(bucket) > 1:
                parts = [as_bytes(self._tensors[index]) for index in bucket]
                torch._foreach_copy_(parts, list(torch.split(flat, [len(part) for part in parts])))
        return list(map(self._communicator.delivered, self._tensors, self._device_types))


def _joined(flats: list[Tensor]) -> Tensor:
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def _joined_memory(flats: list[Tensor]) -> Tensor:
    if len(flats) == 1:
        return flats[0]
    return torch.empty(sum(map(len, flats)), dtype=torch.uint8, device=flats[0].device)


def _check_length(length: int, src: int) -> None:
    if not 0 < length <= STRUCTURE_BYTES_MAX:
        raise GroupCoordinatorError(f"rank {src} announces a structure of {length} bytes")


def _memory_for(communicator: Communicator, structure: bytes) -> _Buckets:
    try:
        specs = tensor_specs(structure)
    except PlainDataError as error:
        raise GroupCoordinatorError(str(error)) from error
    nbytes = sum(spec.nbytes for spec in specs)
    if nbytes > communicator.options.message_bytes_max:
        raise GroupCoordinatorError(
            f"a rank sends tensors of {nbytes} bytes, and message_bytes_max is "
            f"{communicator.options.message_bytes_max} here: it must be the same on every rank"
        )
    return _Buckets.incoming(communicator, specs)


def _assembled(structure: bytes, arriving: _Buckets) -> object:
    try:
        return assemble(structure, arriving.unload())
    except PlainDataError as error:
        raise GroupCoordinatorError(str(error)) from error
