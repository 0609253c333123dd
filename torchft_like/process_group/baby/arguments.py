"""Arguments of a collective as plain data, and back.

Plain values stand for themselves and lists for lists; everything else becomes a tuple that begins
with its kind. Tensors are left to the caller: where their bytes are is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from torchft_like.errors import NotSupportedError

Plain = Any
EncodeTensor = Callable[[Tensor], tuple[Any, ...]]
DecodeTensor = Callable[[tuple[Any, ...]], Tensor]


class _Kind(IntEnum):
    TENSOR = 0
    TIMEDELTA = 1
    REDUCE_OP = 2
    OPTIONS = 3
    DEVICE = 4


_PLAIN = frozenset({type(None), bool, int, float, str})
_OPTIONS = tuple(
    getattr(c10d, name)
    for name in sorted(vars(c10d))
    if name.endswith("Options") and not name.startswith("_")
)
_FIELDS = [
    tuple(name for name, value in vars(cls).items() if isinstance(value, property)) for cls in _OPTIONS
]
_OPTIONS_INDEX = {cls: index for index, cls in enumerate(_OPTIONS)}


def encode(value: Any, tensor: EncodeTensor) -> Plain:
    """One argument as plain data.

    Raises:
        NotSupportedError: it is of a type that no collective takes.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return (_Kind.TENSOR.value, *tensor(value))
    if isinstance(value, list | tuple):
        return [encode(item, tensor) for item in value]
    if (index := _OPTIONS_INDEX.get(kind)) is not None:
        return (_Kind.OPTIONS.value, index, [encode(getattr(value, name), tensor) for name in _FIELDS[index]])
    return _encode_rare(value)


def decode(value: Plain, tensor: DecodeTensor) -> Any:
    """The argument that `encode` was given."""
    if type(value) is list:
        return [decode(item, tensor) for item in value]
    if type(value) is not tuple:
        return value
    kind, *parts = value
    if kind == _Kind.TENSOR:
        return tensor(value[1:])
    if kind == _Kind.OPTIONS:
        return _decode_options(parts[0], parts[1], tensor)
    return _DECODE_RARE[kind](*parts)


def _encode_rare(value: Any) -> Plain:
    if isinstance(value, timedelta):
        return (_Kind.TIMEDELTA.value, value // timedelta(microseconds=1))
    if isinstance(value, ReduceOp.RedOpType):
        return (_Kind.REDUCE_OP.value, int(value.value), None)
    if isinstance(value, ReduceOp):
        operation, factor = cast("tuple[ReduceOp.RedOpType, float | None]", value.__getstate__())
        return (_Kind.REDUCE_OP.value, int(operation.value), factor)
    if isinstance(value, torch.device):
        return (_Kind.DEVICE.value, str(value))
    raise NotSupportedError(
        f"an argument of type {type(value).__name__} cannot be handed to the subprocess of a Baby group"
    )


def _decode_options(index: int, fields: list[Plain], tensor: DecodeTensor) -> Any:
    options = _OPTIONS[index]()
    for name, field in zip(_FIELDS[index], fields, strict=True):
        if field is not None:
            setattr(options, name, decode(field, tensor))
    return options


def _decode_reduce_op(operation: int, factor: float | None) -> ReduceOp:
    if factor is not None:
        return c10d._make_nccl_premul_sum(factor)
    return ReduceOp(ReduceOp.RedOpType(operation))


_DECODE_RARE: dict[int, Callable[..., Any]] = {
    _Kind.TIMEDELTA: lambda microseconds: timedelta(microseconds=microseconds),
    _Kind.REDUCE_OP: _decode_reduce_op,
    _Kind.DEVICE: torch.device,
}
