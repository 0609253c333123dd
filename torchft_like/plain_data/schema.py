"""Schemas: the types that are sent, their limits, and the format. Both ends must agree on every line."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchft_like.dtypes import DTYPES
from torchft_like.errors import PlainDataError

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
EQUAL_HASHES_MAX = 64  # keys of a dict with equal hashes: more are no accident, and make it slow

Leaf: TypeAlias = "Tensor | np.ndarray | bytes"
Buffer: TypeAlias = "bytes | bytearray | memoryview"


@dataclass(frozen=True)
class Limits:
    """The limits of a sender or a receiver.

    Attributes:
        structure_bytes: bytes of the structure.
        values: values in containers, all together; a pair of a dict counts once.
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
        joins_views: whether equal views of one memory are one memory again.
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


class Message(NamedTuple):
    """A value, taken apart. The tensors are contiguous, and the value's own if those were contiguous."""

    structure: bytes
    tensors: tuple[Tensor, ...]


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
    """A rank's part of a DTensor, on its way between replica groups.

    Attributes:
        mesh: the number of its mesh among those of the sender's state.
    """

    local: Tensor
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
    SAME_TENSOR, COMPLEX, SCALAR, DTYPE, DEVICE, SIZE, COUNTER, ORDERED_DICT, SHARD, TAGS_END,
) = range(28)  # fmt: skip

TAGS = [bytes([tag]) for tag in range(TAGS_END)]
# Encodings of small numbers, and of the heads of short texts, bytes and lists, are made once.
SMALL_INTS = [SHORT.pack(SMALL_INT, value) for value in range(256)]
SHORT_STRS = [SHORT.pack(SHORT_STR, length) for length in range(256)]
SHORT_LISTS = [LENGTH.pack(LIST, length) for length in range(256)]
SHORT_BYTE_STRINGS = [SHORT.pack(SHORT_BYTES, length) for length in range(256)]
PLAIN_KEYS: frozenset[type] = frozenset({type(None), bool, int, float, str})


def is_key(key: object, types: frozenset[type], levels: int = DEPTH_MAX) -> bool:
    """Return whether a key of a dict may be sent; tuples may be nested up to `levels` deep, if tuples may be
    keys.
    """
    if type(key) is tuple and tuple in types:
        return levels > 0 and len(key) <= DIMENSIONS_MAX and all(is_key(k, types, levels - 1) for k in key)
    return type(key) in types


def extent(shape: Sequence[int]) -> int:
    """Return the number of elements, with a size of zero counted as one: what a shape may claim without any
    bytes.
    """
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


def frombuffer(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor on this memory."""
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).view(shape)


def bytes_of(leaf: Leaf) -> Buffer:
    """Return the memory of a leaf, without a copy; a tensor of another device is copied to the CPU."""
    if isinstance(leaf, bytes):
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf.reshape(-1).view(np.uint8).data
    if not leaf.numel():
        return b""
    return leaf.cpu().reshape(-1).view(torch.uint8).numpy().data


def settled(tensor: Tensor) -> Tensor:
    """Return the tensor with its elements in contiguous order, conjugated and negated if that was pending."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def nbytes_of(leaf: Leaf) -> int:
    """Return the bytes of a leaf's elements."""
    return len(leaf) if isinstance(leaf, bytes) else leaf.nbytes
