"""The messages between a trainer, its fork server and the forks: how they travel, and what they mean.

A message is a tuple of two numbers, the first of which names its kind or its request, and of parts: a fixed
struct, and the output of the codec (`plain_data`). Most answers have no parts, and most requests one that is
bytes already: these cost no more than the struct. The socket keeps the boundaries of messages; a message that
is too long for it travels as a file in memory. Errors of a fork travel as their type and their text.

The arguments of a collective are bytes of the codec: plain values stand for themselves, lists for lists and
bytes for tensors; everything else is a tuple that begins with its kind. A tensor is described by a fixed
struct: the number of its storage, and how the tensor lies in it.

Options are nearly always those of the call before, and reading or filling torch's objects takes longer than
everything else, so encoded and decoded options are cached.
"""

from __future__ import annotations

import builtins
import errno
import functools
import operator
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from torchft_like import errors
from torchft_like.errors import NotSupportedError, PlainDataError
from torchft_like.plain_data import CALLS, encoded_bytes, list_of
from torchft_like.plain_data import decode as decode_plain
from torchft_like.plain_data import encode as encode_plain
from torchft_like.process_group.baby.heartbeat import LOOK_EVERY_S
from torchft_like.process_group.work import FOREVER
from torchft_like.runtime.descriptors import ancillary_bytes, descriptors_in, despite_reset, send_descriptors

Message = tuple[Any, ...]  # two numbers, and at most 254 parts of the types of `plain_data.CALLS`

MESSAGE_BYTES_MAX = 64 * 1024
DESCRIPTORS_MAX = 8

_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN})
_POLL_MILLISECONDS_MAX = 2**31 - 1

# Plain integers: every message needs these flags, and arithmetic with socket's enums takes microseconds.
_TRUNCATED = int(socket.MSG_CTRUNC)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_DO_NOT_WAIT = int(socket.MSG_DONTWAIT)
_ANCILLARY_BYTES_MAX = ancillary_bytes(DESCRIPTORS_MAX)


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class DescriptorsLostError(OSError):
    """A message came without its descriptors, for want of room in this process; the next may be whole."""


class ForeignMessageError(Exception):
    """The received bytes are no message: the other end does not speak this protocol."""


class Channel:
    """One end of a connection. Any thread may send; one thread at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(True)  # each call says whether it waits
        self._buffer = memoryview(bytearray(MESSAGE_BYTES_MAX))
        self._buffers = [self._buffer]
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)

    @classmethod
    def pair(cls) -> tuple[socket.socket, socket.socket]:
        """Make two connected ends, which are not channels yet."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(
        self,
        message: Message,
        descriptors: Sequence[int] = (),
        deadline: float = FOREVER,
        while_full: Callable[[], None] | None = None,
    ) -> None:
        """Send a message; the receiver gets duplicates of the descriptors.

        Args:
            while_full: called repeatedly while the other end takes nothing, so that the caller can read the
              messages that the other end has to send first.

        Raises:
            ChannelClosedError: the other end is gone.
            TimeoutError: the other end has taken nothing until `deadline` (of `time.monotonic`).
            OSError: the system has no room for the message.
            PlainDataError: a part is of a type that does not travel.
        """
        data = _encoded(message)
        if len(data) <= MESSAGE_BYTES_MAX:
            self._send(data, descriptors, deadline, while_full)
            return
        with open(os.memfd_create("torchft-message"), "wb") as file:
            file.write(data)
            file.flush()
            self._send(_LONG, [*descriptors, file.fileno()], deadline, while_full)

    def receive(self) -> tuple[Message, list[int]]:
        """Return the next message, with descriptors that now belong to the caller.

        Raises:
            ChannelClosedError: the other end is gone, and everything it sent was received.
            DescriptorsLostError: there was no room for the descriptors of this message, which is lost.
            ForeignMessageError: the received bytes are no message.
        """
        try:
            size, ancillary, flags, _ = despite_reset(
                lambda: self._socket.recvmsg_into(self._buffers, _ANCILLARY_BYTES_MAX, _CLOSE_ON_EXEC)
            )
        except OSError as error:
            raise ChannelClosedError("the other end is gone") from error
        if not size:
            raise ChannelClosedError("the other end is gone")
        descriptors = descriptors_in(ancillary) if ancillary else []
        try:
            if flags & _TRUNCATED:
                raise DescriptorsLostError(
                    errno.EMFILE,
                    "Too many open files: none is left for what was received; raise the limit (ulimit -n)",
                )
            return _decoded(bytes(self._buffer[:size]), descriptors), descriptors
        except (DescriptorsLostError, ForeignMessageError):
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def is_ready(self, deadline: float = 0.0) -> bool:
        """Wait for a message until `deadline`, as the thread that receives: it needs no poller of its own."""
        return bool(self._readable.poll(_milliseconds(deadline)))

    def has_message(self) -> bool:
        """Return whether `receive` would return or raise at once; False once this end is closed."""
        return bool(self._poll(select.POLLIN, 0))

    def close(self) -> None:
        self._socket.close()

    def _send(
        self, data: bytes, descriptors: Sequence[int], deadline: float, while_full: Callable[[], None] | None
    ) -> None:
        while True:
            try:
                if descriptors:
                    send_descriptors(self._socket, data, descriptors, socket.MSG_DONTWAIT)
                else:
                    self._socket.send(data, _DO_NOT_WAIT)
                return
            except BlockingIOError:
                events, until = select.POLLOUT, deadline
                if while_full is not None:
                    while_full()
                    events, until = events | select.POLLIN, min(deadline, time.monotonic() + LOOK_EVERY_S)
                took_none = not self._poll(events, _milliseconds(until))
                if took_none and self._socket.fileno() >= 0 and time.monotonic() >= deadline:
                    raise TimeoutError("the other end takes no messages") from None
            except OSError as error:
                if self._socket.fileno() >= 0 and error.errno not in _GONE:
                    raise
                raise ChannelClosedError("the other end is gone") from error

    def _poll(self, events: int, timeout_ms: float | None) -> list[tuple[int, int]]:
        """Poll without the poller in which `receive` may wait; return nothing once this end is closed."""
        if (descriptor := self._socket.fileno()) < 0:
            return []
        traffic = select.poll()
        traffic.register(descriptor, events)
        return traffic.poll(timeout_ms)


