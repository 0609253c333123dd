"""Which part goes where."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchft_like.communicator.tensors import (
    BUCKET_BYTES_MAX,
    SMALL_BYTES_MAX,
    buckets,
    checked_dim,
    checked_rank,
    checked_sizes,
    even_sizes,
    overlaps,
)

WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: checked_dim(3, 3), "dim 3 is not one of the 3"),
    (lambda: checked_dim(-4, 3), "dim -4"),
    (lambda: checked_dim(True, 3), "whole number"),
    (lambda: checked_dim("0", 3), "whole number"),  # type: ignore[arg-type]
    (lambda: checked_dim(0, 0), "without dimensions"),
    (lambda: checked_rank(4, 4, "src"), "src 4 is no rank of the group: they are 0 to 3"),
    (lambda: checked_rank(-1, 4, "dst"), "dst -1"),
    (lambda: checked_rank(False, 4, "dst"), "dst False"),
    (lambda: checked_sizes([1, 2], 3), "2 sizes for 3 ranks"),
    (lambda: checked_sizes([1, -2], 2), "from 0 on"),
    (lambda: checked_sizes([1, 2.0], 2), "whole numbers"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("act", "said"), WRONG)
def test_wrong_numbers_are_refused_with_a_reason(act: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        act()


@given(st.integers(0, 1000), st.integers(1, 20))
def test_even_sizes_differ_by_one_at_the_most_and_shrink(rows: int, parts: int) -> None:
    sizes = even_sizes(rows, parts)
    assert sum(sizes) == rows
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes == tuple(len(part) for part in torch.empty(rows).tensor_split(parts))


def test_large_tensors_travel_alone_and_small_ones_together() -> None:
    large, small = SMALL_BYTES_MAX + 1, 100
    sizes = [small, large, 0, small, small, large]
    assert buckets(sizes, ["cpu"] * 6) == [(1,), (5,), (0, 3, 4)]


@given(st.lists(st.integers(0, 3 * SMALL_BYTES_MAX), max_size=300))
def test_every_tensor_that_has_bytes_travels_once_in_a_bounded_bucket(sizes: list[int]) -> None:
    planned = buckets(sizes, ["cpu"] * len(sizes))
    travelling = sorted(index for bucket in planned for index in bucket)
    assert travelling == [index for index, size in enumerate(sizes) if size]
    assert all(sum(sizes[i] for i in bucket) <= BUCKET_BYTES_MAX for bucket in planned if len(bucket) > 1)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_what_a_rank_hands_over_is_what_the_other_gets(parts: list[int]) -> None:
    ranks, chunk = range(len(parts)), -(-sum(parts) // len(parts))
    plans = [overlaps(parts, chunk, rank) for rank in ranks]
    for rank in ranks:
        gives, gets = plans[rank]
        assert gives == [plans[other][1][rank] for other in ranks]
        assert sum(gets) == parts[rank]
        assert sum(gives) <= chunk
