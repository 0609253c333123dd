"""Who is with whom: the tables of the documentation, and what holds for all sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_like.core.topology import (
    Partition,
    data_parallel_ranks,
    replicated_ranks,
    sharded_ranks,
    tensor_parallel_ranks,
)
from torchft_like.errors import TopologyError


@pytest.mark.parametrize("part", [0, -1, 3, 16])
def test_a_part_that_does_not_divide_the_whole_is_refused_with_those_that_do(part: int) -> None:
    for rule, sizes in (
        (tensor_parallel_ranks, "1, 2, 4, 8"),
        (data_parallel_ranks, "1, 2, 4, 8"),
        (sharded_ranks, "2, 4, 8"),
        (replicated_ranks, "2, 4, 8"),
    ):
        with pytest.raises(TopologyError, match=f"take one of {sizes}"):
            rule(8, part)


@st.composite
def whole_and_part(draw: st.DrawFn) -> tuple[int, int]:
    part, parts = draw(st.integers(2, 12)), draw(st.integers(1, 12))
    return part * parts, part


def place(partition: Partition, rank: int) -> tuple[int, int]:
    """Which part a rank is in, and where in it."""
    return next((number, part.index(rank)) for number, part in enumerate(partition) if rank in part)


@given(whole_and_part())
def test_every_rank_is_in_exactly_one_part_of_each_kind(sizes: tuple[int, int]) -> None:
    size, part = sizes
    for rule in (tensor_parallel_ranks, data_parallel_ranks, sharded_ranks, replicated_ranks):
        ranks = [rank for ranks in rule(size, part) for rank in ranks]
        assert sorted(ranks) == list(range(size))
        assert all(ranks == sorted(ranks) for ranks in rule(size, part))


@given(whole_and_part())
def test_the_two_kinds_cross_in_exactly_one_rank(sizes: tuple[int, int]) -> None:
    size, part = sizes
    for near, far in (
        (tensor_parallel_ranks(size, part), data_parallel_ranks(size, part)),
        (sharded_ranks(size, part), replicated_ranks(size, part)),
    ):
        assert all(len(set(a) & set(b)) == 1 for a in near for b in far)


@given(whole_and_part())
def test_a_ranks_place_in_one_kind_is_its_part_of_the_other(sizes: tuple[int, int]) -> None:
    size, part = sizes
    near, far = tensor_parallel_ranks(size, part), data_parallel_ranks(size, part)
    for rank in range(size):
        assert place(near, rank) == tuple(reversed(place(far, rank)))
