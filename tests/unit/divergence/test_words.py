"""The sum of a tensor's words: the same for the same bytes, another for any other."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.faults import raising
from torchft_like.core.state_comparison import ALIGNMENT, Slices
from torchft_like.divergence import words
from torchft_like.divergence.words import ROW, _factors, word_sum

pytestmark = pytest.mark.agreement

CPU = torch.device("cpu")
MODULUS = 2**64

# Below, at and above the lengths at which the computation takes another way.
LENGTHS = [1, 3, 4, 5, 4 * ROW - 1, 4 * ROW, 4 * ROW + 1, 12 * ROW + 7]


@cache
def random_bytes(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)


def sum_of(tensor: Tensor) -> int:
    return int(word_sum(tensor).item())


@cache
def sum_of_random_bytes(length: int) -> int:
    return sum_of(random_bytes(length))


@pytest.mark.parametrize("length", LENGTHS)
@given(data=st.data())
@settings(max_examples=15)
def test_a_changed_bit_anywhere_is_found(length: int, data: st.DataObject) -> None:
    place, bit = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 7))
    changed = random_bytes(length).clone()
    changed[place] ^= 1 << bit
    assert sum_of(changed) != sum_of_random_bytes(length)


@pytest.mark.parametrize("bit", [0, 7], ids=["lowest", "sign"])
def test_two_equal_changes_do_not_cancel_each_other(bit: int) -> None:
    """A memory that loses the same bit line of many words is what real faults look like."""
    original = torch.zeros(4 * 64, dtype=torch.uint8)
    sums = {sum_of(original)}
    pairs = [(one, other) for one in range(64) for other in range(one)]
    for one, other in pairs:
        changed = original.clone()
        changed[4 * one + 3] ^= 1 << bit
        changed[4 * other + 3] ^= 1 << bit
        sums.add(sum_of(changed))
    assert len(sums) == 1 + len(pairs)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_sum_is_that_of_the_definition(length: int) -> None:
    data = random_bytes(length).numpy().tobytes()
    numbers = [
        int.from_bytes(data[i : i + 4], "little", signed=len(data[i : i + 4]) == 4)
        for i in range(0, length, 4)
    ]
    rows = [weighted(numbers[i : i + ROW], "words") for i in range(0, len(numbers), ROW)]
    expected = rows[0] if len(rows) == 1 else weighted(rows, "rows")
    assert sum_of(random_bytes(length)) % MODULUS == expected % MODULUS


def weighted(numbers: list[int], purpose: str) -> int:
    factors: list[int] = _factors(purpose, CPU).tolist()
    return sum(word * factor for word, factor in zip(numbers, factors, strict=False)) % MODULUS


def test_memory_that_is_not_aligned_has_the_same_sum() -> None:
    memory = random_bytes(41)
    assert sum_of(memory[1:]) == sum_of(memory[1:].clone())
    halves = torch.randn(41).bfloat16()
    assert sum_of(halves[1:]) == sum_of(halves[1:].clone())


def test_a_tensor_of_nothing_has_a_sum() -> None:
    assert sum_of(torch.empty(0)) == sum_of(torch.empty(0, dtype=torch.bool)) == 0


def test_the_factors_are_odd_and_the_same_in_every_process() -> None:
    factors = _factors("words", CPU)
    assert bool((factors % 2 != 0).all())
    assert factors[:2].tolist() == [-5563183019877496675, 6068946137133262543]


@pytest.mark.parametrize("rows", [2, 3, 100])
def test_the_sum_is_the_same_however_many_rows_at_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes more of them than a CPU."""
    tensor = random_bytes(4 * 7 * ROW + 9)
    expected = sum_of(tensor)
    monkeypatch.setattr(words, "_ROWS_ON_CPU", rows)
    assert sum_of(tensor) == expected


# Which part of a state is read in which step.


SIZES = st.lists(st.integers(0, 200), max_size=12)
COUNTS = st.integers(1, 40)


def bytes_of(sizes: Sequence[int], count: int, number: int) -> list[tuple[int, int]]:
    pieces = Slices(sizes, count).pieces(number)
    return [(piece.part, byte) for piece in pieces for byte in range(piece.start, piece.stop)]


@given(SIZES, COUNTS, st.integers(0, 1000))
def test_consecutive_slices_cover_every_byte_once(sizes: list[int], count: int, first_step: int) -> None:
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


# The kernel for fingerprints on a GPU, in triton's interpreter, where torch has brought triton along.


LIMIT_S = 110.0

INTERPRETED = """
import torch
from torchft_like.divergence import fused, words

torch.manual_seed(5)
for rows, dtype in ((1, torch.int32), (2, torch.int64), (19, torch.int32)):
    matrix = torch.randint(-2**31, 2**31, (rows, 2 * fused.COLUMNS)).to(dtype)
    factors = torch.randint(-2**62, 2**62, (2 * fused.COLUMNS,)) | 1
    assert torch.equal(fused.row_sums(matrix, factors), words._row_sums(matrix, factors)), (rows, dtype)
    assert not torch.equal(fused.row_sums(matrix, factors), words._row_sums(matrix + 1, factors))
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="torch without CUDA brings no triton")
def test_the_kernel_gives_what_torch_gives() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr


class OnGpu:
    """A device by its name alone."""

    type = "cuda"


def use(monkeypatch: pytest.MonkeyPatch, kernel: words.Kernel | None) -> words.Kernel:
    """What is used on a device for which `kernel` is offered."""
    module = None if kernel is None else SimpleNamespace(row_sums=kernel)
    monkeypatch.setitem(sys.modules, "torchft_like.divergence.fused", module)
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda count, dtype, device: arange(count, dtype=dtype))
    monkeypatch.setattr(words, "_factors", lambda purpose, device: arange(words.ROW) * 2 + 1)
    return words._kernel_for.__wrapped__(OnGpu())


def test_a_kernel_that_gives_the_same_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(matrix: Tensor, factors: Tensor) -> Tensor:
        return (matrix * factors).sum(dim=1)

    assert use(monkeypatch, same) is same


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (lambda matrix, factors: matrix.sum(dim=1), "are not torch's"),
        (raising(RuntimeError("Failed to find C compiler")), "Failed to find C compiler"),
    ],
    ids=["something else", "not compiled"],
)
def test_a_kernel_that_does_not_work_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: words.Kernel, why: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert use(monkeypatch, kernel) is words._row_sums
    assert why in caplog.text


def test_without_triton_torch_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert use(monkeypatch, None) is words._row_sums
