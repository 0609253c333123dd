"""What travels, how much of it, and how it is written down. Both ends must agree on every line."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchft_like.dtypes import DTYPES

ALLOWED = (
    "None, bool, int, float, str, bytes, list, tuple, dict, dense torch tensors, numpy arrays of numbers"
)
DEPTH_MAX = 64
DIMENSIONS_MAX = 64
VALUES_MAX = 1_000_000  # in lists, tuples and dicts together
STRUCTURE_BYTES_MAX = 64 * 1024 * 1024
INLINE_BYTES_MAX = 4096  # longer bytes and texts travel beside the structure
LEAVES_MAX = 65_536
LEAF_BYTES_MAX = 2**40  # all leaves together

Leaf: TypeAlias = "Tensor | np.ndarray | bytes"
Buffer: TypeAlias = "bytes | bytearray | memoryview"


class TensorSpec(NamedTuple):
    """What to allocate for one tensor of a message."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str

    @property
    def nbytes(self) -> int:
        """Of its elements, one after the other."""
        return math.prod(self.shape) * self.dtype.itemsize


class Message(NamedTuple):
    """A value, taken apart. The tensors are contiguous, and the value's own where they were before."""

    structure: bytes
    tensors: tuple[Tensor, ...]


# structure = magic, number of leaves, a spec for each leaf, one value
# spec      = dtype, device, number of dimensions, dimensions
# value     = tag, and what the tag's reader reads; leaves come in the order of their tags

MAGIC = 0x31445450  # "PTD1"
HEAD = struct.Struct("<II")
SPEC = struct.Struct("<BBB")
LENGTH = struct.Struct("<BI")
INT = struct.Struct("<Bq")
FLOAT = struct.Struct("<Bd")
ARRAY = struct.Struct("<BBB")
NO_LEAVES = HEAD.pack(MAGIC, 0)
DEVICES = ("cpu", "cuda")
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}

(
    NONE, TRUE, FALSE, INT64, LONG, DOUBLE, STR, BYTES, LIST, TUPLE, DICT,
    LEAF_STR, LEAF_BYTES, LEAF_TENSOR, LEAF_ARRAY,
) = range(15)  # fmt: skip

TAGS = [bytes([tag]) for tag in range(LEAF_ARRAY + 1)]


def is_key(key: object, levels: int = DEPTH_MAX) -> bool:
    """Whether the key of a dict travels; `levels` of tuples in it do."""
    if type(key) is tuple:
        return levels > 0 and len(key) <= DIMENSIONS_MAX and all(is_key(part, levels - 1) for part in key)
    return key is None or type(key) in (bool, int, float, str, bytes)


def extent(shape: Sequence[int]) -> int:
    """Elements, a size of zero counted as one: what a shape may claim without bringing any."""
    return math.prod(max(size, 1) for size in shape)


def name_of(value: object) -> str:
    """Of its type."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def frombuffer(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor on this memory."""
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).view(shape)
