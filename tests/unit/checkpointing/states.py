"""Every dtype, states as one stream of bytes, and a comparison of states, for the tests of checkpoints."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import torch

from torchft_like.checkpointing.state_stream import EncodedState, IncomingState, read_header

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.bool, torch.complex64, torch.complex128, torch.complex32),
]


def dump_state(state: object) -> bytes:
    return b"".join(EncodedState(state).part())


def load_state(data: bytes) -> object:
    source = io.BytesIO(data)
    incoming = IncomingState(read_header(source))
    incoming.check_length(len(data) - incoming.header_nbytes)
    incoming.read_part(source)
    return incoming.state()


def round_trip(state: object) -> Any:
    return load_state(dump_state(state))


def same(left: Any, right: Any) -> bool:
    """Return whether two states are equal in type, value and, for floats, bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, np.ndarray | np.generic):
        return bool(
            left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same([left.real, left.imag], [right.real, right.imag])
    return bool(left == right)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
