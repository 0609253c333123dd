"""A value from a structure and leaves."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchft_like.dtypes import DTYPES, numpy_dtype
from torchft_like.errors import FaultToleranceError, PlainDataError
from torchft_like.plain_data.schema import (
    ARRAY,
    DEPTH_MAX,
    DEVICES,
    DIMENSIONS_MAX,
    FLOAT,
    HEAD,
    INT,
    LEAF_BYTES_MAX,
    LEAVES_MAX,
    LENGTH,
    LIST,
    MAGIC,
    NO_LEAVES,
    SPEC,
    Buffer,
    TensorSpec,
    extent,
    is_key,
    name_of,
)


class LeafSource(Protocol):
    """Where the leaves of a message come from, in their order; what it gives belongs to the value."""

    def tensor(self, spec: TensorSpec, /) -> Tensor:
        """The next leaf, which is a tensor."""

    def memory(self, nbytes: int, /) -> Buffer:
        """The next leaf, for an array: writable memory of this size."""

    def data(self, nbytes: int, /) -> bytes:
        """The next leaf, which is bytes."""


def tensor_specs(structure: bytes) -> list[TensorSpec]:
    """What tensors belong to a structure, in their order.

    Raises:
        PlainDataError: these are not the bytes of a structure.
    """
    try:
        return _read_specs(structure)[0]
    except _FOREIGN as error:
        raise _foreign(error) from error


def assemble(structure: bytes, tensors: Sequence[Tensor]) -> object:
    """The value that `disassemble` took apart, on the memory of `tensors`, on whatever device they are.

    Raises:
        PlainDataError: these are not the bytes of a structure, or the tensors are not those it speaks of.
    """
    try:
        specs, start = _read_specs(structure)
        _require_same(specs, tensors)
        return _read_value(structure, start, specs, _Tensors(tensors))
    except _FOREIGN as error:
        raise _foreign(error) from error


def assemble_from(structure: bytes, leaves: LeafSource) -> object:
    """The value that `dissect` took apart; its leaves are fetched while it is read, each once, in order.

    Raises:
        PlainDataError: these are not the bytes of a structure.
        FaultToleranceError: what the source of the leaves raised.
    """
    try:
        if structure.startswith(NO_LEAVES):
            return _read_value(structure, HEAD.size, (), leaves)
        specs, start = _read_specs(structure)
        return _read_value(structure, start, specs, leaves)
    except FaultToleranceError:
        raise
    except _FOREIGN as error:
        raise _foreign(error) from error


# What reading foreign bytes may raise: turned into a PlainDataError at the door.
_FOREIGN = (IndexError, struct.error, UnicodeDecodeError, ValueError, TypeError, OverflowError, RuntimeError)


def _foreign(error: Exception) -> PlainDataError:
    return PlainDataError(f"what came is no plain data ({error}): do both sides run the same version?")


def _read_specs(structure: bytes) -> tuple[list[TensorSpec], int]:
    """The specs, and where the value begins."""
    if len(structure) < HEAD.size:
        raise ValueError(f"it ends after {len(structure)} bytes")
    magic, count = HEAD.unpack_from(structure)
    if magic != MAGIC:
        raise ValueError("it does not begin like it")
    if count > min(LEAVES_MAX, len(structure) // SPEC.size):
        raise ValueError(f"{count} tensors in {len(structure)} bytes")
    at, specs, nbytes = HEAD.size, [], 0
    for _ in range(count):
        spec, at = _read_spec(structure, at)
        nbytes += spec.nbytes
        specs.append(spec)
    if nbytes > LEAF_BYTES_MAX:
        raise ValueError(f"it speaks of {nbytes} bytes of tensors")
    return specs, at


def _read_spec(structure: bytes, at: int) -> tuple[TensorSpec, int]:
    dtype, device, dimensions = SPEC.unpack_from(structure, at)
    shape, at = _read_shape(structure, at + SPEC.size, dimensions)
    return TensorSpec(DTYPES[dtype], shape, DEVICES[device]), at


def _read_shape(structure: bytes, at: int, dimensions: int) -> tuple[tuple[int, ...], int]:
    if dimensions > DIMENSIONS_MAX:
        raise ValueError(f"a shape has {dimensions} dimensions")
    shape = struct.unpack_from(f"<{dimensions}Q", structure, at)
    if extent(shape) > LEAF_BYTES_MAX:
        raise ValueError(f"a tensor has the shape {shape}")
    return shape, at + 8 * dimensions


def _require_same(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
    if len(specs) != len(tensors):
        raise ValueError(f"the structure speaks of {len(specs)} tensors, and {len(tensors)} came")
    for index, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
        if spec.dtype != tensor.dtype or spec.shape != tuple(tensor.shape):
            raise ValueError(
                f"the structure speaks of tensor {index} as {spec.dtype} {spec.shape}, and it came as "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )


class _Tensors:
    """Leaves that came as tensors, which the value takes over."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
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


