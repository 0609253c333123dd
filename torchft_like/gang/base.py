"""The interface of a gang: a set of processes that call the same functions in the same order.

Every function is synchronous: it returns when the caller's tensors hold the result, on a CUDA device
when the current stream will see it. The interface says nothing of how processes reach each other. The
functions below it work with every gang. What checks arguments communicates with no other process.

Gloo moves the memory of a tensor that has gaps, gaps included, without an error; and it ends the group over a
dtype that it does not know. So the tensors that go to a backend from here have no gaps, and one of the dtypes
that all backends know.
"""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchft_like.communicator.tensors import addable
from torchft_like.dtypes import REDUCIBLE
from torchft_like.errors import GangError, NotSupportedError, OperationalError
from torchft_like.writing import is_dense, overlaps_itself

_HALF = 2**32
_INT64 = range(-(2**63), 2**63)
# By bytes: the bits are copied.
_CARRIERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class ReduceOperation(Enum):
    """The operation of `all_reduce`. For bools SUM and MAX mean "or", PRODUCT and MIN "and"."""

    SUM = 1
    MEAN = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5


class Gang(ABC):
    """A set of processes that work collectively.

    Ranks, in arguments and in `rank`, are those of this gang. Wrong arguments are a ValueError before
    anything is sent; a failure during communication is a GangError, whose cause says why.
    """

    supports_process_group = True  # whether `as_process_group` returns a group

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


# -- the arguments of a gang's functions, and tensors in the form in which a backend moves and reduces them


def check_source(source_rank: int, size: int) -> int:
    rank = operator.index(source_rank)
    if not 0 <= rank < size:
        raise ValueError(f"source_rank {rank} is not within [0, {size}), the ranks of this gang")
    return rank


def check_partition(partition: Sequence[Sequence[int]], size: int) -> list[tuple[int, ...]]:
    """Return the ranks of several parts of a gang of `size`, which have no rank in common."""
    parts = [tuple(map(operator.index, ranks)) for ranks in partition]
    for ranks in parts:
        if not ranks:
            raise ValueError("a gang needs at least one rank")
        if outside := [rank for rank in ranks if not 0 <= rank < size]:
            raise ValueError(f"ranks {outside} are not within [0, {size}), the ranks of this gang")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"ranks {list(ranks)} have duplicates")
    members = [rank for ranks in parts for rank in ranks]
    if twice := sorted({rank for rank in members if members.count(rank) > 1}):
        raise ValueError(f"ranks {twice} are in more than one of {[list(ranks) for ranks in parts]}")
    return parts


def check_reduction(tensor: Tensor, op: ReduceOperation) -> None:
    if not isinstance(op, ReduceOperation):
        raise ValueError(f"{op!r} is no ReduceOperation")
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a gang reduces a tensor, not a {type(tensor).__name__}")
    if op is ReduceOperation.MEAN and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"the mean of {tensor.dtype} tensors is not one of them: convert to a floating point dtype, "
            "or use SUM"
        )
    if tensor.is_complex() and op not in (ReduceOperation.SUM, ReduceOperation.MEAN):
        raise ValueError(f"{op.name} of complex numbers: only SUM and MEAN are defined")


def check_gather(output: Tensor, source: Tensor, size: int) -> None:
    """Raise a ValueError unless `output` has room for all members' tensors, and no more."""
    _check_alike(output, source, "output_tensor")
    stacked = (size, *source.shape)
    joined = (size * source.shape[0], *source.shape[1:]) if source.dim() else None
    if tuple(output.shape) not in (stacked, joined):
        shapes = f"{stacked}" if joined is None else f"{stacked} or {joined}"
        raise ValueError(f"output_tensor has the shape {tuple(output.shape)}, not {shapes}")
    if not output.is_contiguous():
        raise ValueError("output_tensor is not contiguous in memory: gather into one that is, and copy")


def check_gather_list(outputs: Sequence[Tensor], source: Tensor, size: int) -> None:
    """Raise a ValueError unless there is one tensor like `source` for every member."""
    if len(outputs) != size:
        raise ValueError(f"output_tensors has {len(outputs)} tensors for a gang of {size}")
    for place, output in enumerate(outputs):
        _check_alike(output, source, f"output_tensors[{place}]")
        if output.shape != source.shape:
            raise ValueError(
                f"output_tensors[{place}] has the shape {tuple(output.shape)}, not {tuple(source.shape)}"
            )


def _check_alike(output: Tensor, source: Tensor, name: str) -> None:
    check_dense(source, writes=False)
    check_dense(output, writes=True)
    if output.dtype != source.dtype:
        raise ValueError(f"{name} is {output.dtype}, input_tensor {source.dtype}")
    if output.device != source.device:
        raise ValueError(f"{name} is on {output.device}, input_tensor on {source.device}")


@contextlib.contextmanager
def dense(tensor: Tensor, *, writes: bool) -> Iterator[Tensor]:
    """Yield the tensor without gaps; what the block writes into it is in `tensor` afterwards."""
    check_dense(tensor, writes=writes)
    original = tensor.detach()
    without_gaps = original.resolve_conj().resolve_neg().contiguous()
    yield without_gaps
    if writes and without_gaps is not original:
        original.copy_(without_gaps)


def check_dense(tensor: Tensor, *, writes: bool) -> None:
    """Raise a ValueError unless the numbers of a tensor can be moved, and overwritten if `writes`."""
    if not is_dense(tensor):
        kind = "nested ones" if tensor.is_nested else f"{tensor.layout} of {tensor.dtype} on {tensor.device}"
        raise ValueError(f"a gang takes dense tensors, not {kind}")
    if writes and overlaps_itself(tensor):
        raise ValueError("an expanded tensor cannot be overwritten: pass its `.contiguous()`")


def as_moved(tensor: Tensor) -> Tensor:
    """Return a view of the same memory, of a dtype that every backend can copy."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.dtype in REDUCIBLE else tensor.view(_CARRIERS[tensor.itemsize])


@contextlib.contextmanager
def reducible(tensor: Tensor, op: ReduceOperation) -> Iterator[Tensor]:
    """Yield the tensor in a dtype in which every backend can reduce it, and copy the result back.

    A MEAN of float16 is made in float32: the sum before the division may be more than a float16 holds, and a
    number that is divided first loses its last bits. The means of other dtypes have room.
    """
    is_defined = tensor.dtype is not torch.uint64 or op in (ReduceOperation.SUM, ReduceOperation.PRODUCT)
    try:
        # Bools are 0 and 1 on their own memory, which moves a quarter of the bytes of int32.
        numbers = tensor.view(torch.uint8) if tensor.dtype is torch.bool else addable(tensor)
    except ValueError:
        is_defined = False
    if not is_defined:
        raise NotSupportedError(f"{tensor.dtype} tensors have no {op.name}: convert to another dtype")
    if op is ReduceOperation.MEAN and numbers.dtype is torch.float16:
        numbers = numbers.to(torch.float32)
    yield numbers
    if numbers.data_ptr() != tensor.data_ptr():
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor).copy_(numbers)


def effective(op: ReduceOperation, tensor: Tensor) -> ReduceOperation:
    """Return the operation to ask a backend for, to which bools are numbers: a sum may be 2."""
    if tensor.dtype is not torch.bool:
        return op
    is_or = op in (ReduceOperation.SUM, ReduceOperation.MAX)
    return ReduceOperation.MAX if is_or else ReduceOperation.MIN
