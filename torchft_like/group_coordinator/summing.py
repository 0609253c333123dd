"""Sums that end on several ranks: each has some rows of the sum of a tensor over all ranks.

Sums are made of the ranks' parts in the order of ranks, whoever makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchft_like.group_coordinator.numbers import addable, as_before
from torchft_like.group_coordinator.plans import elements_of_row
from torchft_like.group_coordinator.shares import (
    Share,
    handed_over,
    rounds_of,
    shares_of,
    sizes_by_helper,
)
from torchft_like.group_coordinator.transport import Flight, Transport, as_bytes

ROUNDS_MAX = 4


def reduce_scatter_by_rows(
    transport: Transport, tensors: Sequence[Tensor], dim: int, sizes: Sequence[int]
) -> list[Tensor]:
    """Of each tensor this rank's rows of the sum; all ranks know that their arguments fit."""
    sums = [_Summing(transport, tensor, dim, sizes) for tensor in tensors]
    return [summing.land() for summing in sums]


@dataclass(frozen=True)
class _Round:
    """One exchange: the parts of all ranks, row by row, of the shares that this rank adds up."""

    parts: Tensor
    shares: list[Share]
    flight: Flight


class _Summing:
    """One tensor whose parts are on their way to the ranks that add them up."""

    def __init__(self, transport: Transport, tensor: Tensor, dim: int, sizes: Sequence[int]) -> None:
        rows = transport.carried(tensor.movedim(dim, 0))
        mine, row = rows.view(-1), elements_of_row(rows.shape, 0)
        rank = transport.rank
        self._transport, self._dim, self._device = transport, dim, tensor.device
        self._shape = (sizes[rank], *rows.shape[1:])
        self._shares = shares_of([size * row for size in sizes], mine.element_size())
        self._gives, self._gets = handed_over(self._shares, rank, transport.world_size)
        self._sum = mine.new_empty(sizes[rank] * row)
        self._for_others = mine.new_empty(sum(self._gives))
        self._rounds: list[_Round] = []
        if transport.world_size == 1:
            _add_up(mine.view(1, -1), self._sum)
        elif self._shares:
            self._rounds = self._start(mine)

    def land(self) -> Tensor:
        """This rank's rows of the sum."""
        added = to_others = 0
        for exchange in self._rounds:
            exchange.flight.land()
            at = 0
            for share in exchange.shares:
                parts = exchange.parts[:, at : at + share.size]
                at += share.size
                if share.owner == share.helper:
                    _add_up(parts, self._sum[added : added + share.size])
                    added += share.size
                else:
                    _add_up(parts, self._for_others[to_others : to_others + share.size])
                    to_others += share.size
        if any(share.owner != share.helper for share in self._shares):
            _move(self._transport, self._for_others, self._sum[added:], self._gives, self._gets).land()
        return self._sum.view(self._shape).movedim(0, self._dim).contiguous().to(self._device)

    def _start(self, mine: Tensor) -> list[_Round]:
        """Every rank to every helper, in as many exchanges as the order of the elements asks for."""
        rounds = rounds_of(self._shares)
        if len(rounds) > ROUNDS_MAX:
            mine, rounds = _in_order_of_helpers(mine, self._shares)
        started, start = [], 0
        for shares in rounds:
            sizes = sizes_by_helper(shares, self._transport.world_size)
            own, ranks = sizes[self._transport.rank], self._transport.world_size
            parts = mine.new_empty((ranks, own))
            source = mine[start : start + sum(sizes)]
            flight = _move(self._transport, source, parts.view(-1), sizes, [own] * ranks)
            start += sum(sizes)
            ours = [share for share in shares if share.helper == self._transport.rank]
            started.append(_Round(parts, ours, flight))
        return started


def _in_order_of_helpers(mine: Tensor, shares: Sequence[Share]) -> tuple[Tensor, list[list[Share]]]:
    """A copy, so that one exchange does."""
    pieces = torch.split(mine, [share.size for share in shares])
    order = sorted(range(len(shares)), key=lambda index: shares[index].helper)
    return torch.cat([pieces[index] for index in order]), [[shares[index] for index in order]]


def _add_up(parts: Tensor, total: Tensor) -> None:
    terms = addable(parts)
    if terms is parts:
        torch.sum(parts, 0, dtype=parts.dtype, out=total)
    else:
        total.copy_(as_before(terms.sum(0, dtype=terms.dtype), total.dtype))


def _move(
    transport: Transport, source: Tensor, target: Tensor, to_others: Sequence[int], from_others: Sequence[int]
) -> Flight:
    """Every rank to every other; sizes are numbers of elements."""
    width = source.element_size()
    out_bytes, in_bytes = ([size * width for size in sizes] for sizes in (from_others, to_others))
    return transport.alltoall(as_bytes(target), as_bytes(source), out_bytes, in_bytes)
