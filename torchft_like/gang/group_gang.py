"""Collectives of a gang over any process group that torch's functions take.

What a process group leaves to its caller is done here: arguments are checked, tensors with gaps and
unusual dtypes made movable, errors put into a gang's words. An error that the group keeps to itself,
as the swallowing groups do, is asked for after every call: a gang never returns what was not computed.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from torchft_like.errors import GangError, NotSupportedError
from torchft_like.gang.arguments import check_gather, check_gather_list, check_reduction, check_source
from torchft_like.gang.base import Gang, ReduceOperation
from torchft_like.gang.objects import ObjectBroadcast
from torchft_like.gang.tensors import as_moved, check_dense, dense, effective, reducible
from torchft_like.process_group import ProcessGroup

_REDUCE_OPS = {
    ReduceOperation.SUM: ReduceOp.SUM,
    ReduceOperation.MEAN: ReduceOp.AVG,
    ReduceOperation.PRODUCT: ReduceOp.PRODUCT,
    ReduceOperation.MIN: ReduceOp.MIN,
    ReduceOperation.MAX: ReduceOp.MAX,
}
# The older name is deprecated where there is the newer one.
_gather_into_one: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupGang(Gang):
    """The functions of a gang; a subclass says which group carries them out.

    Args:
        device: of the tensors that the gang makes itself; "cuda" is the current device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = _with_index(torch.device(device))

    @property
    def device(self) -> torch.device:
        """See Gang.device."""
        return self._device

    @abstractmethod
    def _usable_group(self) -> dist.ProcessGroup:
        """The group, if it can be used now.

        Raises:
            GangError: it cannot.
        """

    def _has_average(self, tensor: Tensor) -> bool:
        """Whether the group has MEAN for tensors like this one; it is a division after a SUM otherwise."""
        return tensor.is_cuda

    def _hidden_error(self) -> Exception | None:
        """What the group has not raised."""
        return None

    def _explained(self, what: str, error: Exception) -> GangError:
        """The error of a gang for one of its group."""
        return GangError(f"{what} of {self!r} failed: {error}")

    def barrier(self) -> None:
        """See Gang.barrier."""
        with self._communicating("barrier") as group:
            if self._device.type != "cuda":
                dist.barrier(group=group)
                return
            dist.barrier(group=group, device_ids=[self._device.index])
            torch.cuda.current_stream(self._device).synchronize()
            if isinstance(group, ProcessGroup) and (error := group.errored()) is not None:
                raise error  # of what came before, too: NCCL tells it once the stream is there

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, op: ReduceOperation) -> None:
        """See Gang.all_reduce."""
        check_reduction(tensor, op)
        self._check_place(tensor)
        divides = op is ReduceOperation.MEAN and not self._has_average(tensor)
        reduce_op = ReduceOp.SUM if divides else _REDUCE_OPS[effective(op, tensor)]
        with dense(tensor, writes=True) as without_gaps, reducible(without_gaps, op) as numbers:
            with self._communicating("all_reduce") as group:
                size = group.size()
                dist.all_reduce(numbers, reduce_op, group=group)
            if divides:
                numbers.div_(size)

    @torch.no_grad()
    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        """See Gang.all_gather."""
        check_gather(output_tensor, input_tensor, self.size)
        self._check_place(input_tensor)
        with (
            dense(input_tensor, writes=False) as source,
            dense(output_tensor, writes=True) as output,
            self._communicating("all_gather") as group,
        ):
            self._gather(group, output, source)

    @torch.no_grad()
    def all_gather_to_list(self, output_tensors: list[Tensor], input_tensor: Tensor) -> None:
        """See Gang.all_gather_to_list."""
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
        """See Gang.broadcast."""
        source = check_source(source_rank, self.size)
        self._check_place(tensor)
        is_target = self.rank != source
        with dense(tensor, writes=is_target) as without_gaps, self._communicating("broadcast") as group:
            dist.broadcast(as_moved(without_gaps), group=group, group_src=source)

    @torch.no_grad()
    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        """See Gang.broadcast_objects."""
        source = check_source(source_rank, self.size)
        sending = ObjectBroadcast(self.rank, source, self._device)
        # Each part ends with the question whether it took place: what was received is not looked at before.
        with self._communicating("broadcast_objects") as group:
            size = sending.agree(objects, lambda own: self._gather_checked(group, own))
        with self._communicating("broadcast_objects") as group, self._to_the_end(group):
            sending.transfer(objects, size, self._broadcast_checked)

    def _exchange(self, group: dist.ProcessGroup, record: bytes) -> list[bytes]:
        """What every member of `group` has passed, all of the same length."""
        own = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(self._device)
        return [each.cpu().numpy().tobytes() for each in self._gather_checked(group, own)]

    def _gather_checked(self, group: dist.ProcessGroup, own: Tensor) -> list[Tensor]:
        gathered = own.new_empty((group.size(), *own.shape))
        self._gather(group, gathered, own)
        self._raise_hidden("all_gather")
        return list(gathered)

    def _broadcast_checked(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(as_moved(tensor), group=self._usable_group(), group_src=source)
        self._raise_hidden("broadcast")

    def _gather(self, group: dist.ProcessGroup, output: Tensor, source: Tensor) -> None:
        """Into the concatenated shape, which every backend has."""
        if source.dim() == 0:
            source = source.view(1)
        is_joined = output.dim() == source.dim()
        rows = output.shape[0] if is_joined else output.shape[0] * source.shape[0]
        joined = output.view(rows, *source.shape[1:])
        _gather_into_one(as_moved(joined), as_moved(source), group=group)

    @contextlib.contextmanager
    def _communicating(self, what: str) -> Iterator[dist.ProcessGroup]:
        """In the block a group may be used; whatever goes wrong is told in a gang's words."""
        try:
            yield self._usable_group()
        except (GangError, ValueError, TypeError):
            raise
        except NotSupportedError:
            raise
        except NotImplementedError as error:
            raise NotSupportedError(f"{self!r} has no {what}: {error}") from error
        except Exception as error:
            raise self._explained(what, error) from error
        self._raise_hidden(what)

    def _raise_hidden(self, what: str) -> None:
        if (error := self._hidden_error()) is not None:
            raise self._explained(what, error) from error

    @contextlib.contextmanager
    def _to_the_end(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Around several collectives: a member that leaves half-way takes the group down.

        The others would wait for it, and take its next call for the rest of this one. Torch's own groups
        cannot be ended.
        """
        ours = group if isinstance(group, ProcessGroup) else None
        configuration = None if ours is None else ours.configuration
        try:
            yield
        except BaseException as error:
            if ours is not None and ours.configuration is configuration:
                ours.abort(f"a member left broadcast_objects half-way: {error!r}")
            raise

    def _check_place(self, tensor: Tensor) -> None:
        kind = tensor.device.type
        if kind == self._device.type:
            return
        known = [device.type for device in self._usable_group()._device_types]
        if kind not in known:
            raise ValueError(
                f"the tensor is on {tensor.device}, and {self!r} moves {', '.join(known)} tensors"
            )


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