_HEAD = struct.Struct("<qqB")  # the two numbers of a message, and how many parts follow
_ONLY_BYTES = 255  # in that place: one part follows, which is bytes
_LONG = b"\x00"  # stands for a message that is in a file
_LONG_BYTES_MAX = _HEAD.size + CALLS.limits.structure_bytes


def _encoded(message: Message) -> bytes:
    if len(message) == 2:
        return _HEAD.pack(*message, 0)
    if len(message) == 3 and type(message[2]) is bytes:
        return _HEAD.pack(message[0], message[1], _ONLY_BYTES) + message[2]
    first, second, *parts = message
    return _HEAD.pack(first, second, len(parts)) + encode_plain(parts)


def _decoded(data: bytes, descriptors: list[int]) -> Message:
    """Decode a message; take the file of a long one off `descriptors`."""
    try:
        if data == _LONG:
            with open(descriptors.pop(), "rb") as file:
                if (nbytes := os.fstat(file.fileno()).st_size) > _LONG_BYTES_MAX:
                    raise ValueError(f"a file of {nbytes} bytes")
                file.seek(0)  # the sender's position is this one's, too
                data = file.read(nbytes)
        first, second, count = _HEAD.unpack_from(data)
        if not count and len(data) == _HEAD.size:
            return first, second
        if count == _ONLY_BYTES:
            return first, second, data[_HEAD.size :]
        return first, second, *decode_plain(data, _HEAD.size, count)
    except (PlainDataError, struct.error, IndexError, ValueError, OSError, MemoryError) as error:
        raise ForeignMessageError(f"{len(data)} bytes that are no message: {error}") from error


def _milliseconds(deadline: float) -> float | None:
    if deadline == FOREVER:
        return None
    return min(max(0.0, deadline - time.monotonic()) * 1000, _POLL_MILLISECONDS_MAX)


# -- what the messages mean


# The number of requests that expect no answer.
UNASKED: Final = 0


# The only message from the trainer to its fork server, answered by FORKED or NOT_FORKED.
FORK: Final = (0, 0)


class FromServer(IntEnum):
    """Messages from the fork server to the trainer."""

    FORKED = 0  # (pid,) with the channel to the fork, the socket for its heartbeat, and its pidfd
    ENDED = 1  # (pid, how)                 sent for each fork that has ended
    NOT_FORKED = 2  # (0, why): the machine, or the process, has no room for a fork


class ToChild(IntEnum):
    """Messages from the trainer to a fork, answered by (request, outcome, ...) unless it is UNASKED."""

    BEGIN = 0  # (request, environment, group, importer, greeting, store, rank, world_size, timeout)
    MAP = 1  # (UNASKED, storage, what the kind of memory needs to map it), perhaps with a descriptor
    UNMAP = 2  # (UNASKED, storage)
    RUN = 3  # (request, the call as bytes, and what the kind of memory needs besides, if anything)
    SET_TIMEOUT = 4  # (UNASKED, timeout)
    WARM_UP = 5  # (UNASKED, environment, device index): make a CUDA context


