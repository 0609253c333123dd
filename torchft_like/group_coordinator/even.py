"""Collectives of tensors of one size: all_reduce, all_gather, reduce_scatter, gather and broadcast.

Nothing but the tensors moves, unless the options ask for a check: so it is up to the caller that the
tensors of all ranks fit each other. Numbers are added in the order of a backend's choosing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchft_like.group_coordinator.arguments import Terms, checked_target, checked_tensor, tensor_terms
from torchft_like.group_coordinator.numbers import addable, as_before
from torchft_like.group_coordinator.plans import checked_dim, checked_rank, with_rows
from torchft_like.group_coordinator.summing import reduce_scatter_by_rows
from torchft_like.group_coordinator.transport import Transport, as_bytes
from torchft_like.writing import writing_to


def all_reduce(transport: Transport, input_: Tensor) -> Tensor:
    """The sum over all ranks, in a new tensor."""

    def prepare() -> Tensor:
        return addable(transport.carried(checked_tensor(input_)))

    with transport.guard("all_reduce"):
        ready = transport.agree_if_checking(prepare, "all_reduce", lambda _: _terms(transport, input_))
        total = ready.clone()
        if transport.world_size > 1 and total.numel():
            transport.allreduce(total).land()
        return as_before(total, input_.dtype).to(input_.device)


def all_gather(transport: Transport, input_: Tensor, dim: int) -> Tensor:
    """The tensors of all ranks joined along `dim`."""

    def prepare() -> int:
        return checked_dim(dim, checked_tensor(input_).dim())

    with transport.guard("all_gather"):
        at = transport.agree_if_checking(prepare, "all_gather", lambda at: _terms(transport, input_, dim=at))
        if transport.world_size == 1:
            return input_.detach().clone(memory_format=torch.contiguous_format)
        mine = transport.carried(input_)
        parts = torch.empty((transport.world_size, *mine.shape), dtype=mine.dtype, device=mine.device)
        if mine.numel():
            transport.allgather(as_bytes(parts), as_bytes(mine)).land()
        return _joined_along(parts, at).to(input_.device)


def reduce_scatter(transport: Transport, input_: Tensor, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum over all ranks."""

    def prepare() -> int:
        at = checked_dim(dim, checked_tensor(input_).dim())
        if input_.shape[at] % transport.world_size:
            raise ValueError(
                f"{input_.shape[at]} rows along dim {at} cannot be shared out evenly among "
                f"{transport.world_size} ranks: use reduce_scatterv"
            )
        return at

    with transport.guard("reduce_scatter"):
        at = transport.agree_if_checking(
            prepare, "reduce_scatter", lambda at: _terms(transport, input_, dim=at)
        )
        rows = input_.shape[at] // transport.world_size
        return reduce_scatter_by_rows(transport, [input_], at, (rows,) * transport.world_size)[0]


def gather(transport: Transport, input_: Tensor, dst: int, dim: int) -> Tensor | None:
    """The tensors of all ranks joined along `dim` on rank `dst`; None elsewhere."""

    def prepare() -> int:
        checked_rank(dst, transport.world_size, "dst")
        return checked_dim(dim, checked_tensor(input_).dim())

    with transport.guard("gather"):
        at = transport.agree_if_checking(
            prepare, "gather", lambda at: _terms(transport, input_, dst=dst, dim=at)
        )
        if transport.world_size == 1:
            return input_.detach().clone(memory_format=torch.contiguous_format)
        mine = transport.carried(input_)
        count = transport.world_size if transport.rank == dst else 0
        parts = torch.empty((count, *mine.shape), dtype=mine.dtype, device=mine.device)
        if mine.numel():
            transport.gather([as_bytes(part) for part in parts], as_bytes(mine), dst).land()
        return _joined_along(parts, at).to(input_.device) if count else None


def broadcast(transport: Transport, input_: Tensor, src: int) -> Tensor:
    """Bring the tensor of rank `src` into that of every other rank; gives the same tensor."""

    def prepare() -> Tensor:
        is_source = transport.rank == checked_rank(src, transport.world_size, "src")
        return checked_tensor(input_) if is_source else checked_target(input_)

    with transport.guard("broadcast"):
        transport.agree_if_checking(prepare, "broadcast", lambda _: _terms(transport, input_, src=src))
        if transport.world_size > 1 and input_.numel():
            moved = transport.carried(input_)
            transport.broadcast(as_bytes(moved), src).land()
            if transport.rank != src and moved.data_ptr() != input_.data_ptr():
                with writing_to(input_):
                    input_.copy_(moved)
        return input_


def _terms(transport: Transport, tensor: Tensor, **more: int) -> Terms:
    numbers = ((name, str(number)) for name, number in more.items())
    return *tensor_terms(tensor), *transport.lane_terms([tensor]), *numbers


def _joined_along(parts: Tensor, dim: int) -> Tensor:
    """`[rank, *shape]` as one tensor, with the ranks' parts side by side along `dim` of `shape`."""
    shape = parts.shape[1:]
    together = with_rows(shape, dim, parts.shape[0] * shape[dim])
    return parts.movedim(0, dim).reshape(together).contiguous()  # of one row each it is a view with gaps
