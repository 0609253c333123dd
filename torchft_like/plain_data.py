"""Nested values as bytes and tensors, and back: the one codec of messages, checkpoints and digests.

A schema is closed: a value has exactly one of the schema's types (a subclass is another type), or it is
refused. Reading can therefore never run code that a peer sent, as reading a pickle can. Coordinators, gangs
and message queues send `MESSAGES`, checkpoint transports `STATES` with DTensors, Baby groups `CALLS`;
`state_digest` has a schema of its own. They differ in their types and limits, and share one format.

A value is taken apart into a *structure*, which is bytes, and tensors, which the caller moves in its own way:
by a collective, through shared memory. Arrays, and long bytes and texts, go beside the structure as tensors
of uint8 on the same memory.

Values are kept bit for bit, and so are types, the order of keys, dtypes and shapes. Gradients and identity
are not: tensors arrive without requires_grad, a Parameter arrives as its tensor, and a value that occurs
twice arrives twice. In a state, equal views of the same memory (tied weights) are one memory again, tensors
arrive on the CPU, a DTensor arrives as a `Shard`, and a value of a library's own class as one
(`instances`).

INVARIANT of reading: no length is used before it was compared with what is there and with what the reader
takes (`Limits`), so a corrupt structure costs an error, and never more memory than a small multiple of its
own size. All processes of a job must run the same version of the format; another one is refused by its first
bytes. This module does not know its senders and receivers.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchft_like.dtypes import DTYPES, as_bytes, is_numpy_number, numpy_dtype
from torchft_like.errors import FaultToleranceError, PlainDataError
from torchft_like.instances import TensorInstance, is_taken, name_of_class, parts_of, together

ALLOWED = (
    "None, bool, int, float, str, bytes, list, tuple, dict, dense torch tensors, numpy arrays of numbers"
)
DEPTH_MAX = 64
DIMENSIONS_MAX = 64
VALUES_MAX = 1_000_000  # values in lists, tuples and dicts together
STRUCTURE_BYTES_MAX = 64 * 1024 * 1024
INLINE_BYTES_MAX = 4096  # longer bytes and texts are sent beside the structure
LEAVES_MAX = 65_536
LEAF_BYTES_MAX = 2**40  # bytes of all leaves together
OTHER_CONTAINER = 8  # a container that is no list, tuple or dict takes the memory of so many more values
EQUAL_HASHES_MAX = 64  # keys of a dict with equal hashes: more are no accident, and make it slow

Leaf: TypeAlias = "Tensor | np.ndarray | bytes"
Buffer: TypeAlias = "bytes | bytearray | memoryview"
_Reading: TypeAlias = "tuple[object, int]"
_Finish: TypeAlias = "Callable[[Reader, list[Any]], object]"


@dataclass(frozen=True)
class Limits:
    """The limits of a sender or a receiver.

    Attributes:
        values: values in containers, all together; a pair of a dict counts once, and a container that is no
            list, tuple or dict for OTHER_CONTAINER more.
        leaves: tensors, arrays, and long texts and bytes.
        leaf_bytes: bytes of all leaves together.
    """

    structure_bytes: int = STRUCTURE_BYTES_MAX
    values: int = VALUES_MAX
    leaves: int = LEAVES_MAX
    leaf_bytes: int = LEAF_BYTES_MAX


@dataclass(frozen=True, eq=False)
class Schema:
    """The types that two parties send each other; the format is the same for all schemas.

    Attributes:
        writers: for each type that is sent (a subclass is another type), the function that writes it.
        other: the function that is called for a value of any other type.
        keys: the types of a dict's keys; tuples hold values of these types.
        tags_end: the first tag that a reader refuses.
        allowed: the types in words, for errors.
        root: the value itself in words, for errors.
        limits: the limits of the sender, and of a receiver that sets none.
        inline_bytes_max: bytes and texts up to this length stand in the structure.
        keeps_devices: whether a tensor arrives on the type of device that it was sent from; if not, it
          arrives on the CPU.
        type_error: the error for a type that is refused.
        joins_views: whether equal views of one memory are one memory again, and elements lie as they did.
    """

    writers: Mapping[type, Callable[..., None]]
    other: Callable[..., None]
    keys: frozenset[type]
    tags_end: int
    allowed: str
    root: str = "the value"
    limits: Limits = Limits()
    inline_bytes_max: int = INLINE_BYTES_MAX
    keeps_devices: bool = False
    type_error: type[Exception] = PlainDataError
    joins_views: bool = False


class TensorSpec(NamedTuple):
    """The description of one tensor of a message, to allocate it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor's elements in contiguous order."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The layout of a DTensor on its mesh, in values that can be sent.

    Attributes:
        shape: the shape of the whole tensor.
        mesh_shape, mesh_names: the sizes and the names of the mesh's dimensions; names are empty if the mesh
        has none.
        placements: one placement for each dimension of the mesh, as torch prints it.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    placements: tuple[str, ...]

    def __str__(self) -> str:
        names = f" {self.mesh_names}" if self.mesh_names else ""
        return f"{self.shape} placed {', '.join(self.placements)} on a mesh {self.mesh_shape}{names}"


@dataclass(frozen=True)
class Shard:
    """A rank's part of a DTensor between replica groups; `mesh` numbers the meshes of the sender's state."""

    local: Any  # a tensor, or while none has come the TensorInstance of one
    layout: Layout
    mesh: int


# structure = magic, number of leaves, a spec for each leaf, one value
# spec      = dtype, device, number of dimensions, dimensions
# value     = tag, and what the tag's reader reads; leaves come in the order of their tags
# container = tag, number of items (pairs for a dict), the items

