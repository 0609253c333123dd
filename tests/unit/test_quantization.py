"""Rows of bytes: the error of every number is within the bound that `quantization` states."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchft_like import quantization
from torchft_like.quantization import FORMATS, FP8, INT8, ROW, ROW_BYTES, SCALE_MIN, Format, rows_for

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SLACK = 1 + 2**-15  # a tie is decided wrongly where the quotient was rounded, in float32


def bytes_of(numbers: Tensor, to: Format) -> Tensor:
    rows = torch.full((rows_for(numbers.numel()), ROW_BYTES), 255, dtype=torch.uint8)
    quantization.quantize(numbers, rows, to)
    return rows


def there_and_back(numbers: Tensor, to: Format, dtype: torch.dtype = torch.float64) -> Tensor:
    read = torch.full_like(numbers, -1, dtype=dtype)
    quantization.dequantize(bytes_of(numbers, to), read, to)
    return read


def bound(numbers: Tensor, to: Format) -> Tensor:
    """The greatest error of each number, in float64."""
    magnitudes = numbers.double().abs()
    largest = torch.cat([part.amax().expand(len(part)) for part in torch.split(magnitudes, ROW)])
    if to is INT8:
        return (largest / 254).clamp(min=SCALE_MIN / 2) * SLACK
    return torch.maximum(magnitudes / 17, (largest / 458_752).clamp(min=SCALE_MIN / 1024)) * SLACK


@st.composite
def some_numbers(draw: st.DrawFn) -> Tensor:
    """Numbers of any magnitude that the dtype has, in rows of different ones."""
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 3 * ROW + 1))
    exponents = torch.linspace(*draw(st.tuples(st.integers(-45, 37), st.integers(-45, 37))), count)
    numbers = torch.randn(count, dtype=torch.float64, generator=generator) * 10.0**exponents
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return numbers.clamp(-limit, limit).to(dtype)


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
@settings(max_examples=200)
@given(some_numbers())
def test_no_number_is_wrong_by_more_than_the_bound(to: Format, numbers: Tensor) -> None:
    read = there_and_back(numbers, to)
    assert ((read - numbers.double()).abs() <= bound(numbers, to)).all()


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
def test_the_bound_is_reached(to: Format) -> None:
    """A looser one would let a coarser format pass."""
    numbers = torch.linspace(-1, 1, 100 * ROW)
    numbers[::ROW] = 1.0
    worst = ((there_and_back(numbers, to) - numbers.double()).abs() / bound(numbers, to)).amax()
    assert 0.99 < worst <= 1


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_makes_its_row_nan_and_no_other(
    to: Format, bad: float, dtype: torch.dtype
) -> None:
    numbers = torch.ones(4 * ROW - 9, dtype=dtype)
    numbers[ROW + 3] = numbers[-1] = bad
    rows = torch.split(there_and_back(numbers, to, dtype), ROW)
    assert [row.isnan().all().item() for row in rows] == [False, True, False, True]
    assert torch.equal(torch.cat([rows[0], rows[2]]), torch.ones(2 * ROW, dtype=dtype))


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
def test_zeros_stay_zeros_and_are_sent_as_zeros(to: Format) -> None:
    assert torch.equal(there_and_back(torch.zeros(ROW + 1), to), torch.zeros(ROW + 1, dtype=torch.float64))
    codes = bytes_of(torch.full((1,), 5.0), to)[0, 4:]
    assert codes[0] != 0
    assert not codes[1:].any()
    assert bytes_of(torch.empty(0), to).shape == (0, ROW_BYTES)


def test_the_codes_of_fp8_are_torchs() -> None:
    """All of them, by their bytes; those of NaN are in no row whose scale is a number."""
    rows = torch.zeros(1, ROW_BYTES, dtype=torch.uint8)
    rows[0, :4] = torch.tensor([0, 0, 128, 63])  # 1.0
    rows[0, 4:] = codes = torch.arange(256, dtype=torch.uint8)
    read, torchs = torch.empty(ROW), codes.view(torch.float8_e4m3fn).float()
    quantization.dequantize(rows, read, FP8)
    assert torch.equal(read[~torchs.isnan()], torchs[~torchs.isnan()])


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
def test_sums_are_those_of_the_numbers_that_were_sent(to: Format) -> None:
    numbers = torch.randn(3, 2 * ROW, generator=torch.Generator().manual_seed(3))
    parts = torch.stack([bytes_of(each, to) for each in numbers])
    sent = torch.stack([there_and_back(each, to) for each in numbers])
    for divide_by in (None, 2):
        total = torch.full((2, ROW), torch.nan)
        quantization.add_up(parts, total, divide_by, to)
        expected = sent.sum(0) / (divide_by or 1)
        torch.testing.assert_close(total.view(-1).double(), expected, atol=1e-6, rtol=1e-6)
        rows, lost = torch.empty(2, ROW_BYTES, dtype=torch.uint8), torch.full((2, ROW), torch.nan)
        quantization.reduce(parts, rows, divide_by, to, lost)
        assert torch.equal(rows, bytes_of(total.view(-1), to))
        assert torch.equal(lost.view(-1), total.view(-1) - there_and_back(total.view(-1), to, torch.float32))


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="no format 'int4' to quantize to; there are fp8, int8"):
        quantization.format_named("int4")


COMPARE = """
import torch
from torchft_like import quantization, quantization_kernels as kernels
dtypes = (torch.float32, torch.float16)
format = quantization.format_named("{to}")
print(quantization.agree(kernels, torch.device("cpu"), format, dtypes))
"""


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
@pytest.mark.parametrize("to", FORMATS)
def test_kernels_do_what_torch_does(to: str) -> None:
    """In triton's interpreter, for which the process must be set up before anything in it imports triton."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", COMPARE.format(to=to)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
