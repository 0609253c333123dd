"""Values from one rank to another, or to all: a statement, a structure, and the tensors of the value.

Every message has this form: a tensor, an object or a dict of tensors. So a receiver can always take what
comes, and one that expected another kind can remove it and report that. Objects are plain data of a closed
schema (`torchft_like.plain_data`), never a pickle.

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

from torchft_like.communicator.channel import Started
from torchft_like.communicator.communicator import Communicator, call, check
from torchft_like.communicator.handle import Handle
from torchft_like.communicator.sizes import buckets, checked_rank
from torchft_like.communicator.tensors import as_bytes
from torchft_like.core.agreement.statements import (
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
from torchft_like.errors import GroupCoordinatorError, PlainDataError
from torchft_like.plain_data import (
    STRUCTURE_BYTES_MAX,
    Message,
    TensorSpec,
    as_tensors,
    assemble,
    disassemble,
    dissect,
    tensor_specs,
)

OBJECT = "object"
UNTIL_THE_GROUP_ENDS = timedelta(days=365)


class Begun(NamedTuple):
    """A message that was announced, and whose tensors are under way.

    Attributes:
        value: the value that `wait` returns, unless `finish` makes it.
    """

    started: Sequence[Started]
    finish: Callable[[], Any] | None = None
    value: Any = None

    def wait(self) -> Any:
        """Wait for the message, and return its value, which is None for its sender."""
        for started in self.started:
            started.wait()
        return self.value if self.finish is None else self.finish()

    def is_over(self) -> bool:
        """Return whether its tensors have come, or were sent, or never will be."""
        return all(started.work.is_completed() for started in self.started)


# ------------------------------------------------------------------------------ one to all


@call("broadcast_object")
def broadcast_object(communicator: Communicator, obj: object, src: int) -> Any:
    """Return the object of rank `src`, on every rank."""
    begun = start_broadcast(communicator, "broadcast_object", obj, src)
    return begun.wait() if begun.started or begun.finish is not None else begun.value


@call("broadcast_object_list")
def broadcast_object_list(communicator: Communicator, obj_list: list[Any], src: int) -> list[Any]:
    """Put the objects of rank `src` into the list of every rank; return that list."""

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
    """Begin to bring the value of rank `src` to all ranks; return when every rank knows what will come.

    Args:
        value: the value; only that of `src` is used.
        more: returns what the ranks must agree on beside `src`, or raises an error that refuses the call.
        make: makes the value, on `src`, or raises an error that refuses the call.

    Raises:
        CollectiveMismatchError, PlainDataError, ValueError: the arguments of a rank are wrong.
    """
    structure: bytes | None = None
    tensors: tuple[Tensor, ...] = ()
    try:
        if not (type(src) is int and 0 <= src < communicator.world_size):
            checked_rank(src, communicator.world_size, "src")  # raises an error that says what is wrong
        stated = _stated(operation, src, more())
        if communicator.rank == src:
            structure, leaves = dissect(value if make is None else make())
            if leaves:
                tensors = as_tensors(leaves)
                check_size(communicator, tensors)
            payload = structure if len(structure) <= PAYLOAD_BYTES_MAX else b""
            record = pack(stated, len(structure), payload)
        else:
            record = pack(stated)
    except Exception as error:  # noqa: BLE001 - any error is told to the other ranks
        communicator.refuse(operation, error)
    said = communicator.exchange(record)[src]
    if structure is None:
        return _start_taking(communicator, src, said.number, said.payload)
    if communicator.world_size == 1 or (said.payload and not tensors):
        return Begun((), None, value)
    if not said.payload:
        communicator.broadcast(communicator.control_bytes(structure), src).wait()
    flats = _Buckets.outgoing(communicator, tensors).flats if tensors else []
    return Begun([communicator.broadcast(flat, src) for flat in flats], None, value)


def _start_taking(communicator: Communicator, source: int, length: int, structure: bytes) -> Begun:
    """Begin to receive what `source` broadcasts: `length` bytes of structure, if it has not come yet."""
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
    """Send an object to one rank; return when the object may be changed."""
    start_sending(communicator, dst, OBJECT, lambda: (Statement(OBJECT), obj)).wait()


@call("recv_object")
def recv_object(communicator: Communicator, src: int) -> Any:
    """Return the object that `src` sent."""
    return start_receiving(communicator, src, communicator.tag("from", src), OBJECT).wait()


def start_sending(
    communicator: Communicator, dst: int, kind: str, prepare: Callable[[], tuple[Statement, object]]
) -> Begun:
    """Begin to send a value, whose tensors must not change until that is over.

    Args:
        kind: the kind of value, which is the operation of its statement.
        prepare: returns the statement, and the value, or raises an error that refuses the call.

    Raises:
        PlainDataError, ValueError, TypeError: the value cannot be sent. The receiver is told, once it comes.
    """
    tag = communicator.tag("to", dst)
    try:
        statement, value = prepare()
        message = disassembled(communicator, value)
    except (ValueError, TypeError) as error:
        record = communicator.control_bytes(pack_statement(Statement(kind).refused(error)))
        refusal = communicator.send(record, dst, tag)
        # The refusal is sent on another thread, as the receiver may be about to send, too. It has no limit:
        # if the receiver never comes, a timeout would end the group, which the caller goes on to use.
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
        expected: the statement that the sender must have made; None takes any value of that kind.

    Raises:
        CollectiveMismatchError: `wait` raises it: the sender refuses to send, or sent another value, which
          was received and dropped.
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
    """Take a value apart into a message.

    Raises:
        PlainDataError: a part of the value is of a type that cannot be sent, or it is too large.
    """
    message = disassemble(value)
    check_size(communicator, message.tensors)
    return message


def check_size(communicator: Communicator, tensors: Sequence[Tensor]) -> None:
    """Check that a message is small enough."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if nbytes > communicator.options.message_bytes_max:
        raise PlainDataError(
            f"its tensors have {nbytes} bytes, and message_bytes_max of the CoordinatorOptions is "
            f"{communicator.options.message_bytes_max}: send it in parts, or raise that on every rank"
        )


class _Buckets:
    """The tensors of one outgoing message, or the memory for those of an incoming one.

    Attributes:
        flats: the tensors that move: contiguous uint8 tensors of one dimension, in the same order on each
          rank.
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
        """Join the tensors of a message that the sender has."""
        movable = [communicator.movable(tensor) for tensor in tensors]
        return cls(communicator, movable, [tensor.device.type for tensor in tensors], is_incoming=False)

    @classmethod
    def incoming(cls, communicator: Communicator, specs: Sequence[TensorSpec]) -> _Buckets:
        """Make memory for the tensors that `specs` describe."""
        tensors = [communicator.empty(spec.shape, spec.dtype, spec.device_type) for spec in specs]
        return cls(communicator, tensors, [spec.device_type for spec in specs], is_incoming=True)

    def unload(self) -> list[Tensor]:
        """Return the tensors of an incoming message, once all of `flats` have arrived."""
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
