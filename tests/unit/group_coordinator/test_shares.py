"""Who adds up what of a sum that several ranks want parts of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchft_like.group_coordinator.plans import even_sizes
from torchft_like.group_coordinator.shares import (
    RECEIVED_TIMES_MAX,
    SMALL_BYTES_MAX,
    Share,
    handed_over,
    rounds_of,
    shares_of,
    sizes_by_helper,
)

LARGE = SMALL_BYTES_MAX  # bytes of an element: then no sum is small


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_every_element_is_added_up_once_for_its_owner_in_the_order_of_the_elements(wanted: list[int]) -> None:
    shares = shares_of(wanted, LARGE)
    owners = [share.owner for share in shares]
    assert owners == sorted(owners)
    assert all(share.size > 0 for share in shares)
    for owner, size in enumerate(wanted):
        assert sum(share.size for share in shares if share.owner == owner) == size


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_nobody_adds_up_more_than_an_even_share_unless_no_helper_is_worth_it(wanted: list[int]) -> None:
    shares = shares_of(wanted, LARGE)
    added = sizes_by_helper(shares, len(wanted))
    if max(wanted) * (len(wanted) - 1) > sum(wanted) * RECEIVED_TIMES_MAX:
        assert max(added) <= max(even_sizes(sum(wanted), len(wanted)))
    else:
        assert added == wanted


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_each_owner_adds_up_first_and_its_helpers_follow_in_the_order_of_ranks(wanted: list[int]) -> None:
    """So that what they hand over lands in one piece, behind the owner's own."""
    shares = shares_of(wanted, LARGE)
    for owner in range(len(wanted)):
        helpers = [share.helper for share in shares if share.owner == owner]
        assert owner not in helpers[1:]
        others = [helper for helper in helpers if helper != owner]
        assert others == sorted(set(others))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_what_a_rank_hands_over_is_what_the_other_gets(wanted: list[int]) -> None:
    ranks, shares = range(len(wanted)), shares_of(wanted, LARGE)
    plans = [handed_over(shares, rank, len(wanted)) for rank in ranks]
    added = sizes_by_helper(shares, len(wanted))
    for rank in ranks:
        gives, gets = plans[rank]
        assert gives == [plans[other][1][rank] for other in ranks]
        assert gives[rank] == 0
        assert added[rank] - sum(gives) + sum(gets) == wanted[rank]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_rounds_keep_the_order_of_the_elements_and_have_helpers_in_the_order_of_ranks(
    wanted: list[int],
) -> None:
    shares = shares_of(wanted, LARGE)
    rounds = rounds_of(shares)
    assert [share for exchange in rounds for share in exchange] == list(shares)
    for exchange in rounds:
        helpers = [share.helper for share in exchange]
        assert helpers == sorted(helpers)


def test_uneven_sums_are_shared_out_where_that_pays() -> None:
    many = SMALL_BYTES_MAX
    assert shares_of([3, 1], LARGE) == (Share(0, 0, 3), Share(1, 1, 1))  # of two none receives much
    assert shares_of([many, many, 0], 4) == (Share(0, 0, many), Share(1, 1, many))
    assert shares_of([many // 8, 0, 0, 0], 4) == (Share(0, 0, many // 8),)  # small
    assert shares_of([0, 0], 4) == ()
    assert shares_of([6, 2, 4, 0], LARGE) == (
        Share(0, 0, 3), Share(0, 1, 1), Share(0, 3, 2), Share(1, 1, 2), Share(2, 2, 3), Share(2, 3, 1),
    )  # fmt: skip
    assert len(rounds_of(shares_of([6, 2, 4, 0], LARGE))) == 2
