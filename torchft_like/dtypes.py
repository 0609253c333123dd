"""The dtypes of numbers that are sent between processes: torch's by their index here, numpy's by their own
codes.

All modules that encode tensors or arrays share them.
"""

from __future__ import annotations

import re

import numpy as np
import torch

# The order is part of the wire format: new dtypes go to the end.
# fmt: off
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool,
    torch.complex128, torch.complex64, torch.complex32,
)
# fmt: on

# The dtypes that every backend can reduce.
REDUCIBLE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)

_NUMPY_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")


def is_numpy_number(code: str) -> bool:
    """Return whether the code (`<f4`) is that of a number, not of an object, string, date or record."""
    return _NUMPY_DTYPE.fullmatch(code) is not None


def numpy_dtype(code: str) -> np.dtype:
    """Return the dtype of a code."""
    if not is_numpy_number(code):
        raise ValueError(f"numpy dtype {code!r:.80} is not of a number")
    try:
        return np.dtype(code)
    except TypeError as error:
        raise ValueError(f"numpy dtype {code!r} is unknown") from error


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's elements in one dimension, on its memory, with a stride of 1.

    A single element, or none, may have any stride, which torch refuses where it views the memory in another
    dtype.
    """
    elements = tensor.reshape(-1)
    return elements.as_strided(elements.shape, (1,)) if elements.numel() < 2 else elements


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory: backends move bytes of any dtype, but numbers of few."""
    return flat(tensor).view(torch.uint8)