MAGIC = 0x32445450  # "PTD2": the digit is the version
HEAD = struct.Struct("<II")
SPEC = struct.Struct("<BBB")
LENGTH = struct.Struct("<BI")
INT = struct.Struct("<Bq")
FLOAT = struct.Struct("<Bd")
TWO_FLOATS = struct.Struct("<Bdd")
ARRAY = struct.Struct("<BBB")
SHORT = struct.Struct("<BB")  # a tag and a small number
NO_LEAVES = HEAD.pack(MAGIC, 0)
DEVICES = ("cpu", "cuda")
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}

(
    NONE, TRUE, FALSE, SMALL_INT, SHORT_STR, SHORT_BYTES, INT64, LONG, DOUBLE, STR, BYTES, LIST, TUPLE, DICT,
    LEAF_STR, LEAF_BYTES, LEAF_TENSOR, LEAF_ARRAY,
    SAME_TENSOR, COMPLEX, SCALAR, DTYPE, DEVICE, SIZE, COUNTER, ORDERED_DICT, SHARD, INSTANCE, PERMUTED,
    TAGS_END,
) = range(30)  # fmt: skip

TAGS = [bytes([tag]) for tag in range(TAGS_END)]
# Encodings of small numbers, and of the heads of short texts, bytes and lists, are made once.
SMALL_INTS = [SHORT.pack(SMALL_INT, value) for value in range(256)]
SHORT_STRS = [SHORT.pack(SHORT_STR, length) for length in range(256)]
SHORT_LISTS = [LENGTH.pack(LIST, length) for length in range(256)]
SHORT_BYTE_STRINGS = [SHORT.pack(SHORT_BYTES, length) for length in range(256)]
PLAIN_KEYS: frozenset[type] = frozenset({type(None), bool, int, float, str})


def is_key(key: object, types: frozenset[type], levels: int = DEPTH_MAX) -> bool:
    """Return whether a key of a dict may be sent; tuples that may be keys are nested `levels` deep."""
    if type(key) is tuple and tuple in types:
        return levels > 0 and len(key) <= DIMENSIONS_MAX and all(is_key(k, types, levels - 1) for k in key)
    return type(key) in types


def extent(shape: Sequence[int]) -> int:
    """Return what a shape may claim without any bytes: its elements, with zero counted as one."""
    return math.prod(max(size, 1) for size in shape)


def name_of(value: object) -> str:
    """Return the name of the value's type, with its module unless that is builtins."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def shown(path: Sequence[object], root: str) -> str:
    """Show a path as Python would write it: `optimizer.state[3].exp_avg`, `model["layer.0.weight"]`."""
    keys = "".join(map(_shown_key, path[:16])) + ("..." if len(path) > 16 else "")
    return keys.removeprefix(".") or root


def _shown_key(key: object) -> str:
    if type(key) is str and key.isidentifier():
        return f".{key:.80}"
    try:
        return f"[{key!r:.80}]"
    except Exception:  # noqa: BLE001 - of long ints, deep tuples and some refused keys
        return f"[{name_of(key)}]"


def bytes_of(leaf: Leaf) -> Buffer:
    """Return the memory of a leaf, without a copy; a tensor of another device is copied to the CPU."""
    if isinstance(leaf, bytes):
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf.reshape(-1).view(np.uint8).data
    if not leaf.numel():
        return b""
    return as_bytes(leaf.cpu()).numpy().data


def settled(tensor: Tensor) -> Tensor:
    """Return the tensor with its elements in contiguous order, conjugated and negated if that was pending."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def nbytes_of(leaf: Leaf) -> int:
    return len(leaf) if isinstance(leaf, bytes) else leaf.nbytes


# -------------------------------------------------------------------------------------------- messages


