"""Every byte of a state belongs to exactly one slice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from torchft_like.core.state_slices import ALIGNMENT, Slices

SIZES = st.lists(st.integers(0, 200), max_size=12)
COUNTS = st.integers(1, 40)


def bytes_of(sizes: Sequence[int], count: int, number: int) -> list[tuple[int, int]]:
    pieces = Slices(sizes, count).pieces(number)
    return [(piece.part, byte) for piece in pieces for byte in range(piece.start, piece.stop)]


@given(SIZES, COUNTS, st.integers(0, 1000))
def test_slices_of_consecutive_steps_cover_every_byte_once(
    sizes: list[int], count: int, first_step: int
) -> None:
    covered = Counter(
        place for step in range(first_step, first_step + count) for place in bytes_of(sizes, count, step)
    )
    assert covered == Counter((part, byte) for part, size in enumerate(sizes) for byte in range(size))


@given(SIZES, COUNTS)
def test_slices_are_cut_where_an_element_of_any_dtype_ends(sizes: list[int], count: int) -> None:
    for number in range(count):
        for piece in Slices(sizes, count).pieces(number):
            assert 0 <= piece.start < piece.stop <= sizes[piece.part]
            assert piece.start % ALIGNMENT == 0
            assert piece.stop % ALIGNMENT == 0 or piece.stop == sizes[piece.part]


@given(SIZES, COUNTS)
def test_no_slice_is_longer_than_its_share(sizes: list[int], count: int) -> None:
    total = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    for number in range(count):
        assert len(bytes_of(sizes, count, number)) < total / count + ALIGNMENT


def test_a_state_of_nothing_has_no_pieces() -> None:
    assert bytes_of([], 4, 2) == []
    assert bytes_of([0, 0], 4, 2) == []
