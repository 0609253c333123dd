"""Collectives on tensors, of one size or of many: reductions, gathers, scatters and broadcasts.

If all ranks have tensors of one size, only the tensors move, unless the options ask for a check: the caller
makes sure that the tensors of all ranks fit each other. If sizes differ (`..v`), the ranks exchange their
numbers of rows before any of them moves: a rank may have no rows, and a rank whose tensors do not fit the
others' is an error on all of them. The backend chooses the order in which numbers are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, GatherOptions, ReduceScatterOptions

from torchft_like.communicator.communicator import Communicator, call
from torchft_like.communicator.tensors import (
    addable,
    as_before,
    checked_along,
    checked_dim,
    checked_rank,
    checked_sizes,
    checked_target,
    checked_tensor,
    device_terms,
    elements_of_row,
    even_sizes,
    is_addable_as_is,
    overlaps,
    specifications,
    with_rows,
)
from torchft_like.core.agreement.statements import Statement, Terms
from torchft_like.dtypes import as_bytes
from torchft_like.writing import writing_to

Sizes = tuple[int, ...]


@call("all_reduce")
def all_reduce(communicator: Communicator, input_: Tensor) -> Tensor:
    def check() -> Tensor:
        return addable(communicator.movable(checked_tensor(input_)))

    total = communicator.agree_if_checking("all_reduce", input_, {}, check).clone()
    if communicator.world_size > 1 and total.numel():
        channel = communicator.channels[total.device.type]
        channel.start("allreduce", [total], AllreduceOptions()).wait()
    return as_before(total, input_.dtype).to(input_.device)


@call("all_gather")
def all_gather(communicator: Communicator, input_: Tensor, dim: int) -> Tensor:
    return _gathered(communicator, "all_gather", input_, dim, None)


@call("reduce_scatter")
def reduce_scatter(communicator: Communicator, input_: Tensor, dim: int) -> Tensor:
    ranks = communicator.world_size
    if not communicator.is_checking and ranks > 1 and is_addable_as_is(input_) and type(dim) is int:
        channel = communicator.channels.get(input_.device.type)
        dims = input_.dim()
        if channel is not None and -dims <= dim < dims and input_.numel() and not input_.shape[dim] % ranks:
            rows = input_.detach().movedim(dim, 0).contiguous()
            own = rows.new_empty((rows.shape[0] // ranks, *rows.shape[1:]))
            channel.carry_out("_reduce_scatter_base", own, rows, ReduceScatterOptions())
            return own.movedim(0, dim).contiguous()

    def check() -> int:
        at = checked_dim(dim, checked_tensor(input_).dim())
        if input_.shape[at] % ranks:
            raise ValueError(
                f"{input_.shape[at]} rows along dim {at} cannot be shared out evenly among {ranks} ranks: "
                "use reduce_scatterv"
            )
        return at

    at = communicator.agree_if_checking("reduce_scatter", input_, {"dim": dim}, check)
    return _start_reduce_scatter(communicator, input_, at, (input_.shape[at] // ranks,) * ranks)()


@call("gather")
def gather(communicator: Communicator, input_: Tensor, dst: int, dim: int) -> Tensor | None:
    found = _gathered(communicator, "gather", input_, dim, dst)
    return found if communicator.rank == dst else None


@call("broadcast")
def broadcast(communicator: Communicator, input_: Tensor, src: int) -> Tensor:

    def check() -> Tensor:
        is_source = communicator.rank == checked_rank(src, communicator.world_size, "src")
        return checked_tensor(input_) if is_source else checked_target(input_)

    communicator.agree_if_checking("broadcast", input_, {"src": src}, check)
    if communicator.world_size > 1 and input_.numel():
        moved = communicator.movable(input_)
        communicator.broadcast(as_bytes(moved), src).wait()
        if communicator.rank != src and moved.data_ptr() != input_.data_ptr():
            with writing_to(input_):
                input_.copy_(moved)
    return input_


def all_gatherv(
    communicator: Communicator,
    choose_tensors: Callable[[], Sequence[Tensor]],
    dim: int,
    sizes: Sequence[int] | None,
    operation: str = "all_gatherv",
    more: Callable[[], Terms] = tuple,
) -> tuple[list[Tensor], Sizes]:
    """Return each tensor joined with those of the other ranks along `dim`, and the rows of each rank.

    Args:
        choose_tensors: returns tensors with the same number of rows along `dim`, or raises an error that
          refuses the call.
        sizes: the rows of each rank; if None, the ranks exchange them.
        more: returns what else the ranks must agree on, or raises an error that refuses the call.
    """

    def prepare() -> tuple[Statement, int, bytes, tuple[Sequence[Tensor], int]]:
        tensors = choose_tensors()
        at = checked_along(tensors, dim)
        rows = tensors[0].shape[at]
        known = None if sizes is None else checked_sizes(sizes, communicator.world_size)
        if known is not None and known[communicator.rank] != rows:
            raise ValueError(
                f"this rank's tensor has {rows} rows, and sizes gives it {known[communicator.rank]}"
            )
        told = "exchanged" if known is None else str(list(known))
        named = *device_terms(tensors, communicator.channels), ("dim", str(at)), ("sizes", told), *more()
        statement = Statement(operation, inputs=specifications(tensors, open_dim=at), terms=named)
        return statement, rows, b"", (tensors, at)

    with communicator.guard(operation):
        records, (tensors, at) = communicator.agree(operation, prepare)
        rows = tuple(record.number for record in records)
        if communicator.world_size == 1:
            return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors], rows
        joining = [start_joining(communicator, tensor, at, rows) for tensor in tensors]
        return [finish() for finish in joining], rows


def reduce_scatterv(
    communicator: Communicator,
    tensors: Sequence[Tensor],
    dim: int,
    choose_sizes: Callable[[], Sequence[int] | None],
    operation: str = "reduce_scatterv",
    more: Callable[[], Terms] = tuple,
) -> list[Tensor]:
    """Return, for each tensor, this rank's rows along `dim` of the sum over all ranks.

    Args:
        tensors: tensors of the same shapes on all ranks.
        choose_sizes: returns the rows that each rank gets, or None for an even split, or raises an error that
          refuses the call.
        more: returns what else the ranks must agree on, or raises an error that refuses the call.
    """

    def prepare() -> tuple[Statement, int, bytes, tuple[int, Sizes]]:
        at = checked_along(tensors, dim)
        for tensor in tensors:
            addable(tensor.narrow(at, 0, 0))  # refuses tensors that cannot be added
        chosen, rows, ranks = choose_sizes(), tensors[0].shape[at], communicator.world_size
        sizes = even_sizes(rows, ranks) if chosen is None else checked_sizes(chosen, ranks)
        if sum(sizes) != rows:
            raise ValueError(f"the tensor has {rows} rows, and sizes {list(sizes)[:16]} make {sum(sizes)}")
        told = str(list(sizes))
        named = *device_terms(tensors, communicator.channels), ("dim", str(at)), ("sizes", told), *more()
        return Statement(operation, inputs=specifications(tensors), terms=named), 0, b"", (at, sizes)

    with communicator.guard(operation):
        _, (at, sizes) = communicator.agree(operation, prepare)
        begun = [_start_reduce_scatter(communicator, tensor, at, sizes) for tensor in tensors]
        return [finish() for finish in begun]


def start_joining(communicator: Communicator, tensor: Tensor, dim: int, sizes: Sizes) -> Callable[[], Tensor]:
    """Begin to join the ranks' tensors, which have `sizes` rows along `dim`; return a function that waits for
    the result.

    Each rank broadcasts its rows, which are contiguous, into their place on the other ranks.
    """
    mine = communicator.movable(tensor)
    row = elements_of_row(mine.shape, dim)
    whole = torch.empty(sum(sizes) * row, dtype=mine.dtype, device=mine.device)
    flat_parts = torch.split(whole, [size * row for size in sizes])
    flat_parts[communicator.rank].copy_(mine.reshape(-1))
    begun = [
        communicator.broadcast(as_bytes(part), src) for src, part in enumerate(flat_parts) if part.numel()
    ]

    def finish() -> Tensor:
        for started in begun:
            started.wait()
        if dim == 0:
            return whole.view(with_rows(mine.shape, dim, sum(sizes))).to(tensor.device)
        parts = zip(flat_parts, sizes, strict=True)
        shaped = [part.view(with_rows(mine.shape, dim, size)) for part, size in parts]
        return torch.cat(shaped, dim).to(tensor.device)

    return finish


def _start_reduce_scatter(
    communicator: Communicator, tensor: Tensor, dim: int, sizes: Sequence[int]
) -> Callable[[], Tensor]:
    """Begin to add up a tensor, `sizes` rows along `dim` for each rank; return a function that waits."""
    rows = addable(communicator.movable(tensor)).movedim(dim, 0).contiguous()
    own = rows.new_empty((sizes[communicator.rank], *rows.shape[1:]))
    wait: Callable[[], object] | None = None
    if communicator.world_size == 1:
        own.copy_(rows)
    elif rows.numel():
        wait = _start_adding(communicator, own, rows, sizes)

    def finish() -> Tensor:
        if wait is not None:
            wait()
        return as_before(own, tensor.dtype).movedim(0, dim).contiguous().to(tensor.device)

    return finish


def _start_adding(
    communicator: Communicator, own: Tensor, rows: Tensor, sizes: Sequence[int]
) -> Callable[[], object]:
    """Begin to compute this rank's rows of the sum in `own`; return a function that waits for them.

    Backends add up parts of one size. If sizes differ, each rank adds up an even chunk, whichever rows it
    wants, and sends on the rows of others: so no rank receives, or adds up, much more than the others do.
    """
    channel, ranks, width = communicator.channels[rows.device.type], communicator.world_size, rows[0].numel()
    if min(sizes) == max(sizes):
        return channel.start("_reduce_scatter_base", own, rows, ReduceScatterOptions()).wait
    flat, chunk = rows.view(-1), -(-rows.numel() // ranks)
    if missing := ranks * chunk - flat.numel():
        flat = torch.cat([flat, flat.new_zeros(missing)])
    added = flat.new_empty(chunk)
    adding = channel.start("_reduce_scatter_base", added, flat, ReduceScatterOptions())
    gives, gets = overlaps([size * width for size in sizes], chunk, communicator.rank)

    def finish() -> None:
        adding.wait()
        leaving, arriving = as_bytes(added[: sum(gives)]), as_bytes(own)
        out_bytes, in_bytes = ([count * added.itemsize for count in counts] for counts in (gets, gives))
        channel.start("alltoall_base", arriving, leaving, out_bytes, in_bytes).wait()

    return finish


def _gathered(
    communicator: Communicator, operation: str, input_: Tensor, dim: int, dst: int | None
) -> Tensor:
    """Return the tensors of all ranks joined along `dim`, on rank `dst` or on all; nothing on the others."""

    def check() -> int:
        if dst is not None:
            checked_rank(dst, communicator.world_size, "dst")
        return checked_dim(dim, checked_tensor(input_).dim())

    more = {"dim": dim} if dst is None else {"dst": dst, "dim": dim}
    at = communicator.agree_if_checking(operation, input_, more, check)
    if communicator.world_size == 1:
        return input_.detach().clone(memory_format=torch.contiguous_format)
    mine = communicator.movable(input_)
    count = communicator.world_size if dst in (None, communicator.rank) else 0
    parts = torch.empty((count, *mine.shape), dtype=mine.dtype, device=mine.device)
    if mine.numel():
        channel = communicator.channels[mine.device.type]
        if dst is None:
            channel.start("_allgather_base", as_bytes(parts), as_bytes(mine)).wait()
        else:
            options = GatherOptions()
            options.rootRank = dst
            outputs = [[as_bytes(part) for part in parts]] if count else []
            channel.start("gather", outputs, [as_bytes(mine)], options).wait()
    together = with_rows(mine.shape, at, count * mine.shape[at])
    # Parts of one row each are a view with gaps.
    return parts.movedim(0, at).reshape(together).contiguous().to(input_.device)
