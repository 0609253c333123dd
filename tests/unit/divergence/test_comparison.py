"""Who is wrong, seen from what every member says of its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_like.core.state_comparison import UNKNOWN_RANK, Divergence, RankFingerprint, combine, compare

pytestmark = pytest.mark.agreement

LAYOUT, OTHER_LAYOUT = b"layout 1", b"layout 2"
VALUES = st.integers(0, 2**64 - 1)


@dataclass(frozen=True)
class Member:
    replica_id: str
    fingerprint: bytes


def group(*values: int, layout: bytes = LAYOUT, heals: bool = True) -> bytes:
    """What a replica group with these ranks says."""
    return combine([RankFingerprint(heals, layout, value).to_bytes() for value in values])


def members(*fingerprints: bytes) -> list[Member]:
    return [Member("abcdefghij"[index], fingerprint) for index, fingerprint in enumerate(fingerprints)]


def found(fingerprints: Sequence[bytes]) -> Divergence:
    divergence = compare(members(*fingerprints))
    assert divergence is not None
    return divergence


@pytest.mark.parametrize("values", sorted(set(permutations([1, 1, 1, 2]))))
def test_the_one_that_differs_is_wrong_wherever_it_stands(values: tuple[int, ...]) -> None:
    divergence = found([group(value) for value in values])
    assert divergence.replica_ids == ("abcd"[values.index(2)],)
    assert set(divergence.kept) == set("abcd") - set(divergence.replica_ids)
    assert divergence.heals
    assert divergence.comparable
    assert not divergence.tied


@pytest.mark.parametrize(
    ("values", "kept"),
    [((1, 2), "a"), ((2, 1), "a"), ((1, 2, 2, 1), "ad"), ((1, 2, 3), "a"), ((3, 1, 2, 2, 1), "be")],
)
def test_in_a_tie_the_lowest_replica_rank_is_decisive(values: tuple[int, ...], kept: str) -> None:
    divergence = found([group(value) for value in values])
    assert divergence.tied
    assert divergence.kept == tuple(kept)


@given(st.lists(st.binary(max_size=60) | st.binary(min_size=41, max_size=41), max_size=5))
def test_whatever_comes_from_the_network_is_compared_or_counts_as_nothing(fingerprints: list[bytes]) -> None:
    assert len(combine(fingerprints)) in (0, len(group(1)))
    divergence = compare(members(*fingerprints))
    if any(len(fingerprint) != len(group(1)) for fingerprint in fingerprints) or len(set(fingerprints)) < 2:
        assert divergence is None
    elif divergence is not None:
        assert len(divergence.kept) + len(divergence.replica_ids) == len(fingerprints)


def test_a_difference_in_one_that_is_not_comparable_is_not_a_difference_of_values() -> None:
    divergence = found([group(1), group(2), group(1, layout=OTHER_LAYOUT)])
    assert divergence.replica_ids == ("c",)


def test_nobody_heals_where_one_wants_reports_only() -> None:
    divergence = found([group(1), group(1, heals=False), group(2)])
    assert divergence.replica_ids == ("c",)
    assert not divergence.heals


def test_another_wish_alone_is_no_divergence() -> None:
    assert compare(members(group(1), group(1, heals=False))) is None


def test_a_group_says_nothing_until_all_of_its_ranks_do() -> None:
    rank = RankFingerprint(True, LAYOUT, 1).to_bytes()
    assert combine([rank, b""]) == b""
    assert combine([rank, rank]) != b""


@given(st.lists(VALUES, min_size=1, max_size=300), st.data())
def test_the_rank_that_differs_is_named(values: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(VALUES.filter(lambda value: value != values[rank]))
    changed = [*values[:rank], other, *values[rank + 1 :]]
    divergence = found([group(*values), group(*values), group(*changed)])
    assert divergence.replica_ids == ("c",)
    assert divergence.group_ranks == (rank,)


def test_several_ranks_that_differ_are_not_taken_for_one() -> None:
    good = list(range(100, 108))
    bad = [good[0] + 2**40 + 1, *good[1:5], good[5] + 2**50 + 3, *good[6:]]
    assert found([group(*good), group(*good), group(*bad)]).group_ranks == (UNKNOWN_RANK,)


def test_exchanged_ranks_are_a_difference() -> None:
    assert found([group(1, 2), group(1, 2), group(2, 1)]).group_ranks == (UNKNOWN_RANK,)