def dissect(value: object) -> tuple[bytes, list[Leaf]]:
    """Take a message apart: into its structure and its leaves, of which tensors are contiguous, and the
    value's own if those were.

    Raises:
        PlainDataError: a part of the value is of a type that cannot be sent, the value contains itself, or it
          is too large; the text names the part (`a[3]`), its type, and what to pass instead.
    """
    structure, leaves = write(value, MESSAGES)
    if leaves:
        leaves = [settled(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return structure, leaves


def encode(values: Sequence[object]) -> bytes:
    """Encode values without leaves, in a row, for `decode`; a PlainDataError says what does not fit."""
    sheet = Sheet(CALLS)
    index = 0
    try:
        for index, value in enumerate(values):  # noqa: B007 - the handler below reads it
            sheet.write(value, 0)
    except Unfit as unfit:
        raise unfit.within(index).error(CALLS) from None
    data = b"".join(sheet.parts)
    if len(data) > CALLS.limits.structure_bytes:
        raise _too_long(len(data), CALLS)
    return data


def decode(data: bytes, start: int = 0, count: int = 1) -> list[object]:
    """Decode `count` values that `encode` has encoded; a PlainDataError says that there are fewer or more."""
    try:
        values, end = Reader(data, CALLS, CALLS.limits).values(start, count)
        if end != len(data):
            raise ValueError("it goes on after its end")
    except FOREIGN as error:
        raise foreign(error) from error
    return values


class TensorLeaves:
    """Leaves that came as tensors, which the value takes over."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._next = iter(tensors)

    def tensor(self, _: TensorSpec) -> Tensor:
        return next(self._next)

    def memory(self, _: int) -> Buffer:
        tensor = next(self._next)
        if tensor.dtype is not torch.uint8:
            raise ValueError("an array is not in a tensor of bytes")
        return tensor.detach().cpu().contiguous().numpy().reshape(-1).data

    def data(self, nbytes: int) -> bytes:
        return bytes(self.memory(nbytes))


def as_tensor(leaf: Leaf) -> Tensor:
    """Return a leaf as a tensor: another one than a tensor as uint8, on its memory if that is writable."""
    if isinstance(leaf, Tensor):
        return leaf
    data = np.frombuffer(leaf, np.uint8) if isinstance(leaf, bytes) else leaf.reshape(-1).view(np.uint8)
    return torch.from_numpy(data if data.flags.writeable else data.copy())


# --------------------------------------------------------------------------------------------- writing


Writer: TypeAlias = Callable[..., None]


def write(value: object, schema: Schema) -> tuple[bytes, list[Leaf]]:
    """Return the structure of a value, and its leaves as they are: tensors may be views, on any device.

    Raises:
        PlainDataError: a part of the value is of a type that cannot be sent, the value contains itself, or it
          is too large; the text names the part. A schema may have another error for types.
    """
    sheet = Sheet(schema)
    try:
        schema.writers.get(type(value), schema.other)(value, sheet, 0)
    except Unfit as unfit:
        raise unfit.error(schema) from None
    leaves = sheet.leaves
    if not leaves:
        structure = NO_LEAVES + b"".join(sheet.parts)
    else:
        specs = [_spec_bytes(leaf, schema.keeps_devices) for leaf in leaves]
        structure = b"".join([HEAD.pack(MAGIC, len(leaves)), *specs, *sheet.parts])
    if len(structure) > schema.limits.structure_bytes:
        raise _too_long(len(structure), schema)
    return structure, leaves


def list_of(encoded: Sequence[bytes]) -> bytes:
    """Encode a list whose items are encoded already."""
    count = len(encoded)
    head = SHORT_LISTS[count] if count < 256 else LENGTH.pack(LIST, count)
    return head + b"".join(encoded)


def encoded_bytes(data: bytes) -> bytes:
    """Encode as `encode([data])` does, in a fraction of the time."""
    if len(data) < 256:
        return SHORT_BYTE_STRINGS[len(data)] + data
    return LENGTH.pack(BYTES, len(data)) + data


class Unfit(Exception):  # noqa: N818 - it never leaves a call of `write` or `encode`
    """A value that cannot be sent; containers add their keys on the way up."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[object] = []  # the innermost key first

    def within(self, key: object) -> Unfit:
        """Add the key under which a container has the value, and return the same error."""
        self.path.append(key)
        return self

    def error(self, schema: Schema) -> Exception:
        """Make the error for the caller."""
        kind = schema.type_error if isinstance(self, UnfitType) else PlainDataError
        return kind(f"{shown(self.path[::-1], schema.root)} {self.problem}")


class UnfitType(Unfit):
    """A value of a type that cannot be sent."""


class Sheet:
    """What was written so far, and how much more may be written."""

    def __init__(self, schema: Schema) -> None:
        self.schema: Schema = schema
        self.writers: Mapping[type, Callable[..., None]] = schema.writers
        self.parts: list[bytes] = []
        self.put: Callable[[bytes], None] = self.parts.append
        self.leaves: list[Leaf] = []
        self.is_in_instance = False  # of another class than a named tuple's
        limits = schema.limits
        self.values_left: int = limits.values
        self.bytes_left: int = limits.structure_bytes
        if schema.joins_views:
            self.views: dict[object, int] = {}  # the leaf that shows the same elements
            self.meshes: dict[object, int] = {}

    def write(self, value: object, depth: int) -> None:
        self.writers.get(type(value), self.schema.other)(value, self, depth)

    def claim(self, nbytes: int) -> None:
        """Count the bytes of a text or bytes."""
        self.bytes_left -= nbytes
        if self.bytes_left < 0:
            raise Unfit(
                f"is what makes the texts and bytes longer than {self.schema.limits.structure_bytes} together"
            )

    def put_data(self, tag: int, data: bytes) -> None:
        self.claim(len(data))
        self.put(LENGTH.pack(tag, len(data)))
        self.put(data)

    def put_leaf(self, tag: int, leaf: Leaf) -> None:
        """Write a tag, and add a leaf beside the structure."""
        if len(self.leaves) == self.schema.limits.leaves:
            raise Unfit(f"is one tensor too many: {self.schema.limits.leaves} travel at a time")
        self.put(TAGS[tag])
        self.leaves.append(leaf)

    def open(self, tag: int, count: int, depth: int) -> None:
        """Begin a container of `count` items, which follow."""
        if depth == DEPTH_MAX:
            raise Unfit(f"is nested deeper than {DEPTH_MAX} levels, or contains itself")
        self.values_left -= count if tag <= DICT else count + OTHER_CONTAINER
        if self.values_left < 0:
            raise Unfit(
                f"is what makes it more than {self.schema.limits.values} values: put numbers into an array"
            )
        self.put(LENGTH.pack(tag, count))

    def write_parts(self, tag: int, parts: Sequence[object], depth: int) -> None:
        """Write what a value of another kind is made of; an error names the value, not the part."""
        self.open(tag, len(parts), depth)
        for part in parts:
            self.write(part, depth + 1)

    def number_of(self, mesh: object) -> int:
        """Return the mesh's number among those that occur in the value."""
        return self.meshes.setdefault(mesh, len(self.meshes))


def refuse(value: object, sheet: Sheet, _: int) -> None:
    if isinstance(value, Tensor) and (problem := _problem_of(value)):
        raise UnfitType(problem)
    name = name_of(value)
    article = "an" if name[0] in "aeiou" else "a"
    cure, allowed = next(cure for fits, cure in _CURES if fits(value)), sheet.schema.allowed
    raise UnfitType(f"is {article} {name}, which does not travel; pass {cure}. What travels: {allowed}")


def write_int(value: int, sheet: Sheet, _: int) -> None:
    if 0 <= value < 256:
        sheet.put(SMALL_INTS[value])
    elif -(2**63) <= value < 2**63:
        sheet.put(INT.pack(INT64, value))
    else:
        sheet.put_data(LONG, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def write_str(value: str, sheet: Sheet, _: int) -> None:
    data = value.encode() if value.isascii() else value.encode("utf-8", "surrogatepass")
    if len(data) < 256:
        sheet.claim(len(data))
        sheet.put(SHORT_STRS[len(data)] + data)
    elif len(data) > sheet.schema.inline_bytes_max:
        sheet.put_leaf(LEAF_STR, data)
    else:
        sheet.put_data(STR, data)


def write_bytes(value: bytes, sheet: Sheet, _: int) -> None:
    if len(value) > sheet.schema.inline_bytes_max:
        sheet.put_leaf(LEAF_BYTES, value)
    else:
        sheet.claim(len(value))
        sheet.put(encoded_bytes(value))


def write_items(items: list[object] | tuple[object, ...], sheet: Sheet, depth: int) -> None:
    sheet.open(LIST if isinstance(items, list) else TUPLE, len(items), depth)
    writers, other, depth = sheet.writers, sheet.schema.other, depth + 1
    index = 0
    try:
        for index, item in enumerate(items):  # noqa: B007 - the handler below reads it
            writers.get(type(item), other)(item, sheet, depth)
    except Unfit as unfit:
        raise unfit.within(index)  # noqa: B904 - the same error


def write_dict(value: Mapping[object, object], sheet: Sheet, depth: int, tag: int = DICT) -> None:
    sheet.open(tag, len(value), depth)
    writers, other, keys, depth = sheet.writers, sheet.schema.other, sheet.schema.keys, depth + 1
    key: object = None
    try:
        for key, item in value.items():
            if type(key) is not str and not is_key(key, keys):
                raise UnfitType(about_key(key, sheet.schema))
            writers[type(key)](key, sheet, depth)
            writers.get(type(item), other)(item, sheet, depth)
    except Unfit as unfit:
        raise unfit.within(key)  # noqa: B904 - the same error


def write_ordered_dict(value: OrderedDict[object, object], sheet: Sheet, depth: int) -> None:
    """Write the pairs, and then the versions that `Module.state_dict()` attaches to an OrderedDict."""
    write_dict(value, sheet, depth, ORDERED_DICT)
    try:
        sheet.write(getattr(value, "_metadata", None), depth + 1)
    except Unfit as unfit:
        raise unfit.within("_metadata")  # noqa: B904 - the same error


def about_key(key: object, schema: Schema) -> str:
    names = sorted(kind.__name__ for kind in schema.keys - {tuple, type(None)})
    tuples = " and tuples of these" if tuple in schema.keys else ""
    return f"is under a key of type {name_of(key)}; keys that travel are None, {', '.join(names)}{tuples}"


def write_tensor(value: Tensor, sheet: Sheet, depth: int) -> None:
    if problem := _problem_of(value):
        raise UnfitType(problem)
    if sheet.schema.keeps_devices and value.device.type not in DEVICES:
        raise UnfitType(f"is a tensor on {value.device}, which does not travel; pass `.cpu()`")
    if value.dim() > DIMENSIONS_MAX:
        raise Unfit(f"has {value.dim()} dimensions, and {DIMENSIONS_MAX} travel; pass `.flatten()`")
    if not value.numel():
        _require_readable(value.shape)
    elif sheet.schema.joins_views:
        if not value.is_contiguous() and (order := _order_without_gaps(value)):
            sheet.write_parts(PERMUTED, (value.permute(order), *order), depth)
            return
        view = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        before = sheet.views.setdefault((*view, value.is_conj(), value.is_neg()), len(sheet.leaves))
        if before != len(sheet.leaves):
            sheet.put(LENGTH.pack(SAME_TENSOR, before))
            return
    sheet.put_leaf(LEAF_TENSOR, value.detach())


def _order_without_gaps(value: Tensor) -> list[int]:
    """Return the order of the dimensions in which the elements lie one after another; none if they do not.

    An optimizer has a slow kernel for a state that lies otherwise than its parameter, such as one of a model
    in `channels_last`.
    """
    order = sorted(range(value.dim()), key=value.stride().__getitem__, reverse=True)
    return order if value.permute(order).is_contiguous() else []


_PLAIN = Tensor, torch.nn.Parameter
_WITHOUT_DATA = "FakeTensor", "UninitializedParameter", "UninitializedBuffer"


def _problem_of(value: Tensor) -> str:
    """Return what keeps a tensor from travelling, whatever its class is, and the cure; "" if nothing does."""
    if value.is_nested:
        return "is a nested tensor: only dense ones travel; pass `.unbind()`"
    if value.is_quantized:
        return "is a quantized tensor: only plain ones travel; pass `.dequantize()`, or `.int_repr()`"
    if value.layout is not torch.strided:
        return f"is a tensor of layout {value.layout}: only dense ones travel; pass `.to_dense()`"
    if value.is_meta or (type(value) in _PLAIN and value.numel() and not value.data_ptr()):
        return (
            f"is a tensor on {value.device} that has no memory (never filled, or freed, as by FSDP): pass "
            "one that has data"
        )
    if value.dtype not in DTYPE_NUMBERS:
        return f"has dtype {value.dtype}, which does not travel; pass `.to` one that does, or its bytes"
    return ""


def write_shard(value: Shard, sheet: Sheet, depth: int) -> None:
    if sheet.is_in_instance:
        raise UnfitType(
            "is a DTensor in a value of a library's own class, which a receiver puts together before it "
            "knows its mesh: pass it in a dict, a list or a tuple"
        )
    sheet.write_parts(SHARD, (value.local, value.mesh, *vars(value.layout).values()), depth)


def write_array(value: np.ndarray, sheet: Sheet, _: int) -> None:
    code = _number_code(value)
    if not value.size:
        _require_readable(value.shape)
    sheet.put_leaf(LEAF_ARRAY, np.ascontiguousarray(value))
    sheet.put(ARRAY.pack(len(code), value.ndim, 0) + code + struct.pack(f"<{value.ndim}Q", *value.shape))


def _number_code(value: np.ndarray | np.generic) -> bytes:
    code = value.dtype.str
    if not is_numpy_number(code):
        kind = "an array" if isinstance(value, np.ndarray) else "a scalar"
        raise UnfitType(f"is {kind} of numpy dtype {value.dtype}: only numbers travel; pass `.tolist()`")
    return code.encode()


def write_dtype(value: torch.dtype, sheet: Sheet, _: int) -> None:
    if value not in DTYPE_NUMBERS:
        raise UnfitType(f"is dtype {value}, which does not travel")
    sheet.put(SHORT.pack(DTYPE, DTYPE_NUMBERS[value]))


def write_size(value: torch.Size, sheet: Sheet, _: int) -> None:
    if len(value) > DIMENSIONS_MAX:
        raise Unfit(f"has {len(value)} dimensions, and {DIMENSIONS_MAX} travel; pass a `tuple(...)`")
    sheet.put(SHORT.pack(SIZE, len(value)) + struct.pack(f"<{len(value)}q", *value))  # one may be -1


def write_other_state(value: object, sheet: Sheet, depth: int) -> None:
    if isinstance(value, np.generic):
        code = _number_code(value)
        sheet.put(SHORT.pack(SCALAR, len(code)) + code + value.tobytes())
    elif (isinstance(value, Tensor) and _problem_of(value)) or (parts := parts_of(value)) is None:
        refuse(value, sheet, depth)
    elif not is_taken(type(value)):
        name = name_of_class(type(value))
        raise UnfitType(
            f"is a {name}, a class that torch does not know as one of plain data, so it does not travel: "
            f"call torch.serialization.add_safe_globals([{type(value).__qualname__}]) on every replica"
        )
    else:
        write_instance(value, parts, sheet, depth)


def write_instance(value: object, parts: Sequence[object], sheet: Sheet, depth: int) -> None:
    """Write a value of a library's own class, which `parts_of` has taken apart."""
    was_in_instance = sheet.is_in_instance
    sheet.is_in_instance = was_in_instance or not isinstance(value, tuple)
    sheet.write_parts(INSTANCE, (name_of_class(type(value)), *parts), depth)
    sheet.is_in_instance = was_in_instance


def _require_readable(shape: Sequence[int]) -> None:
    if extent(shape) > LEAF_BYTES_MAX:
        raise Unfit(f"is empty and has the shape {tuple(shape)}, which does not travel; pass `.flatten()`")


def _too_long(length: int, schema: Schema) -> PlainDataError:
    """Make the error for a structure that a receiver would refuse for its length."""
    return PlainDataError(
        f"{schema.root} takes {length} bytes beside tensors, arrays and long texts: "
        f"{schema.limits.structure_bytes} travel at a time; keep large lists of numbers in tensors"
    )


# The first entry that fits a value says what to pass instead.
_CURES: tuple[tuple[Callable[[object], bool], str], ...] = (
    (
        lambda value: isinstance(value, Tensor) and hasattr(value, "to_local"),
        "its local shard, `.to_local()`",
    ),
    (
        lambda value: isinstance(value, Tensor) and name_of(value).rpartition(".")[2] in _WITHOUT_DATA,
        "a tensor that has data",
    ),
    (
        lambda value: hasattr(value, "__tensor_flatten__"),
        "the tensors that it is made of (`__tensor_flatten__`), or what `.dequantize()` gives",
    ),
    (lambda value: isinstance(value, Tensor), "a plain tensor, `.as_subclass(torch.Tensor)`"),
    (lambda value: isinstance(value, np.generic), "`.item()`"),
    (lambda value: isinstance(value, np.ndarray), "a plain array, `numpy.asarray`"),
    (lambda value: isinstance(value, dict), "a plain `dict(...)`"),
    (lambda value: isinstance(value, tuple), "a plain `tuple(...)`"),
    (lambda value: isinstance(value, list | set | frozenset | range), "a plain `list(...)`"),
    (lambda value: isinstance(value, int | float | str), "its plain value"),
    (lambda value: isinstance(value, bytearray | memoryview), "`bytes(...)`"),
    (lambda value: isinstance(value, complex), "its `.real` and `.imag`"),
    (lambda value: isinstance(value, torch.dtype | torch.device), "its name, `str(...)`"),
    (lambda _: True, "the plain data in it"),
)


def _spec_bytes(leaf: Leaf, keeps_devices: bool) -> bytes:
    if isinstance(leaf, Tensor):
        device = DEVICES.index(leaf.device.type) if keeps_devices else 0
        dimensions = leaf.dim()
        head = SPEC.pack(DTYPE_NUMBERS[leaf.dtype], device, dimensions)
        return head + struct.pack(f"<{dimensions}Q", *leaf.shape)
    return SPEC.pack(DTYPE_NUMBERS[torch.uint8], 0, 1) + struct.pack("<Q", nbytes_of(leaf))


# --------------------------------------------------------------------------------------------- reading


class LeafSource(Protocol):
    """The source of a message's leaves, in their order; the value owns what it returns."""

    def tensor(self, spec: TensorSpec, /) -> Tensor:
        """Return the next leaf, which is a tensor."""

    def memory(self, nbytes: int, /) -> Buffer:
        """Return writable memory of this size with the next leaf, for an array."""

    def data(self, nbytes: int, /) -> bytes:
        """Return the next leaf, which is bytes."""


_length, _int, _float = LENGTH.unpack_from, INT.unpack_from, FLOAT.unpack_from

# Errors of reading foreign bytes, which the public functions turn into a PlainDataError.
FOREIGN = (IndexError, struct.error, UnicodeDecodeError, ValueError, TypeError, OverflowError, RuntimeError)
BEYOND = "a length goes beyond the end"


def foreign(error: Exception) -> PlainDataError:
    """Make the error for the caller."""
    return PlainDataError(f"what came is no plain data ({error}): do both sides run the same version?")


def _read_specs(data: bytes, limits: Limits) -> tuple[list[TensorSpec], int]:
    """Read the descriptions of the leaves; return them, and where the value begins."""
    if len(data) < HEAD.size:
        raise ValueError(f"it ends after {len(data)} bytes")
    magic, count = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("it does not begin like it, or is of another version")
    if count > min(limits.leaves, len(data) // SPEC.size):
        raise ValueError(f"{count} tensors in {len(data)} bytes, of which at most {limits.leaves} are taken")
    at, specs, nbytes = HEAD.size, [], 0
    for _ in range(count):
        dtype, device, dimensions = SPEC.unpack_from(data, at)
        shape, at = _read_shape(data, at + SPEC.size, dimensions)
        spec = TensorSpec(DTYPES[dtype], shape, DEVICES[device])
        nbytes += spec.nbytes
        specs.append(spec)
    if nbytes > limits.leaf_bytes:
        raise ValueError(f"it speaks of {nbytes} bytes of tensors")
    return specs, at


def _read_shape(data: bytes, at: int, dimensions: int) -> tuple[tuple[int, ...], int]:
    if dimensions > DIMENSIONS_MAX:
        raise ValueError(f"a shape has {dimensions} dimensions")
    shape = struct.unpack_from(f"<{dimensions}Q", data, at)
    if (math.prod(shape) or extent(shape)) > LEAF_BYTES_MAX:
        raise ValueError(f"a tensor has the shape {shape}")
    return shape, at + 8 * dimensions


class Reader:
    """A reader of values, which counts the leaves that it has given away."""

    specs: Sequence[TensorSpec] = ()
    leaves: LeafSource | None = None
    copies_left = 0
    puts_together = True  # tensors of a library's own class; or else leaves them as a TensorInstance

    def __init__(self, data: bytes, schema: Schema, limits: Limits) -> None:
        self.data = data
        self.schema = schema
        self.limits = limits
        # For each leaf that was given away: the tensor, or None if it was none.
        self.given: list[Tensor | None] = []

    def values(self, at: int, count: int) -> tuple[list[object], int]:
        """Read `count` values from `at` on; return them, and where they end.

        One loop reads nested containers: a call for each takes longer than all the rest.
        """
        data, size, tags_end, values_left = (
            self.data,
            len(self.data),
            self.schema.tags_end,
            self.limits.values,
        )
        outer: list[tuple[_Finish | None, list[object], int]] = []
        finish, items, left = None, list[object](), count
        while True:
            while left:
                left -= 1
                tag = data[at]
                if SHORT_STR <= tag <= SHORT_BYTES:
                    start = at + 2
                    at = start + data[at + 1]
                    if at > size:
                        raise ValueError(BEYOND)
                    text = data[start:at]
                    items.append(text if tag == SHORT_BYTES else _text(text))
                elif tag == SMALL_INT:
                    items.append(data[at + 1])
                    at += 2
                elif tag == INT64:
                    items.append(_int(data, at)[1])
                    at += 9
                elif tag <= FALSE:
                    items.append(_CONSTANTS[tag])
                    at += 1
                elif tag >= tags_end:
                    raise ValueError(f"tag {tag} does not belong there")
                elif (container := _CONTAINERS.get(tag)) is not None:
                    outer.append((finish, items, left))
                    finish, each, more, cost = container
                    count = _length(data, at)[1]
                    at += 5
                    values_left -= count + cost
                    items, left = [], each * count + more
                    if left > size - at or values_left < 0 or len(outer) > DEPTH_MAX:
                        raise ValueError(_too_much(left > size - at, values_left < 0))
                else:
                    value, at = _READERS[tag](self, at)
                    items.append(value)
            if not outer:
                return items, at
            finished = items if finish is None else finish(self, items)
            finish, items, left = outer.pop()
            items.append(finished)

    def take(self, at: int) -> tuple[bytes, int]:
        """Read bytes after their length; return them, and where they end."""
        start = at + 5
        end = start + LENGTH.unpack_from(self.data, at)[1]
        if end > len(self.data):
            raise ValueError(BEYOND)
        return self.data[start:end], end

    def next_spec(self) -> tuple[TensorSpec, LeafSource]:
        """Return the description of the next leaf, and the source to get that leaf from."""
        if self.leaves is None or len(self.given) == len(self.specs):
            raise ValueError("a tensor is missing")
        spec = self.specs[len(self.given)]
        self.given.append(None)
        return spec, self.leaves

    def next_data(self) -> bytes:
        spec, leaves = self.next_spec()
        return leaves.data(spec.nbytes)


class Structure(Reader):
    """A structure that `write` has made: its leaves are known at once, and its value can be read once. The
    bytes need not be trusted: a PlainDataError says that they are no structure, or beyond the limits of the
    reader, or else of the schema.
    """

    def __init__(self, data: bytes, schema: Schema, limits: Limits | None = None) -> None:
        super().__init__(data, schema, limits := limits or schema.limits)
        self._start = HEAD.size
        if not data.startswith(NO_LEAVES):
            try:
                self.specs, self._start = _read_specs(data, limits)
            except FOREIGN as error:
                raise foreign(error) from error
            self.copies_left: int = limits.leaves - len(self.specs)

    def value(self, leaves: LeafSource) -> object:
        """Read the value; a PlainDataError says that the bytes are none. The source's errors pass."""
        self.leaves = leaves
        try:
            (value,), end = self.values(self._start, 1)
            if end != len(self.data) or len(self.given) != len(self.specs):
                raise ValueError("it goes on after its end")
        except FaultToleranceError:
            raise
        except FOREIGN as error:
            raise foreign(error) from error
        return value


def _too_much(is_beyond: bool, are_many: bool) -> str:
    if is_beyond:
        return "a count goes beyond the end"
    return "it has more values than are taken" if are_many else f"it is nested deeper than {DEPTH_MAX} levels"


def _read_leaf_tensor(reader: Reader, at: int) -> tuple[Tensor, int]:
    spec, leaves = reader.next_spec()
    tensor = leaves.tensor(spec)
    reader.given[-1] = tensor
    return tensor, at + 1


def _read_same_tensor(reader: Reader, at: int) -> tuple[Tensor, int]:
    """Make another tensor on the memory of one that has been read."""
    _, index = LENGTH.unpack_from(reader.data, at)
    known = reader.given[index]
    reader.copies_left -= 1
    if known is None or reader.copies_left < 0:
        raise ValueError("a tensor is the same as something that is none, or there are too many")
    empty = torch.empty(0, dtype=known.dtype, device=known.device)
    return empty.set_(known.untyped_storage(), known.storage_offset(), known.shape, known.stride()), at + 5


def _permuted(_: Reader, items: list[object]) -> Tensor:
    tensor, *order = items
    if not isinstance(tensor, Tensor) or len(order) != tensor.dim() or {*order} != {*range(tensor.dim())}:
        raise ValueError("what lies in another order is no tensor, or the order is none")
    return tensor.permute([order.index(dim) for dim in range(tensor.dim())])


def _read_leaf_array(reader: Reader, at: int) -> tuple[np.ndarray, int]:
    spec, leaves = reader.next_spec()
    length, dimensions, _unused = ARRAY.unpack_from(reader.data, at + 1)
    start = at + 1 + ARRAY.size
    dtype = numpy_dtype(reader.data[start : start + length].decode("ascii"))
    shape, at = _read_shape(reader.data, start + length, dimensions)
    if math.prod(shape) * dtype.itemsize != spec.nbytes:
        raise ValueError("an array is not as large as its memory")
    return np.ndarray(shape, dtype, leaves.memory(spec.nbytes)), at


def _read_scalar(reader: Reader, at: int) -> tuple[object, int]:
    start = at + 2
    end = start + reader.data[at + 1]
    dtype = numpy_dtype(reader.data[start:end].decode("ascii"))
    return np.frombuffer(reader.data, dtype, 1, end)[0], end + dtype.itemsize


def _read_size(reader: Reader, at: int) -> tuple[torch.Size, int]:
    dimensions = reader.data[at + 1]
    sizes = struct.unpack_from(f"<{dimensions}q", reader.data, at + 2)
    return torch.Size(sizes), at + 2 + 8 * dimensions


def _text(data: bytes) -> str:
    return data.decode() if data.isascii() else data.decode("utf-8", "surrogatepass")


def _taken(convert: Callable[[bytes], object]) -> Callable[[Reader, int], _Reading]:
    """Return a reader of a value that is made of bytes after their length."""

    def read(reader: Reader, at: int) -> _Reading:
        data, at = reader.take(at)
        return convert(data), at

    return read


def _pairs(reader: Reader, items: list[object]) -> dict[object, object]:
    """Make a dict of keys and values, which alternate."""
    keys = items[::2]
    others = [key for key in keys if type(key) is not str]
    for key in others:
        if not is_key(key, reader.schema.keys):
            raise ValueError(f"a key is a {name_of(key)}")
    if len(others) > EQUAL_HASHES_MAX < len(others) - len(set(map(hash, others))):
        raise ValueError("its keys were chosen to have equal hashes")
    found = dict(zip(keys, items[1::2], strict=True))
    if len(found) != len(keys):
        raise ValueError("a key occurs twice")
    return found


def _ordered_dict(reader: Reader, items: list[object]) -> OrderedDict[object, object]:
    """Make an OrderedDict: after the pairs come the versions of a `Module.state_dict()`."""
    versions = items.pop()
    found = OrderedDict(_pairs(reader, items))
    if versions is not None:
        vars(found)["_metadata"] = versions
    return found


def _shard(_: Reader, items: list[object]) -> Shard:
    if len(items) != 6:
        raise ValueError("a shard has other parts")
    local, mesh, shape, mesh_shape, names, placements = items
    if not isinstance(local, Tensor | TensorInstance) or type(mesh) is not int:
        raise ValueError("a shard is no tensor, or its mesh no number")
    layout = Layout(_sizes(shape), _sizes(mesh_shape), _texts(names), _texts(placements))
    return Shard(local, layout, mesh)


def _instance(reader: Reader, items: list[object]) -> object:
    name, *parts = items
    if type(name) is not str:
        raise ValueError("a class has no name")
    return together(name, tuple(parts), leaves_tensors=not reader.puts_together)


def _sizes(value: object) -> tuple[int, ...]:
    return _short_tuple(value, lambda size: type(size) is int and 0 <= size < 2**63)


def _texts(value: object) -> tuple[str, ...]:
    return _short_tuple(value, lambda text: type(text) is str)


def _short_tuple(value: object, fits: Callable[[Any], bool]) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or len(value) > DIMENSIONS_MAX or not all(map(fits, value)):
        raise ValueError("a shape, names or placements are no tuple, too long, or of something else")
    return value


_CONSTANTS = (None, True, False)

# By tag of a container: a function that makes it of its values, None for a list; how many values each of its
# count stands for, and how many come after these; and how many values more it counts for.
_CONTAINERS: Mapping[int, tuple[_Finish | None, int, int, int]] = {
    LIST: (None, 1, 0, 0),
    TUPLE: (lambda _, items: tuple(items), 1, 0, 0),
    DICT: (_pairs, 2, 0, 0),
    COUNTER: (lambda reader, items: Counter(_pairs(reader, items)), 2, 0, OTHER_CONTAINER),
    ORDERED_DICT: (_ordered_dict, 2, 1, OTHER_CONTAINER),
    SHARD: (_shard, 1, 0, OTHER_CONTAINER),
    INSTANCE: (_instance, 1, 0, OTHER_CONTAINER),
    PERMUTED: (_permuted, 1, 0, OTHER_CONTAINER),
}

# By tag of another value: a function that reads it at a position, and returns it and where it ends.
_READERS: Mapping[int, Callable[[Reader, int], _Reading]] = {
    LONG: _taken(lambda data: int.from_bytes(data, "little", signed=True)),
    DOUBLE: lambda reader, at: (_float(reader.data, at)[1], at + 9),
    STR: _taken(_text),
    BYTES: lambda reader, at: reader.take(at),
    LEAF_STR: lambda reader, at: (reader.next_data().decode("utf-8", "surrogatepass"), at + 1),
    LEAF_BYTES: lambda reader, at: (reader.next_data(), at + 1),
    LEAF_TENSOR: _read_leaf_tensor,
    LEAF_ARRAY: _read_leaf_array,
    SAME_TENSOR: _read_same_tensor,
    COMPLEX: lambda reader, at: (complex(*TWO_FLOATS.unpack_from(reader.data, at)[1:]), at + 17),
    SCALAR: _read_scalar,
    DTYPE: lambda reader, at: (DTYPES[reader.data[at + 1]], at + 2),
    DEVICE: _taken(lambda data: torch.device(data.decode("ascii"))),
    SIZE: _read_size,
}

# --------------------------------------------------------------------------------------------- schemas


SIMPLE: Mapping[type, Writer] = {
    type(None): lambda _, sheet, __: sheet.put(TAGS[NONE]),
    bool: lambda value, sheet, _: sheet.put(TAGS[TRUE if value else FALSE]),
    int: write_int,
    float: lambda value, sheet, _: sheet.put(FLOAT.pack(DOUBLE, value)),
    str: write_str,
    bytes: write_bytes,
    list: write_items,
    tuple: write_items,
    dict: write_dict,
}
_WITH_LEAVES: Mapping[type, Writer] = {
    **SIMPLE,
    Tensor: write_tensor,
    torch.nn.Parameter: write_tensor,
    np.ndarray: write_array,
}

# The calls that Baby groups send to their subprocess: everything is in the structure.
CALLS = Schema(
    writers=SIMPLE,
    other=refuse,
    keys=PLAIN_KEYS,
    tags_end=LEAF_STR,
    allowed="None, bool, int, float, str, bytes, list, tuple, dict",
    inline_bytes_max=STRUCTURE_BYTES_MAX,
)

# The messages of coordinators, gangs and message queues.
MESSAGES = Schema(
    writers=_WITH_LEAVES,
    other=refuse,
    keys=PLAIN_KEYS | {bytes, tuple},
    tags_end=SAME_TENSOR,
    allowed=ALLOWED,
    keeps_devices=True,
)

# The state of a training script; `checkpointing` adds DTensors, which are written as shards.
STATES = Schema(
    writers={
        **_WITH_LEAVES,
        complex: lambda value, sheet, _: sheet.put(TWO_FLOATS.pack(COMPLEX, value.real, value.imag)),
        OrderedDict: write_ordered_dict,
        Counter: lambda value, sheet, depth: write_dict(value, sheet, depth, COUNTER),
        torch.Size: write_size,
        torch.dtype: write_dtype,
        torch.device: lambda value, sheet, _: sheet.put_data(DEVICE, str(value).encode()),
        Shard: write_shard,
    },
    other=write_other_state,
    keys=PLAIN_KEYS | {tuple},
    tags_end=TAGS_END,
    allowed=(
        "None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, Counter, torch.Size, "
        "torch.dtype, torch.device, plain dense tensors, DTensors, numpy arrays and scalars of numbers, and "
        "values of classes that were given to torch.serialization.add_safe_globals"
    ),
    root="the state",
    limits=Limits(values=4_000_000, leaves=1_000_000, leaf_bytes=2**62),
    joins_views=True,
)
