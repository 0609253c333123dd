"""Arguments of a collective as plain data, and back.

Plain values stand for themselves and lists for lists; everything else becomes a tuple that begins
with its kind. Tensors are left to the caller: where their bytes are is not known here.

Options are nearly always those of the call before, and to read or to fill in torch's objects takes longer
than all the rest: what was encoded or decoded is kept and used again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from torchft_like.errors import NotSupportedError
from torchft_like.process_group.baby.channel import packed, unpacked

Plain = Any
EncodeTensor = Callable[[Tensor], tuple[Any, ...]]
DecodeTensor = Callable[[tuple[Any, ...]], Tensor]


class _Kind(IntEnum):
    TENSOR = 0
    TIMEDELTA = 1
    REDUCE_OP = 2
    OPTIONS = 3
    DEVICE = 4


OPTIONS_KEPT_MAX = 256

_TENSOR_KIND = _Kind.TENSOR.value
_OPTIONS_KIND = _Kind.OPTIONS.value
_PLAIN = frozenset({type(None), bool, int, float, str})
_OPTIONS = tuple(  # of collectives: torch has others, which no collective takes
    cls for name, cls in sorted(vars(c10d).items()) if name.endswith("Options") and hasattr(cls, "asyncOp")
)
_FIELDS = [
    tuple(name for name, value in vars(cls).items() if isinstance(value, property)) for cls in _OPTIONS
]
_READ_FIELDS = [operator.attrgetter(*names) for names in _FIELDS]
_OPTIONS_INDEX = {cls: index for index, cls in enumerate(_OPTIONS)}
_WITH_FACTOR = hash(ReduceOp.PREMUL_SUM)
_encoded_options: dict[tuple[Any, ...], Plain] = {}


def encode(value: Any, tensor: EncodeTensor) -> Plain:
    """One argument as plain data.

    Raises:
        NotSupportedError: it is of a type that no collective takes.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return [encode(item, tensor) for item in value]
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return (_TENSOR_KIND, *tensor(value))
    if (index := _OPTIONS_INDEX.get(kind)) is not None:
        return _encode_options(index, _READ_FIELDS[index](value))
    return _encode_rare(value, tensor)


def decode(value: Plain, tensor: DecodeTensor) -> Any:
    """The argument that `encode` was given."""
    if type(value) is list:
        return [decode(item, tensor) for item in value]
    if type(value) is not tuple:
        return value
    kind = value[0]
    if kind == _TENSOR_KIND:
        return tensor(value[1:])
    if kind == _OPTIONS_KIND:
        return _decode_options(value[1], value[2])
    return _DECODE_RARE[kind](*value[1:])


def _encode_options(index: int, fields: tuple[Any, ...]) -> Plain:
    key = (index, *[_stand_in(field) for field in fields])
    if (known := _encoded_options.get(key)) is None:
        plain = [encode(field, _no_tensor) for field in fields]
        known = (_OPTIONS_KIND, index, packed(plain))  # one piece, by which it is found again
        if len(_encoded_options) >= OPTIONS_KEPT_MAX:
            _encoded_options.clear()
        _encoded_options[key] = known
    return known


def _stand_in(field: Any) -> Any:
    """Something that can be hashed, and is equal for equal fields and for no others."""
    kind = type(field)
    if kind is ReduceOp:
        operation = hash(field)
        return operation if operation != _WITH_FACTOR else field.__getstate__()
    return tuple(field) if kind is list else field


def _encode_rare(value: Any, tensor: EncodeTensor) -> Plain:
    if isinstance(value, list | tuple):
        return [encode(item, tensor) for item in value]
    if isinstance(value, timedelta):
        return (_Kind.TIMEDELTA.value, value.days, value.seconds, value.microseconds)
    if type(value) is ReduceOp:  # of which torch says that its RedOpType were instances, too
        operation, factor = cast("tuple[ReduceOp.RedOpType, float | None]", value.__getstate__())
        return (_Kind.REDUCE_OP.value, operation.value, factor)
    if isinstance(value, ReduceOp.RedOpType):
        return (_Kind.REDUCE_OP.value, value.value, None)
    if isinstance(value, torch.device):
        return (_Kind.DEVICE.value, str(value))
    raise NotSupportedError(
        f"an argument of type {type(value).__name__} cannot be handed to the subprocess of a Baby group"
    )


@functools.lru_cache(OPTIONS_KEPT_MAX)
def _decode_options(index: int, fields: bytes) -> Any:
    options = _OPTIONS[index]()
    for name, field in zip(_FIELDS[index], unpacked(fields), strict=True):
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
