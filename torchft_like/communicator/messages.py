"""Values from one rank to another, or to all: a statement, a structure, and the tensors of the value.

Every message has this form: a tensor, an object or a dict of tensors. So a receiver can always take what
comes, and one that expected another kind can remove it and report that. Objects are plain data of a closed
schema (`torchft_like.plain_data`), never a pickle.

Large tensors are sent from, and received into, their own memory. Small ones are joined in buckets, which
costs a copy, and spares the latency of an operation each.

An all-gather group saves bytes if each of its ranks sends the same tensor of a dict to a counterpart: each
sends a slice, and the receivers gather the slices among themselves. That is right only if the tensors are
replicated. So it is done for those that the sender declares to be replicated, and a slice carries a digest of
the whole tensor that it was cut from: the receivers compare the digests before they gather.

INVARIANT: a rank that has announced a message sends all of it, and a rank that has heard of one receives all
of it, or the groups are taken down.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchft_like.communicator.collectives import start_joining
from torchft_like.communicator.communicator import HARMLESS, Communicator, Started, call, check
from torchft_like.communicator.handle import Handle
from torchft_like.communicator.tensors import buckets, checked_rank, checked_tensor, even_sizes
from torchft_like.core.agreement.statements import (
    PAYLOAD_BYTES_MAX,
    RECORD_BYTES,
    Record,
    RecordError,
    Statement,
    Terms,
    decode,
    encode_briefly,
    pack,
    pack_statement,
    unpack,
)
from torchft_like.divergence.words import word_sum
from torchft_like.dtypes import as_bytes
from torchft_like.errors import GroupCoordinatorError, PlainDataError
from torchft_like.futures import complete
from torchft_like.plain_data import (
    MESSAGES,
    STRUCTURE_BYTES_MAX,
    Structure,
    TensorLeaves,
    TensorSpec,
    as_tensor,
    dissect,
)

OBJECT = "object"
UNTIL_THE_GROUP_ENDS = timedelta(days=365)


class Begun(NamedTuple):
    """An announced message whose tensors are under way; `wait` returns `value` unless `finish` makes it."""

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
            structure, tensors = disassembled(communicator, value if make is None else make())
            payload = structure if len(structure) <= PAYLOAD_BYTES_MAX else b""
            record = pack(stated, len(structure), payload)
        else:
            record = pack(stated)
    except Exception as error:  # noqa: BLE001 - any error is told to the other ranks
        communicator.refuse(operation, error)
    said = communicator.exchange(record)[src]
    if structure is None:
        return _start_taking(communicator, said, src, lambda flat: communicator.broadcast(flat, src))
    if communicator.world_size == 1 or (said.payload and not tensors):
        return Begun((), None, value)
    if not said.payload:
        communicator.broadcast(communicator.control_bytes(structure), src).wait()
    flats = _leaving(communicator, tensors)
    return Begun([communicator.broadcast(flat, src) for flat in flats], None, value)


def _start_taking(
    communicator: Communicator,
    announced: Record,
    source: int,
    receive: Callable[[Tensor], Started],
    check_value: Callable[[], object] | None = None,
) -> Begun:
    """Begin to receive what a record announces: its structure, if it has not come yet, and the tensors."""
    structure = announced.payload
    if not structure:
        if not 0 < announced.number <= STRUCTURE_BYTES_MAX:
            raise GroupCoordinatorError(f"rank {source} announces a structure of {announced.number} bytes")
        data = torch.empty(announced.number, dtype=torch.uint8, device=communicator.control_device)
        receive(data).wait()
        structure = data.cpu().numpy().tobytes()
    try:
        known = Structure(structure, MESSAGES)
    except PlainDataError as error:
        raise GroupCoordinatorError(str(error)) from error
    nbytes = sum(spec.nbytes for spec in known.specs)
    if nbytes > communicator.options.message_bytes_max:
        raise GroupCoordinatorError(
            f"a rank sends tensors of {nbytes} bytes, and message_bytes_max is "
            f"{communicator.options.message_bytes_max} here: it must be the same on every rank"
        )
    arriving = _Arriving(communicator, known.specs)

    def finish() -> object:
        if check_value is not None:
            check_value()
        try:
            return known.value(TensorLeaves(arriving.unload()))
        except PlainDataError as error:
            raise GroupCoordinatorError(str(error)) from error

    return Begun([receive(flat) for flat in arriving.flats], finish)


@functools.lru_cache(maxsize=1024)
def _stated(operation: str, src: int, terms: Terms) -> bytes:
    return encode_briefly(Statement(operation, terms=(("src", str(src)), *terms)))


# ------------------------------------------------------------------------------ one to one


@call("send_object")
def send_object(communicator: Communicator, obj: object, dst: int | None) -> None:
    """Send an object to one rank; return when the object may be changed."""
    start_sending(communicator, dst, OBJECT, lambda: (Statement(OBJECT), obj)).wait()


@call("recv_object")
def recv_object(communicator: Communicator, src: int) -> Any:
    return start_receiving(communicator, src, communicator.tag("from", src), OBJECT).wait()


def start_sending(
    communicator: Communicator, dst: int | None, kind: str, prepare: Callable[[], tuple[Statement, object]]
) -> Begun:
    """Begin to send a value, whose tensors must not change until that is over.

    Args:
        dst: None in a group of one, in which the value is checked and goes nowhere.
        kind: the kind of value, which is the operation of its statement.
        prepare: returns the statement, and the value, or raises an error that refuses the call.

    Raises:
        PlainDataError, ValueError, TypeError: the value cannot be sent. The receiver is told, once it comes.
    """
    tag = 0 if dst is None else communicator.tag("to", dst)
    try:
        statement, value = prepare()
        structure, tensors = disassembled(communicator, value)
    except (ValueError, TypeError) as error:
        if dst is None:
            raise
        record = communicator.control_bytes(pack_statement(Statement(kind).refused(error)))
        refusal = communicator.send(record, dst, tag)
        # The refusal is sent on another thread, as the receiver may be about to send, too. It has no limit:
        # if the receiver never comes, a timeout would end the group, which the caller goes on to use.
        Handle("a refusal", lambda: refusal.wait(UNTIL_THE_GROUP_ENDS))
        raise
    if dst is None:
        return Begun(())
    small = structure if len(structure) <= PAYLOAD_BYTES_MAX else b""
    head = [pack_statement(statement, len(structure), small), *([] if small else [structure])]
    flats = [*map(communicator.control_bytes, head), *_leaving(communicator, tensors)]
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
    receive = functools.partial(communicator.recv, src=src, tag=tag)
    return _start_taking(communicator, record, src, receive, lambda: check(calls))


# ------------------------------------------------------------------------------ what both need


def disassembled(communicator: Communicator, value: object) -> tuple[bytes, tuple[Tensor, ...]]:
    """Return the structure of a value, and its tensors.

    Raises:
        PlainDataError: a part of it cannot be sent, or it is too large.
    """
    structure, leaves = dissect(value)
    tensors = tuple(map(as_tensor, leaves))
    nbytes = sum(map(attrgetter("nbytes"), tensors))
    if nbytes > communicator.options.message_bytes_max:
        raise PlainDataError(
            f"its tensors have {nbytes} bytes, and message_bytes_max of the CoordinatorOptions is "
            f"{communicator.options.message_bytes_max}: send it in parts, or raise that on every rank"
        )
    return structure, tensors


# What moves are `flats`: contiguous uint8 tensors of one dimension, in the same order on each rank.


def _leaving(communicator: Communicator, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the flats of an outgoing message."""
    parts = [as_bytes(communicator.movable(tensor)) for tensor in tensors]
    chosen = buckets(list(map(len, parts)), [tensor.device.type for tensor in tensors])
    joined = ([parts[index] for index in bucket] for bucket in chosen)
    return [each[0] if len(each) == 1 else torch.cat(each) for each in joined]