class _Cursor:
    """How far the structure was read."""

    __slots__ = ("at", "data", "leaf", "leaves", "specs")

    def __init__(self, data: bytes, at: int, specs: Sequence[TensorSpec], leaves: LeafSource) -> None:
        self.data = data
        self.at = at
        self.specs = specs
        self.leaves = leaves
        self.leaf = 0

    def take(self) -> bytes:
        """As many bytes as the length at the cursor says."""
        start = self.at + 5
        end = start + LENGTH.unpack_from(self.data, self.at)[1]
        if end > len(self.data):
            raise ValueError("a length goes beyond the end")
        self.at = end
        return self.data[start:end]

    def count(self) -> int:
        """How many values follow; each takes a byte at least."""
        count = int(LENGTH.unpack_from(self.data, self.at)[1])
        self.at += 5
        if count > len(self.data) - self.at:
            raise ValueError("a count goes beyond the end")
        return count

    def next_leaf(self) -> TensorSpec:
        index = self.leaf
        if index == len(self.specs):
            raise ValueError("a tensor is missing")
        self.at += 1
        self.leaf = index + 1
        return self.specs[index]


def _read_value(structure: bytes, start: int, specs: Sequence[TensorSpec], leaves: LeafSource) -> object:
    cursor = _Cursor(structure, start, specs, leaves)
    value = _READERS[structure[start]](cursor, 0)
    if cursor.at != len(structure) or cursor.leaf != len(specs):
        raise ValueError("it goes on after its end")
    return value


def _read_none(cursor: _Cursor, _: int) -> None:
    cursor.at += 1


def _read_true(cursor: _Cursor, _: int) -> bool:
    cursor.at += 1
    return True


def _read_false(cursor: _Cursor, _: int) -> bool:
    cursor.at += 1
    return False


def _read_int(cursor: _Cursor, _: int) -> int:
    value: int = INT.unpack_from(cursor.data, cursor.at)[1]
    cursor.at += 9
    return value


def _read_float(cursor: _Cursor, _: int) -> float:
    value: float = FLOAT.unpack_from(cursor.data, cursor.at)[1]
    cursor.at += 9
    return value


def _read_bytes(cursor: _Cursor, _: int) -> bytes:
    return cursor.take()


def _read_items(cursor: _Cursor, depth: int) -> list[object] | tuple[object, ...]:
    if depth == DEPTH_MAX:
        raise ValueError(f"it is nested deeper than {DEPTH_MAX} levels")
    data, readers, depth = cursor.data, _READERS, depth + 1
    is_list = data[cursor.at] == LIST
    items: list[object] = []
    for _ in range(cursor.count()):
        items.append(readers[data[cursor.at]](cursor, depth))  # noqa: PERF401 - a comprehension is a call
    return items if is_list else tuple(items)


def _read_dict(cursor: _Cursor, depth: int) -> dict[object, object]:
    if depth == DEPTH_MAX:
        raise ValueError(f"it is nested deeper than {DEPTH_MAX} levels")
    data, readers, depth = cursor.data, _READERS, depth + 1
    found: dict[object, object] = {}
    count = cursor.count()
    for _ in range(count):
        key = readers[data[cursor.at]](cursor, depth)
        if type(key) is not str and not is_key(key):
            raise ValueError(f"a key is a {name_of(key)}")
        found[key] = readers[data[cursor.at]](cursor, depth)
    if len(found) != count:
        raise ValueError("a key occurs twice")
    return found


def _read_array(cursor: _Cursor, _: int) -> np.ndarray:
    nbytes = cursor.next_leaf().nbytes
    length, dimensions, _unused = ARRAY.unpack_from(cursor.data, cursor.at)
    start = cursor.at + ARRAY.size
    dtype = numpy_dtype(cursor.data[start : start + length].decode("ascii"))
    shape, cursor.at = _read_shape(cursor.data, start + length, dimensions)
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise ValueError("an array is not as large as its memory")
    return np.ndarray(shape, dtype, cursor.leaves.memory(nbytes))


# By tag.
_READERS: tuple[Callable[[_Cursor, int], object], ...] = (
    _read_none,
    _read_true,
    _read_false,
    _read_int,
    lambda cursor, _: int.from_bytes(cursor.take(), "little", signed=True),
    _read_float,
    lambda cursor, _: cursor.take().decode("utf-8", "surrogatepass"),
    _read_bytes,
    _read_items,
    _read_items,
    _read_dict,
    lambda cursor, _: cursor.leaves.data(cursor.next_leaf().nbytes).decode("utf-8", "surrogatepass"),
    lambda cursor, _: cursor.leaves.data(cursor.next_leaf().nbytes),
    lambda cursor, _: cursor.leaves.tensor(cursor.next_leaf()),
    _read_array,
)
