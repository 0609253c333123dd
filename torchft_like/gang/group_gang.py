"""The functions of a gang over any process group that torch's functions take.

Here is what a process group leaves to its caller: arguments are checked, tensors with gaps and unusual dtypes
are made movable, errors are put into a gang's words. A group may keep an error to itself, as the swallowing
groups do; the gang asks for it after every call, so it never returns without a result.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import ReduceOp

from torchft_like.communicator.channel import Channel
from torchft_like.communicator.communicator import HARMLESS, Communicator, ToldToAllError
from torchft_like.communicator.messages import start_broadcast
from torchft_like.communicator.options import CoordinatorOptions
from torchft_like.communicator.parts import Part, split
from torchft_like.core.agreement.statements import Terms
from torchft_like.dtypes import REDUCIBLE
from torchft_like.errors import (
    CollectiveMismatchError,
    GangError,
    GroupCoordinatorError,
    NotSupportedError,
    PlainDataError,
)
from torchft_like.gang.arguments import check_gather, check_gather_list, check_reduction, check_source
from torchft_like.gang.base import Gang, ReduceOperation
from torchft_like.gang.current import with_index
from torchft_like.gang.tensors import as_moved, check_dense, dense, effective, reducible
from torchft_like.plain_data.schema import LEAF_BYTES_MAX
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.collectives import ALLREDUCE

# Constants, because an enum looks its members up in Python.
_SUM, _MEAN = ReduceOperation.SUM, ReduceOperation.MEAN
_REDUCE_OPS = {
    ReduceOperation.SUM: ReduceOp.SUM,
    ReduceOperation.MEAN: ReduceOp.AVG,
    ReduceOperation.PRODUCT: ReduceOp.PRODUCT,
    ReduceOperation.MIN: ReduceOp.MIN,
    ReduceOperation.MAX: ReduceOp.MAX,
}
_OPTIONS = CoordinatorOptions(check_collectives=False, message_bytes_max=LEAF_BYTES_MAX)
_NO_LIST = "of no list"


class _Members(Communicator):
    """The members of a gang, each of which hears of a member's death."""

    asks_first_rank = False


