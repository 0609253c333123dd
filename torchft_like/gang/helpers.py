"""Small things that scripts do with a gang."""

from __future__ import annotations

import torch
from torch import Tensor

from torchft_like.gang.arguments import check_source
from torchft_like.gang.base import Gang, ReduceOperation

_HALF = 2**32
_INT64 = range(-(2**63), 2**63)


def broadcast_flag(gang: Gang, flag: bool, source_rank: int = 0) -> bool:
    """What `source_rank` has passed as `flag`, on every member.

    Raises:
        ValueError: `source_rank` is not within `[0, gang.size)`.
        GangError: the members could not communicate.
    """
    check_source(source_rank, gang.size)
    tensor = torch.tensor([bool(flag)], dtype=torch.uint8, device=gang.device)
    gang.broadcast(tensor, source_rank)
    return bool(tensor.item())


def all_sum(gang: Gang, value: float | int) -> Tensor:
    """The sum of all members' values, a tensor without dimensions on the gang's device.

    int64 and exact if all values are integers; else of torch's default dtype, added up in float64. Some
    members may pass an int and some a float.

    Raises:
        TypeError: `value` is no number.
        ValueError: an integer, or the sum of them, does not fit into 64 bits.
        GangError: the members could not communicate.
    """
    is_whole = isinstance(value, int)
    if not is_whole and not isinstance(value, float):
        raise TypeError(f"all_sum adds up numbers, not {type(value).__name__}")
    if is_whole and value not in _INT64:
        raise ValueError(f"{value} does not fit into 64 bits")
    # Halves of an integer add up exactly in float64, whatever the members' order.
    high, low = divmod(int(value), _HALF) if is_whole else (0, 0)
    numbers = [0.0 if is_whole else 1.0, high, low, 0.0 if is_whole else value]
    parts = torch.tensor(numbers, dtype=torch.float64, device=gang.device)
    gang.all_reduce(parts, ReduceOperation.SUM)
    floats, high, low, fraction = parts.tolist()
    whole = int(high) * _HALF + int(low)
    if floats:
        return torch.tensor(whole + fraction, device=gang.device)
    if whole not in _INT64:
        raise ValueError(f"the sum {whole} does not fit into 64 bits")
    return torch.tensor(whole, dtype=torch.int64, device=gang.device)
