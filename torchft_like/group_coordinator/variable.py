"""Collectives of tensors with as many rows as each rank likes: all_gatherv and reduce_scatterv.

The ranks say how many rows they have before any of them moves. So sizes need not be known, rows may be
none, and a rank whose tensors do not fit the others' is an error on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchft_like.group_coordinator.arguments import Terms, checked_along, tensors_terms
from torchft_like.group_coordinator.numbers import addable
from torchft_like.group_coordinator.plans import checked_sizes, elements_of_row, even_sizes, with_rows
from torchft_like.group_coordinator.statements import Statement
from torchft_like.group_coordinator.summing import reduce_scatter_by_rows
from torchft_like.group_coordinator.transport import Transport, as_bytes

Sizes = tuple[int, ...]


def all_gatherv(
    transport: Transport,
    choose_tensors: Callable[[], Sequence[Tensor]],
    dim: int,
    sizes: Sequence[int] | None,
    operation: str = "all_gatherv",
    more: Callable[[], Terms] = tuple,
) -> tuple[list[Tensor], Sizes]:
    """Each tensor joined with those of the other ranks along `dim`, and the rows of each rank.

    Args:
        choose_tensors: gives some with the same number of rows along `dim`; may refuse.
        sizes: the rows of each rank; None has the ranks say so.
        more: gives what else the ranks must agree on; may refuse.
    """

    def prepare() -> tuple[Statement, tuple[Sequence[Tensor], int]]:
        tensors = choose_tensors()
        at = checked_along(tensors, dim)
        rows = tensors[0].shape[at]
        known = None if sizes is None else checked_sizes(sizes, transport.world_size)
        if known is not None and known[transport.rank] != rows:
            raise ValueError(
                f"this rank's tensor has {rows} rows, and sizes gives it {known[transport.rank]}"
            )
        sizes_text = "exchanged" if known is None else str(list(known))
        terms = *tensors_terms(tensors, at, open_dim=at), *transport.lane_terms(tensors)
        return Statement(operation, (*terms, ("sizes", sizes_text), *more()), (rows,)), (tensors, at)

    with transport.guard(operation):
        said, (tensors, at) = transport.agree(prepare, operation)
        rows = tuple(statement.counts[0] for statement in said)
        if transport.world_size == 1:
            return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors], rows
        gathered = [Gathering(transport, tensor, at, rows) for tensor in tensors]
        return [gathering.land() for gathering in gathered], rows


def reduce_scatterv(
    transport: Transport,
    tensors: Sequence[Tensor],
    dim: int,
    choose_sizes: Callable[[], Sequence[int] | None],
    operation: str = "reduce_scatterv",
    more: Callable[[], Terms] = tuple,
) -> list[Tensor]:
    """Of each tensor this rank's rows along `dim` of the sum over all ranks.

    Args:
        tensors: the same shapes on all ranks.
        choose_sizes: gives the rows that each rank gets, or None to share them out evenly; may refuse.
        more: gives what else the ranks must agree on; may refuse.
    """

    def prepare() -> tuple[Statement, tuple[int, Sizes]]:
        at = checked_along(tensors, dim)
        for tensor in tensors:
            addable(tensor.narrow(at, 0, 0))  # which refuses what cannot be added
        shares = _shares(choose_sizes(), tensors[0].shape[at], transport.world_size)
        terms = *tensors_terms(tensors, at, open_dim=None), *transport.lane_terms(tensors)
        return Statement(operation, (*terms, ("sizes", str(list(shares))), *more())), (at, shares)

    with transport.guard(operation):
        _, (at, shares) = transport.agree(prepare, operation)
        return reduce_scatter_by_rows(transport, tensors, at, shares)


def _shares(sizes: Sequence[int] | None, rows: int, world_size: int) -> Sizes:
    if sizes is None:
        return even_sizes(rows, world_size)
    shares = checked_sizes(sizes, world_size)
    if sum(shares) != rows:
        raise ValueError(f"the tensor has {rows} rows, and sizes {list(shares)[:16]} make {sum(shares)}")
    return shares


class Gathering:
    """One tensor on its way to all: each rank brings its rows, which lie in one piece, to the others."""

    def __init__(self, transport: Transport, tensor: Tensor, dim: int, sizes: Sizes) -> None:
        mine = transport.carried(tensor)
        row = elements_of_row(mine.shape, dim)
        self._whole = torch.empty(sum(sizes) * row, dtype=mine.dtype, device=mine.device)
        self._flat_parts = torch.split(self._whole, [size * row for size in sizes])
        self._flat_parts[transport.rank].copy_(mine.reshape(-1))
        self._shapes = [with_rows(mine.shape, dim, size) for size in sizes]
        self._shape = with_rows(mine.shape, dim, sum(sizes))
        self._dim, self._device = dim, tensor.device
        self._flights = [
            transport.broadcast(as_bytes(part), src)
            for src, part in enumerate(self._flat_parts)
            if part.numel()
        ]

    def land(self) -> Tensor:
        """The tensors of all ranks along the dimension."""
        for flight in self._flights:
            flight.land()
        if self._dim == 0:
            return self._whole.view(self._shape).to(self._device)
        parts = zip(self._flat_parts, self._shapes, strict=True)
        return torch.cat([part.view(shape) for part, shape in parts], self._dim).to(self._device)
