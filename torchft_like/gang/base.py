"""The interface of a gang: a set of processes that call the same functions in the same order.

Every function is synchronous: it returns when the caller's tensors hold the result, on a CUDA device
when the current stream will see it. The interface says nothing of how processes reach each other. The
functions below it work with every gang.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchft_like.errors import GangError, OperationalError
from torchft_like.gang.arguments import ReduceOperation, check_dense, check_gather_list

_HALF = 2**32
_INT64 = range(-(2**63), 2**63)


class Gang(ABC):
    """A set of processes that work collectively.

    Ranks, in arguments and in `rank`, are those of this gang. Wrong arguments are a ValueError before
    anything is sent; a failure during communication is a GangError, whose cause says why.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """The caller's place, `0 <= rank < size`.

        Raises:
            GangError: the gang has no members now.
        """

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of processes.

        Raises:
            GangError: the gang has no members now.
        """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the tensors that the gang makes itself."""

    @abstractmethod
    def close(self) -> None:
        """Release what the gang has made for itself. Safe to call again."""

    @abstractmethod
    def create_gang(self, ranks: Sequence[int]) -> Gang | None:
        """Make the gang of some of the processes; return None where the caller is not one of them.

        Every member of this gang calls it, with the same ranks.

        Args:
            ranks: unique, within `[0, size)`; their order is the order of ranks in the new gang.

        Raises:
            ValueError: `ranks` is empty, has duplicates or is out of range, or differs between callers.
            GangError: the members could not meet.
        """

    def split(self, partition: Sequence[Sequence[int]]) -> Gang | None:
        """Make several gangs at once; return the one that has the caller in it, None if none has.

        Every member of this gang calls it, with the same partition.

        Raises:
            ValueError: as for `create_gang`, or a rank is in two of them.
            GangError: the members could not meet.
        """
        found: Gang | None = None
        for ranks in partition:
            found = self.create_gang(ranks) or found
        return found

    def of_all(self) -> Gang:
        """Return a gang in which every member counts: this gang, unless it does without some."""
        return self

    @abstractmethod
    def as_process_group(self) -> dist.ProcessGroup:
        """Return the process group, for functions of torch that take one.

        Raises:
            NotSupportedError: a simulated gang has none.
        """

    @property
    def supports_process_group(self) -> bool:
        """Whether `as_process_group` returns a group."""
        return True

    @abstractmethod
    def barrier(self) -> None:
        """Return when every member has called it.

        Raises:
            GangError: the members could not communicate.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOperation) -> None:
        """Replace `tensor`, of the same shape and dtype on all members, by the reduction of all of them.

        Raises:
            ValueError: the operation is not defined for the dtype (a MEAN of integers).
            GangError: the members could not communicate; `tensor` is undefined.
        """

    @abstractmethod
    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        """Fill `output_tensor` with the input tensors of all members, in the order of their ranks.

        Args:
            output_tensor: contiguous, `[size, *input_tensor.shape]` or, for inputs of one or more
                dimensions, `[size * input_tensor.shape[0], *input_tensor.shape[1:]]`.
            input_tensor: of the same shape and dtype on all members.

        Raises:
            ValueError: the output has another shape, dtype or device, or is not contiguous.
            GangError: the members could not communicate; the output is undefined.
        """

    @torch.no_grad()
    def all_gather_to_list(self, output_tensors: list[Tensor], input_tensor: Tensor) -> None:
        """Fill one tensor of the input's shape for each member, as `all_gather` does.

        Raises:
            ValueError: the list has not `size` tensors, or one has another shape, dtype or device.
            GangError: the members could not communicate; the outputs are undefined.
        """
        size = self.size
        check_gather_list(output_tensors, input_tensor, size)
        check_dense(input_tensor, writes=False)
        for output in output_tensors:
            check_dense(output, writes=True)
        gathered = input_tensor.new_empty((size, *input_tensor.shape))
        self.all_gather(gathered, input_tensor)
        for output, part in zip(output_tensors, gathered, strict=True):
            output.detach().copy_(part)

    @abstractmethod
    def broadcast(self, tensor: Tensor, source_rank: int = 0) -> None:
        """Replace `tensor`, of the same shape and dtype on all members, by that of `source_rank`.

        Raises:
            ValueError: `source_rank` is not within `[0, size)`.
            GangError: the members could not communicate; `tensor` is undefined.
        """

    @abstractmethod
    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        """Replace the items of `objects` by those of `source_rank`.

        Args:
            objects: of the same length on all members; plain data as in `torchft_like.plain_data`: None,
                bool, int, float, str, bytes, list, tuple, dict, tensors and numpy arrays.
            source_rank: the rank that sends.

        Raises:
            ValueError: `source_rank` is not within `[0, size)`; or, on every member, the lengths or the
                sources differ between members.
            PlainDataError: an object is of another type.
            GangError: the members could not communicate, or the source could not send.
        """


def with_index(device: torch.device) -> torch.device:
    """Return the device with its index: "cuda" alone means the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def broadcast_flag(gang: Gang, flag: bool, source_rank: int = 0) -> bool:
    """Return, on every member, the `flag` that `source_rank` has passed.

    Raises:
        ValueError: `source_rank` is not within `[0, gang.size)`.
        GangError: the members could not communicate.
    """
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