class Outcome(IntEnum):
    """How a request ended: the second item of its answer."""

    DONE = 0  # the parts are what the collective, or the kind of memory, answers
    FAILED = 1  # (type, text): the backend cannot be used any more
    REFUSED = 2  # (type, text): the call was wrong; the backend can still be used


_OF_TORCH = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "QueueEmptyError")
_KNOWN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(getattr(dist, name) for name in _OF_TORCH),
        *(
            kind
            for module in (errors, builtins)
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, Exception)
        ),
    )
}


def answer_for(error: BaseException) -> tuple[Any, ...]:
    """Encode the error: its type, or the nearest base that both sides know, and its text."""
    known = next(kind for kind in type(error).__mro__ if kind.__name__ in _KNOWN or kind is BaseException)
    return known.__name__, str(error)


def error_from(answer: tuple[Any, ...]) -> Exception:
    name, text = answer
    try:
        return _KNOWN.get(name, RuntimeError)(text)
    except TypeError:  # this type is not made of a single text
        return RuntimeError(f"{name}: {text}")


# -- the arguments of a collective


TensorSpec = bytes  # number of dimensions, storage, dtype, offset in elements, sizes, strides
Plain = Any
EncodeTensor = Callable[[Tensor], TensorSpec]
DecodeTensor = Callable[[TensorSpec], Tensor]


class _Kind(IntEnum):
    TIMEDELTA = 1
    REDUCE_OP = 2
    OPTIONS = 3
    DEVICE = 4


OPTIONS_KEPT_MAX = 256
CALLS_KEPT_MAX = 4096
CALL_KEPT_BYTES_MAX = 4096

_OPTIONS_KIND = _Kind.OPTIONS.value
_PLAIN = frozenset({type(None), bool, int, float, str})
_OPTIONS = tuple(  # torch has other options, which no collective takes
    cls for name, cls in sorted(vars(c10d).items()) if name.endswith("Options") and hasattr(cls, "asyncOp")
)
_FIELDS = [
    tuple(name for name, value in vars(cls).items() if isinstance(value, property)) for cls in _OPTIONS
]
_READ_FIELDS = [operator.attrgetter(*names) for names in _FIELDS]
_OPTIONS_INDEX = {cls: index for index, cls in enumerate(_OPTIONS)}
_NO_NAMED = list_of([])
_WITH_FACTOR = hash(ReduceOp.PREMUL_SUM)
_encoded_options: dict[tuple[Any, ...], bytes] = {}

# Both processes run the same torch, so they agree on the order.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}
# torch allows no more dimensions
_STRUCTS = [struct.Struct(f"<BQBq{2 * dimensions}q") for dimensions in range(65)]


def encode_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: EncodeTensor) -> bytes:
    """Encode a call of a collective; NotSupportedError names an argument that no collective takes."""
    if not kwargs:
        return _encoded_name(name) + encode(args, tensor) + _NO_NAMED
    named = [list_of([_encoded_name(key), encode(value, tensor)]) for key, value in kwargs.items()]
    return _encoded_name(name) + encode(args, tensor) + list_of(named)


def decode_call(data: bytes) -> tuple[str, list[Plain], dict[str, Plain]]:
    """Decode the name of a call, and its arguments in the form that `decode` takes.

    Raises:
        ForeignMessageError: the bytes are no call.
    """
    return (_known_call if len(data) <= CALL_KEPT_BYTES_MAX else _known_call.__wrapped__)(data)


@functools.lru_cache(CALLS_KEPT_MAX)
def _known_call(data: bytes) -> tuple[str, list[Plain], dict[str, Plain]]:
    try:
        match decode_plain(data, count=3):
            case [str(name), list(args), list(named)]:
                return name, args, dict(cast("list[list[Plain]]", named))
    except (PlainDataError, TypeError, ValueError) as error:
        raise ForeignMessageError(f"{len(data)} bytes that are no call: {error}") from error
    raise ForeignMessageError(f"{len(data)} bytes that are no call")


@functools.cache
def _encoded_name(name: str) -> bytes:
    return encode_plain([name])


def encode(value: Any, tensor: EncodeTensor) -> bytes:
    kind = type(value)
    if kind is list or kind is tuple:
        return list_of([encode(item, tensor) for item in value])
    if kind is Tensor:
        return encoded_bytes(tensor(value))
    if kind in _PLAIN:
        return encode_plain([value])
    if (index := _OPTIONS_INDEX.get(kind)) is not None:
        return _encode_options(index, _READ_FIELDS[index](value))
    return _encode_rare(value, tensor)


