"""The reader: it makes a value from a structure and leaves."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchft_like.dtypes import DTYPES, numpy_dtype
from torchft_like.errors import FaultToleranceError, PlainDataError
from torchft_like.plain_data import schema as wire
from torchft_like.plain_data.schema import (
    DEPTH_MAX,
    DICT,
    FALSE,
    FLOAT,
    INT,
    INT64,
    LENGTH,
    LIST,
    SHORT_BYTES,
    SHORT_STR,
    SMALL_INT,
    Buffer,
    Layout,
    Limits,
    Schema,
    Shard,
    TensorSpec,
    extent,
    is_key,
    name_of,
)


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
    if len(data) < wire.HEAD.size:
        raise ValueError(f"it ends after {len(data)} bytes")
    magic, count = wire.HEAD.unpack_from(data)
    if magic != wire.MAGIC:
        raise ValueError("it does not begin like it, or is of another version")
    if count > min(limits.leaves, len(data) // wire.SPEC.size):
        raise ValueError(f"{count} tensors in {len(data)} bytes, of which at most {limits.leaves} are taken")
    at, specs, nbytes = wire.HEAD.size, [], 0
    for _ in range(count):
        dtype, device, dimensions = wire.SPEC.unpack_from(data, at)
        shape, at = _read_shape(data, at + wire.SPEC.size, dimensions)
        spec = TensorSpec(DTYPES[dtype], shape, wire.DEVICES[device])
        nbytes += spec.nbytes
        specs.append(spec)
    if nbytes > limits.leaf_bytes:
        raise ValueError(f"it speaks of {nbytes} bytes of tensors")
    return specs, at


def _read_shape(data: bytes, at: int, dimensions: int) -> tuple[tuple[int, ...], int]:
    if dimensions > wire.DIMENSIONS_MAX:
        raise ValueError(f"a shape has {dimensions} dimensions")
    shape = struct.unpack_from(f"<{dimensions}Q", data, at)
    if (math.prod(shape) or extent(shape)) > wire.LEAF_BYTES_MAX:
        raise ValueError(f"a tensor has the shape {shape}")
    return shape, at + 8 * dimensions


class Reader:
    """A reader of values, which counts the leaves that it has given away."""

    specs: Sequence[TensorSpec] = ()
    leaves: LeafSource | None = None
    copies_left = 0

    def __init__(self, data: bytes, schema: Schema, limits: Limits) -> None:
        self.data = data
        self.schema = schema
        self.values_left = limits.values
        # For each leaf that was given away: the tensor, or None if it was none.
        self.given: list[Tensor | None] = []

    def values(self, at: int, count: int, depth: int = 0) -> tuple[list[object], int]:
        """Read `count` values from `at` on; return them, and where they end.

        One loop reads nested lists, tuples and dicts: a call for each takes longer than all the rest.
        """
        data, size, tags_end, values_left = self.data, len(self.data), self.schema.tags_end, self.values_left
        outer: list[tuple[int, list[object], int]] = []
        container, items, left = LIST, list[object](), count
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
                elif LIST <= tag <= DICT:
                    count = _length(data, at)[1]
                    at += 5
                    values_left -= count
                    outer.append((container, items, left))
                    container, items, left = tag, [], count + count if tag == DICT else count
                    if left > size - at or values_left < 0 or depth + len(outer) > DEPTH_MAX:
                        raise ValueError(_too_much(left > size - at, values_left < 0))
                elif tag < tags_end:
                    self.values_left = values_left
                    value, at = _READERS[tag](self, at, depth + len(outer))
                    items.append(value)
                    values_left = self.values_left
                else:
                    raise ValueError(f"tag {tag} does not belong there")
            if not outer:
                self.values_left = values_left
                return items, at
            finished = items if container == LIST else _FINISH[container](self, items)
            container, items, left = outer.pop()
            items.append(finished)

    def inner_values(self, at: int, depth: int, each: int = 1, more: int = 0) -> tuple[list[object], int]:
        """Read the values of a container that begins at `at`; return them, and where they end."""
        count = _length(self.data, at)[1]
        self.values_left -= count + 8  # such containers take several times the memory of others
        found = each * count + more
        if found > len(self.data) - at - 5 or self.values_left < 0 or depth >= DEPTH_MAX:
            raise ValueError(_too_much(found > len(self.data) - at - 5, self.values_left < 0))
        return self.values(at + 5, found, depth + 1)

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
        """Return the next leaf, which is bytes."""
        spec, leaves = self.next_spec()
        return leaves.data(spec.nbytes)


class Structure(Reader):
    """A structure that `write` has made: its leaves are known at once, and its value can be read once.

    Args:
        data: the bytes, which need not be trusted.
        schema: the types that may be in them.
        limits: the limits of the reader; by default those of the schema.

    Raises:
        PlainDataError: the bytes are no structure, or it goes beyond the limits.
    """

    def __init__(self, data: bytes, schema: Schema, limits: Limits | None = None) -> None:
        super().__init__(data, schema, limits := limits or schema.limits)
        self._start = wire.HEAD.size
        if not data.startswith(wire.NO_LEAVES):
            try:
                self.specs, self._start = _read_specs(data, limits)
            except FOREIGN as error:
                raise foreign(error) from error
            self.copies_left = limits.leaves - len(self.specs)

    def value(self, leaves: LeafSource) -> object:
        """Read the value.

        Raises:
            PlainDataError: the bytes are no value.
            FaultToleranceError: the source of the leaves raised it.
        """
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


def _read_leaf_tensor(reader: Reader, at: int, _: int) -> tuple[Tensor, int]:
    spec, leaves = reader.next_spec()
    tensor = leaves.tensor(spec)
    reader.given[-1] = tensor
    return tensor, at + 1


def _read_same_tensor(reader: Reader, at: int, _: int) -> tuple[Tensor, int]:
    """Make another tensor on the memory of one that has been read."""
    _, index = LENGTH.unpack_from(reader.data, at)
    known = reader.given[index]
    reader.copies_left -= 1
    if known is None or reader.copies_left < 0:
        raise ValueError("a tensor is the same as something that is none, or there are too many")
    empty = torch.empty(0, dtype=known.dtype, device=known.device)
    return empty.set_(known.untyped_storage(), known.storage_offset(), known.shape, known.stride()), at + 5


def _read_leaf_array(reader: Reader, at: int, _: int) -> tuple[np.ndarray, int]:
    spec, leaves = reader.next_spec()
    length, dimensions, _unused = wire.ARRAY.unpack_from(reader.data, at + 1)
    start = at + 1 + wire.ARRAY.size
    dtype = numpy_dtype(reader.data[start : start + length].decode("ascii"))
    shape, at = _read_shape(reader.data, start + length, dimensions)
    if math.prod(shape) * dtype.itemsize != spec.nbytes:
        raise ValueError("an array is not as large as its memory")
    return np.ndarray(shape, dtype, leaves.memory(spec.nbytes)), at


def _read_scalar(reader: Reader, at: int, _: int) -> tuple[object, int]:
    start = at + 2
    end = start + reader.data[at + 1]
    dtype = numpy_dtype(reader.data[start:end].decode("ascii"))
    return np.frombuffer(reader.data, dtype, 1, end)[0], end + dtype.itemsize


def _read_size(reader: Reader, at: int, _: int) -> tuple[torch.Size, int]:
    dimensions = reader.data[at + 1]
    sizes = struct.unpack_from(f"<{dimensions}Q", reader.data, at + 2)
    return torch.Size(_sizes(sizes)), at + 2 + 8 * dimensions


def _read_long(reader: Reader, at: int, _: int) -> tuple[int, int]:
    data, at = reader.take(at)
    return int.from_bytes(data, "little", signed=True), at


def _text(data: bytes) -> str:
    return data.decode() if data.isascii() else data.decode("utf-8", "surrogatepass")


def _read_str(reader: Reader, at: int, _: int) -> tuple[str, int]:
    data, at = reader.take(at)
    return _text(data), at


def _read_device(reader: Reader, at: int, _: int) -> tuple[torch.device, int]:
    data, at = reader.take(at)
    return torch.device(data.decode("ascii")), at


def _pairs(reader: Reader, items: list[object]) -> dict[object, object]:
    """Make a dict of keys and values, which alternate."""
    keys = items[::2]
    for key in keys:
        if type(key) is not str:
            _check_keys([key for key in keys if type(key) is not str], reader.schema.keys)
            break
    found = dict(zip(keys, items[1::2], strict=True))
    if len(found) != len(keys):
        raise ValueError("a key occurs twice")
    return found


def _check_keys(keys: list[object], types: frozenset[type]) -> None:
    for key in keys:
        if not is_key(key, types):
            raise ValueError(f"a key is a {name_of(key)}")
    if len(keys) > wire.EQUAL_HASHES_MAX < len(keys) - len(set(map(hash, keys))):
        raise ValueError("its keys were chosen to have equal hashes")


def _read_counter(reader: Reader, at: int, depth: int) -> tuple[object, int]:
    items, at = reader.inner_values(at, depth, 2)
    return Counter(_pairs(reader, items)), at


def _read_ordered_dict(reader: Reader, at: int, depth: int) -> tuple[object, int]:
    """Read an OrderedDict: after the pairs come the versions of a `Module.state_dict()`."""
    items, at = reader.inner_values(at, depth, 2, 1)
    versions = items.pop()
    found = OrderedDict(_pairs(reader, items))
    if versions is not None:
        vars(found)["_metadata"] = versions
    return found, at


def _read_shard(reader: Reader, at: int, depth: int) -> tuple[Shard, int]:
    items, at = reader.inner_values(at, depth)
    if len(items) != 6:
        raise ValueError("a shard has other parts")
    local, mesh, shape, mesh_shape, names, placements = items
    if not isinstance(local, Tensor) or type(mesh) is not int:
        raise ValueError("a shard is no tensor, or its mesh no number")
    layout = Layout(_sizes(shape), _sizes(mesh_shape), _texts(names), _texts(placements))
    return Shard(local, layout, mesh), at


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > wire.DIMENSIONS_MAX:
        raise ValueError("a shape is no tuple, or too long")
    if not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError("a dimension is not a size")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, tuple) or len(value) > wire.DIMENSIONS_MAX:
        raise ValueError("names or placements are no tuple, or too many")
    if not all(type(text) is str for text in value):
        raise ValueError("a name or a placement is no text")
    return value


_Reading: TypeAlias = "tuple[object, int]"
_CONSTANTS = (None, True, False)

# By tag: a function that makes a container of its items.
_FINISH: Mapping[int, Callable[[Reader, list[object]], object]] = {
    wire.TUPLE: lambda _, items: tuple(items),
    DICT: _pairs,
}

# By tag: a function that reads a value at a position and a depth, and returns it and where it ends.
_READERS: Mapping[int, Callable[[Reader, int, int], _Reading]] = {
    wire.LONG: _read_long,
    wire.DOUBLE: lambda reader, at, _: (_float(reader.data, at)[1], at + 9),
    wire.STR: _read_str,
    wire.BYTES: lambda reader, at, _: reader.take(at),
    wire.LEAF_STR: lambda reader, at, _: (reader.next_data().decode("utf-8", "surrogatepass"), at + 1),
    wire.LEAF_BYTES: lambda reader, at, _: (reader.next_data(), at + 1),
    wire.LEAF_TENSOR: _read_leaf_tensor,
    wire.LEAF_ARRAY: _read_leaf_array,
    wire.SAME_TENSOR: _read_same_tensor,
    wire.COMPLEX: lambda reader, at, _: (complex(*wire.TWO_FLOATS.unpack_from(reader.data, at)[1:]), at + 17),
    wire.SCALAR: _read_scalar,
    wire.DTYPE: lambda reader, at, _: (DTYPES[reader.data[at + 1]], at + 2),
    wire.DEVICE: _read_device,
    wire.SIZE: _read_size,
    wire.COUNTER: _read_counter,
    wire.ORDERED_DICT: _read_ordered_dict,
    wire.SHARD: _read_shard,
}