class _Arriving:
    """The memory for the tensors of an incoming message, and its `flats`."""

    def __init__(self, communicator: Communicator, specs: Sequence[TensorSpec]) -> None:
        self._device, self._specs = communicator.device, specs
        self._tensors = [communicator.empty(spec.shape, spec.dtype, spec.device_type) for spec in specs]
        chosen = buckets([spec.nbytes for spec in specs], [spec.device_type for spec in specs])
        self._parts = [[as_bytes(self._tensors[index]) for index in bucket] for bucket in chosen]
        self.flats = [
            parts[0] if len(parts) == 1 else parts[0].new_empty(sum(map(len, parts))) for parts in self._parts
        ]

    def unload(self) -> list[Tensor]:
        """Return the tensors, once all of `flats` have arrived, each on the device where it belongs."""
        for flat, parts in zip(self.flats, self._parts, strict=True):
            if len(parts) > 1:
                torch._foreach_copy_(parts, list(torch.split(flat, [len(part) for part in parts])))
        own = {self._device.type: self._device}  # tensors of a type that this rank lacks stay where they came
        places = [own.get(spec.device_type, spec.device_type) for spec in self._specs]
        return [
            tensor.to(place) if place in ("cpu", self._device) else tensor
            for tensor, place in zip(self._tensors, places, strict=True)
        ]