def decode(value: Plain, tensor: DecodeTensor) -> Any:
    form = type(value)
    if form is list:
        return [decode(item, tensor) for item in value]
    if form is bytes:
        return tensor(value)
    if form is not tuple:
        return value
    kind = value[0]
    if kind == _OPTIONS_KIND:
        return _decode_options(value[1], value[2])
    return _DECODE_RARE[kind](*value[1:])


def _encode_options(index: int, fields: tuple[Any, ...]) -> bytes:
    key = (index, *[_stand_in(field) for field in fields])
    if (known := _encoded_options.get(key)) is None:
        # One piece of bytes, which is the key of the cache on the other side.
        plain = b"".join([encode(field, _no_tensor) for field in fields])
        known = encode_plain([(_OPTIONS_KIND, index, plain)])
        if len(_encoded_options) >= OPTIONS_KEPT_MAX:
            _encoded_options.clear()
        _encoded_options[key] = known
    return known


def _stand_in(field: Any) -> Any:
    """Return a hashable value that is equal for equal fields, and for no others."""
    kind = type(field)
    if kind is ReduceOp:
        operation = hash(field)
        return operation if operation != _WITH_FACTOR else field.__getstate__()
    return tuple(field) if kind is list else field


def _encode_rare(value: Any, tensor: EncodeTensor) -> bytes:
    if isinstance(value, Tensor):
        return encoded_bytes(tensor(value))
    if isinstance(value, list | tuple):
        return list_of([encode(item, tensor) for item in value])
    if hasattr(value, "tolist"):  # a number or an array of numpy's, which torch takes for its own
        return encode(value.tolist(), tensor)
    if isinstance(value, timedelta):
        return encode_plain([(_Kind.TIMEDELTA.value, value.days, value.seconds, value.microseconds)])
    if isinstance(value, ReduceOp.RedOpType):
        value = ReduceOp(value)
    if type(value) is ReduceOp:
        operation, factor = cast("tuple[ReduceOp.RedOpType, float | None]", value.__getstate__())
        return encode_plain([(_Kind.REDUCE_OP.value, operation.value, factor)])
    if isinstance(value, torch.device):
        return encode_plain([(_Kind.DEVICE.value, str(value))])
    raise NotSupportedError(
        f"an argument of type {type(value).__name__} cannot be handed to the subprocess of a Baby group"
    )


@functools.lru_cache(OPTIONS_KEPT_MAX)
def _decode_options(index: int, fields: bytes) -> Any:
    options = _OPTIONS[index]()
    values = decode_plain(fields, count=len(_FIELDS[index]))
    for name, field in zip(_FIELDS[index], values, strict=True):
        if field is not None:
            setattr(options, name, decode(field, _no_tensor))
    return options


def _no_tensor(_: Any) -> Any:
    raise NotSupportedError("options that hold a tensor cannot be handed to the subprocess of a Baby group")


def _decode_reduce_op(operation: int, factor: float | None) -> ReduceOp:
    if factor is not None:
        return c10d._make_nccl_premul_sum(factor)
    return ReduceOp(ReduceOp.RedOpType(operation))


_DECODE_RARE: dict[int, Callable[..., Any]] = {
    _Kind.TIMEDELTA: timedelta,
    _Kind.REDUCE_OP: _decode_reduce_op,
    _Kind.DEVICE: torch.device,
}


def spec_of(tensor: Tensor, storage: int) -> TensorSpec:
    """Describe a tensor in its own storage."""
    return _spec(tensor, storage, int(tensor.storage_offset()), tensor.stride())


def contiguous_spec(tensor: Tensor, storage: int, offset: int) -> TensorSpec:
    """Describe a place for the tensor's elements in another storage, in contiguous order."""
    strides: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    return _spec(tensor, storage, offset, strides[::-1])


def storage_of(spec: TensorSpec) -> int:
    """Return the number of the storage in which the tensor lies."""
    return int.from_bytes(spec[1:9], "little")


def tensor_at(storage: torch.UntypedStorage, spec: TensorSpec) -> Tensor:
    """Make the tensor that a description stands for."""
    dimensions, _, dtype, offset, *forms = _STRUCTS[spec[0]].unpack(spec)
    empty = torch.empty(0, dtype=_DTYPES[dtype], device=storage.device)
    return empty.set_(storage, offset, forms[:dimensions], forms[dimensions:])


def _spec(tensor: Tensor, storage: int, offset: int, strides: Sequence[int]) -> TensorSpec:
    shape = tensor.shape
    dimensions = len(shape)
    return _STRUCTS[dimensions].pack(dimensions, storage, _INDEX[tensor.dtype], offset, *shape, *strides)