class GroupGang(Gang):
    """The functions of a gang; a subclass says which members carry them out.

    Args:
        device: of the tensors that the gang makes itself; "cuda" is the current device.
    """

    _quick: Communicator | None = None  # the members, if nothing has to be asked of them before a call

    def __init__(self, device: torch.device) -> None:
        self._device = with_index(torch.device(device))

    @property
    def device(self) -> torch.device:
        return self._device

    @abstractmethod
    def _present(self) -> Communicator:
        """Return the members of the present configuration, if they can communicate now.

        Raises:
            GangError: they cannot.
        """

    def _over(self, group: dist.ProcessGroup) -> Communicator:
        """Return the members of a group in its present configuration."""
        channel = Channel(group)
        channels = {device.type: channel for device in group._device_types}
        channels.setdefault(self._device.type, channel)
        return _Members("gang", (self.rank, self.size), self._device, channels, _OPTIONS)

    def _has_average(self, tensor: Tensor) -> bool:
        """Return whether the group has MEAN for tensors like this one; otherwise a SUM is divided."""
        return tensor.is_cuda

    def _explained(self, what: str, error: Exception) -> GangError:
        """Return the gang's error for an error of its group."""
        return GangError(f"{what} of {self!r} failed: {error}")

    def barrier(self) -> None:
        with self._communicating("barrier") as members:
            group = members.control.group
            if self._device.type != "cuda":
                dist.barrier(group=group)
                return
            dist.barrier(group=group, device_ids=[self._device.index])
            torch.cuda.current_stream(self._device).synchronize()
            if isinstance(group, ProcessGroup) and (error := group.errored()) is not None:
                raise error  # an error of earlier work, too: NCCL reports it once the stream is there

    def all_reduce(self, tensor: Tensor, op: ReduceOperation) -> None:
        members = self._quick
        if members is None or op is not _SUM or not _is_plain(tensor):
            self._all_reduce(tensor, op)
            return
        channel = members.channels.get(tensor.device.type)
        if channel is None or channel.configuration is None or channel.configuration.reason is not None:
            self._all_reduce(tensor, op)
            return
        try:
            channel.issue(ALLREDUCE, [tensor], AllreduceOptions()).wait()
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            self._raise("all_reduce", error)

    @torch.no_grad()
    def _all_reduce(self, tensor: Tensor, op: ReduceOperation) -> None:
        check_reduction(tensor, op)
        self._check_place(tensor)
        divides = op is _MEAN and not self._has_average(tensor)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM if divides else _REDUCE_OPS[effective(op, tensor)])
        with dense(tensor, writes=True) as without_gaps, reducible(without_gaps, op) as numbers:
            with self._communicating("all_reduce") as members:
                channel = members.channels[numbers.device.type]
                channel.start("allreduce", [numbers], options).wait()
            if divides:
                numbers.div_(members.world_size)

    @torch.no_grad()
    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        check_gather(output_tensor, input_tensor, self.size)
        self._check_place(input_tensor)
        with (
            dense(input_tensor, writes=False) as source,
            dense(output_tensor, writes=True) as output,
            self._communicating("all_gather") as members,
        ):
            flat = source.view(1) if source.dim() == 0 else source
            is_joined = output.dim() == flat.dim()
            rows = output.shape[0] if is_joined else output.shape[0] * flat.shape[0]
            # This is the concatenated shape, which every backend takes.
            joined = output.view(rows, *flat.shape[1:])
            members.allgather(as_moved(joined), as_moved(flat)).wait()

    @torch.no_grad()
    def all_gather_to_list(self, output_tensors: list[Tensor], input_tensor: Tensor) -> None:
        check_gather_list(output_tensors, input_tensor, self.size)
        self._check_place(input_tensor)
        check_dense(input_tensor, writes=False)
        for output in output_tensors:
            check_dense(output, writes=True)
        gathered = input_tensor.new_empty((self.size, *input_tensor.shape))
        self.all_gather(gathered, input_tensor)
        for output, part in zip(output_tensors, gathered, strict=True):
            output.detach().copy_(part)

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, source_rank: int = 0) -> None:
        source = check_source(source_rank, self.size)
        self._check_place(tensor)
        is_target = self.rank != source
        with dense(tensor, writes=is_target) as without_gaps, self._communicating("broadcast") as members:
            members.broadcast(as_moved(without_gaps), source).wait()

    @torch.no_grad()
    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        source = check_source(source_rank, self.size)
        is_list = isinstance(objects, list)

        def length() -> Terms:
            return (("length", str(len(objects)) if is_list else _NO_LIST),)

        with self._communicating("broadcast_objects") as members, self._agreeing(objects, source):
            given = list(objects) if is_list else []
            try:
                received = start_broadcast(members, "broadcast_objects", given, source, length).wait()
                if members.rank != source and is_list:
                    if not isinstance(received, list) or len(received) != len(objects):
                        raise GangError(f"rank {source} sent something else than {len(objects)} objects")
                    objects[:] = received
            except HARMLESS:
                raise
            except BaseException as error:
                # Otherwise the others would wait for this member, and take its next call for the rest of this
                # one.
                members.break_off(f"a member left broadcast_objects half-way: {error!r}")
                raise

    @contextlib.contextmanager
    def _agreeing(self, objects: object, source: int) -> Iterator[None]:
        """Put a disagreement of the members about a broadcast of objects into a gang's words."""
        own: ValueError | None = None
        if not isinstance(objects, list):
            own = ValueError(f"objects are given in a list, not in a {type(objects).__name__}")
        try:
            yield
        except CollectiveMismatchError as error:
            if own is None and error.aspect == "arguments":
                raise GangError(f"rank {source} cannot send its objects: {error}") from error
            raise own or ValueError(str(error)) from error
        if own is not None:
            raise own

    def _split(self, members: Communicator, partition: Sequence[tuple[int, ...]]) -> Part | None:
        """Return the caller's part of `members`.

        Raises:
            ValueError: the members were given different ranks.
        """
        try:
            return split(members, "create_gang", partition)
        except CollectiveMismatchError as error:
            raise ValueError(f"the members were given different ranks for the new gangs: {error}") from error

    @contextlib.contextmanager
    def _communicating(self, what: str) -> Iterator[Communicator]:
        """Yield the members, which may communicate in the block; put every error into a gang's words."""
        try:
            members = self._present()
            yield members
            if (error := members.control.hidden_error()) is not None:
                raise error
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            self._raise(what, error)

    def _raise(self, what: str, error: Exception) -> NoReturn:
        """Raise the gang's error for an error of its group."""
        told = self._told(what, error)
        if told is error:
            raise error
        raise told from told.__cause__

    def _told(self, what: str, error: Exception) -> Exception:
        """Return the error to raise for an error of the group."""
        if isinstance(error, ToldToAllError):
            return error.error if isinstance(error.error, GangError) else self._told(what, error.error)
        if isinstance(error, GroupCoordinatorError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # the error that a channel found
        if isinstance(error, GangError | NotSupportedError | PlainDataError):
            return error
        if isinstance(error, ValueError | TypeError):
            return error
        if isinstance(error, NotImplementedError):
            told: Exception = NotSupportedError(f"{self!r} has no {what}: {error}")
        else:
            told = self._explained(what, error)
        told.__cause__ = error
        return told

    def _check_place(self, tensor: Tensor) -> None:
        kind = tensor.device.type
        if kind == self._device.type:
            return
        known = list(self._present().channels)
        if kind not in known:
            raise ValueError(
                f"the tensor is on {tensor.device}, and {self!r} moves {', '.join(known)} tensors"
            )


def _is_plain(tensor: object) -> bool:
    """Return whether a backend reduces the tensor as it is, with nothing for autograd to see."""
    return (
        type(tensor) is Tensor
        and tensor.dtype in REDUCIBLE
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.requires_grad or tensor.is_neg() or tensor.is_inference())
        and tensor.is_contiguous()
    )