# ------------------------------------------------------------------------------ dicts of tensors

TENSOR_DICT = "tensor dict"
TensorDict = dict[str, Any]


# The slices in a dict, by name: part, parts, the whole's shape and digest.
Slices = dict[str, tuple[int, int, list[int], int]]
# A function that returns the message, or raises the error for which there is none: the counterparts must hear
# of it, and not wait.
Received = Callable[[], tuple[TensorDict, Slices]]


def checked_dict(value: object) -> TensorDict:
    if type(value) is not dict:
        raise TypeError(f"a dict of tensors and plain data was expected, not a {type(value).__name__}")
    return value


def start_broadcasting_dict(group: Communicator, tensor_dict: TensorDict | None, src: int) -> Begun:
    """Begin to send the dict of rank `src` to all; return when all ranks know what will come."""

    def terms() -> Terms:
        if group.rank == src:
            checked_dict(tensor_dict)
        return ()

    return start_broadcast(group, "broadcast_tensor_dict", tensor_dict, src, terms)


def start_sending_dict(
    group: Communicator,
    tensor_dict: TensorDict,
    dst: int | None,
    find_group: Callable[[], Communicator | None],
    all_gather_tensors: Mapping[str, bool] | None,
) -> Begun:
    """Begin to send a dict; the tensors must stay as they are until it is sent.

    Args:
        find_group: returns the ranks each of which sends a slice of the tensors that are declared to be
          replicated, or None, or raises an error that refuses the call.
        all_gather_tensors: True under the names of these tensors.
    """

    def prepare() -> tuple[Statement, object]:
        checked_dict(tensor_dict)
        slicers, declared = find_group(), all_gather_tensors
        if not isinstance(declared, Mapping | None):
            raise TypeError(f"all_gather_tensors is a dict of bools, not a {type(declared).__name__}")
        names = [name for name, is_replicated in (declared or {}).items() if is_replicated]
        if slicers is None or slicers.world_size == 1:
            return Statement(TENSOR_DICT), (tensor_dict, {})
        return Statement(TENSOR_DICT), _cut(tensor_dict, slicers, names)

    return start_sending(group, dst, TENSOR_DICT, prepare)


def start_receiving_dict(
    group: Communicator, src: int, gathered_by: Communicator | None, arriving: TensorDict
) -> Handle[TensorDict]:
    """Begin to receive into a dict. On a CPU this waits for nothing: the sender may begin at any time."""
    tag = group.tag("from", src)

    def settle(received: Received) -> TensorDict:
        arriving.update(_whole_dict(received, gathered_by))
        return arriving

    text = f"recv_tensor_dict over {group}"
    if not group.waits_on_streams:
        return Handle(text, _receiving(group, src, tag), settle, None, group.epoch)
    with _missed_by(gathered_by), group.guard("recv_tensor_dict"):
        begun = start_receiving(group, src, tag, TENSOR_DICT)
    finish = group.guard("recv_tensor_dict")(begun.wait)
    return Handle(text, finish, settle, begun.is_over, group.epoch)


