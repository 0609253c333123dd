"""Small functions that scripts use with a gang."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from torchft_like.errors import GangError, OperationalError
from torchft_like.gang.arguments import check_source
from torchft_like.gang.base import Gang, ReduceOperation

_HALF = 2**32
_INT64 = range(-(2**63), 2**63)


def broadcast_flag(gang: Gang, flag: bool, source_rank: int = 0) -> bool:
    """Return, on every member, the `flag` that `source_rank` has passed.

    Raises:
        ValueError: `source_rank` is not within `[0, gang.size)`.
        GangError: the members could not communicate.
    """
    check_source(source_rank, gang.size)
    tensor = torch.tensor([bool(flag)], dtype=torch.uint8, device=gang.device)
    gang.broadcast(tensor, source_rank)
    return bool(tensor.item())


def raise_operational_gang_error(cause: GangError) -> NoReturn:
    """Raise an error for a gang that has failed where a job has no way to go on.

    Raises:
        OperationalError: from `cause`.
    """
    raise OperationalError(f"the members of a gang could not communicate: {cause}") from cause


def all_sum(gang: Gang, value: float | int | Tensor | np.generic | np.ndarray) -> Tensor:
    """Return the sum of all members' values, a tensor without dimensions on the gang's device.

    The sum is int64 and exact if all values are integers. Otherwise it is added up in float64, and has the
    dtype of the caller's tensor, if that is a floating point one, or torch's default dtype. Some members may
    pass an int and some a float.

    Args:
        value: a number of Python or numpy, or a tensor or array with one element.

    Raises:
        TypeError: `value` is no real number.
        ValueError: an integer, or the sum of them, does not fit into 64 bits.
        GangError: the members could not communicate.
    """
    dtype = value.dtype if isinstance(value, Tensor) and value.is_floating_point() else None
    what = type(value).__name__
    if isinstance(value, Tensor | np.generic | np.ndarray):
        count = value.numel() if isinstance(value, Tensor) else value.size
        value = value.item() if count == 1 else value
        what = f"{'tensor' if isinstance(value, Tensor) else 'array'}s of {count} elements"
    if isinstance(value, np.floating):  # a longdouble remains one
        value = float(value)
    is_whole = isinstance(value, int)
    if not isinstance(value, int | float):
        raise TypeError(f"all_sum adds up numbers, not {what}: use all_reduce for more than one")
    if is_whole and value not in _INT64:
        raise ValueError(f"{value} does not fit into 64 bits")
    # The halves of an integer add up exactly in float64, in any order of the members.
    high, low = divmod(int(value), _HALF) if is_whole else (0, 0)
    numbers = [0.0 if is_whole else 1.0, high, low, 0.0 if is_whole else value]
    parts = torch.tensor(numbers, dtype=torch.float64, device=gang.device)
    gang.all_reduce(parts, ReduceOperation.SUM)
    floats, high, low, fraction = parts.tolist()
    whole = int(high) * _HALF + int(low)
    if floats:
        return torch.tensor(whole + fraction, dtype=dtype, device=gang.device)
    if whole not in _INT64:
        raise ValueError(f"the sum {whole} does not fit into 64 bits")
    return torch.tensor(whole, dtype=torch.int64, device=gang.device)
