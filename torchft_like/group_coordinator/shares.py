"""Who adds up what, where each rank shall have a part of a sum: shares of the elements, as plain numbers.

Each rank adds up its own part, up to an even share; what a rank wants beyond that is added up by those who
want less, and handed over. So nobody receives much more than in an even reduce-scatter, and no element moves
twice that need not.

Pure: it knows numbers of elements and ranks, and neither tensors nor groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchft_like.group_coordinator.plans import even_sizes

SMALL_BYTES_MAX = 256 * 1024
RECEIVED_TIMES_MAX = 1.1


class Share(NamedTuple):
    """So many elements, which one rank adds up so that another has them; a rank may be its own helper."""

    owner: int
    helper: int
    size: int


def shares_of(wanted: Sequence[int], width: int) -> tuple[Share, ...]:
    """Who adds up what, in the order of the elements.

    Without helpers where the whole is small, or the rank that wants most still receives hardly more than
    the size of the whole: they would cost another exchange.

    Args:
        wanted: how many elements of the sum each rank wants.
        width: bytes of an element.
    """
    total = sum(wanted)
    received_max = max(wanted) * (len(wanted) - 1)
    if total * width <= SMALL_BYTES_MAX or received_max <= total * RECEIVED_TIMES_MAX:
        limits: Sequence[int] = wanted
    else:
        limits = even_sizes(total, len(wanted))
    return tuple(_shared(wanted, limits))


def _shared(wanted: Sequence[int], limits: Sequence[int]) -> Iterator[Share]:
    """No rank adds up more than its limit; together the limits suffice."""
    spare = [limit - min(size, limit) for size, limit in zip(wanted, limits, strict=True)]
    helper = 0
    for owner, (size, limit) in enumerate(zip(wanted, limits, strict=True)):
        left = size - (own := min(size, limit))
        if own:
            yield Share(owner, owner, own)
        while left:
            while not spare[helper]:
                helper += 1
            part = min(left, spare[helper])
            yield Share(owner, helper, part)
            spare[helper] -= part
            left -= part


def rounds_of(shares: Sequence[Share]) -> list[list[Share]]:
    """Cut into pieces in each of which the helpers are in the order of ranks: one exchange each."""
    rounds: list[list[Share]] = [[]]
    for share in shares:
        if rounds[-1] and share.helper < rounds[-1][-1].helper:
            rounds.append([])
        rounds[-1].append(share)
    return rounds


def sizes_by_helper(shares: Sequence[Share], world_size: int) -> list[int]:
    """How many elements each rank adds up."""
    sizes = [0] * world_size
    for share in shares:
        sizes[share.helper] += share.size
    return sizes


def handed_over(shares: Sequence[Share], rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """How many elements `rank`, having added them up, gives to each other rank, and gets from each."""
    gives, gets = [0] * world_size, [0] * world_size
    for share in shares:
        if share.owner != share.helper == rank:
            gives[share.owner] += share.size
        if share.helper != share.owner == rank:
            gets[share.helper] += share.size
    return gives, gets