def receive_dict(group: Communicator, src: int, gathered_by: Communicator | None) -> TensorDict:
    receive = _receiving(group, src, group.tag("from", src))
    return _whole_dict(complete(Future(), receive).result, gathered_by)


def handle_of(group: Communicator, operation: str, begun: Begun) -> Handle[Any]:
    """Return a handle of a message that is under way to all, or from here to one."""
    watched = begun.is_over if group.waits_on_streams else None
    finish = group.guard(operation)(begun.wait)
    return Handle(f"{operation} over {group}", finish, is_over=watched, epoch=group.epoch)


def _receiving(group: Communicator, src: int, tag: int) -> Received:
    return group.guard("recv_tensor_dict")(lambda: start_receiving(group, src, tag, TENSOR_DICT).wait())


@contextlib.contextmanager
def _missed_by(gathered_by: Communicator | None) -> Iterator[None]:
    """Tell the counterparts if the block, which receives a dict, fails: they wait for its slices."""
    try:
        yield
    except HARMLESS:  # the counterparts hear of it where slices are joined
        raise
    except BaseException as error:
        if gathered_by is not None:
            gathered_by.break_off(f"a dict with slices to gather here did not come: {error!r}")
        raise


def _whole_dict(received: Received, group: Communicator | None) -> TensorDict:
    """Return a received dict, with whole tensors for the slices that the ranks of an all-gather group hold.

    Raises:
        ValueError: there are slices, and the group is not the one they were made for.
        CollectiveMismatchError: the slices are not of the same tensors: they were not replicated. Or a
            sender has refused to send, on all ranks of the group.
    """
    if group is None:
        whole, cut = received()
        if cut:
            raise ValueError(f"slices of {sorted(cut)} came: pass the all_gather_group to the receiver, too")
        return whole
    with _missed_by(group), contextlib.suppress(*HARMLESS):
        received()

    def prepare() -> tuple[Statement, int, bytes, tuple[TensorDict, Slices]]:
        tensor_dict, slices = received()
        for name, (part, parts, _, _) in slices.items():
            if (part, parts) != (group.rank, group.world_size):
                raise ValueError(
                    f"slice {part} of {parts} of {name!r} came to rank {group.rank} of "
                    f"{group.world_size} of the all_gather_group"
                )
        wholes = []
        for name in _ordered(slices):
            _, _, shape, digest = slices[name]
            text = f"{tensor_dict[name].dtype} {shape} with digest {digest & 0xFFFFFFFFFFFFFFFF:016x}"
            wholes.append((str(name), text))
        return Statement("recv_tensor_dict", terms=tuple(wholes)), 0, b"", (tensor_dict, slices)

    with group.guard("recv_tensor_dict"):
        _, (tensor_dict, slices) = group.agree("recv_tensor_dict", prepare)
        joining = {
            name: start_joining(
                group, tensor_dict[name], 0, even_sizes(math.prod(slices[name][2]), group.world_size)
            )
            for name in _ordered(slices)
        }
        for name, finish in joining.items():
            tensor_dict[name] = finish().view(slices[name][2])
    return tensor_dict


def _cut(tensor_dict: TensorDict, group: Communicator, names: list[str]) -> tuple[TensorDict, Slices]:
    """Return the dict with slices for the declared tensors, and what the receiver needs to know of them."""
    part, parts = group.rank, group.world_size
    cut, slices = dict(tensor_dict), Slices()
    for name in _ordered(names):
        if name not in tensor_dict:
            raise ValueError(f"all_gather_tensors names {name!r}, and the dict has no such tensor")
        whole = checked_tensor(tensor_dict[name]).detach().resolve_conj().resolve_neg().contiguous()
        cut[name] = torch.split(whole.view(-1), list(even_sizes(whole.numel(), parts)))[part]
        slices[name] = part, parts, list(whole.shape), int(word_sum(as_bytes(whole)))
    return cut, slices


def _ordered(names: Iterable[str]) -> list[str]:
    """Return the names in the same order on all ranks; a dict may have numbers beside names as keys."""
    return sorted(names, key=lambda name: (type(name).__name__, name))
