"""What `quantization` does with rows, by triton's kernels, which read each number and write each byte once.

torch runs some six kernels for it, with temporaries of four bytes for each number between them. This module
needs triton, which torch's CUDA builds include.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchft_like.quantization import INT8, ROW, ROW_BYTES, SCALE_BYTES, SCALE_MIN, Format

HEIGHT = 8  # rows of a program
_WORDS = ROW_BYTES // SCALE_BYTES  # in a row, as which scales are read and written


def quantize(numbers: Tensor, rows: Tensor, to: Format) -> None:
    """Write numbers to rows; `quantization.quantize` has the arguments."""
    if count := len(rows):
        with torch.accelerator.device_index(numbers.device.index):
            _quantize[(triton.cdiv(count, HEIGHT),)](
                *(numbers, rows.view(torch.int8), rows.view(torch.float32), numbers.numel(), count),
                *(to.largest, SCALE_MIN, to is INT8, ROW, ROW_BYTES, _WORDS, HEIGHT),
            )


def dequantize(rows: Tensor, numbers: Tensor, of: Format) -> None:
    """Write the numbers of rows; `quantization.dequantize` has the arguments."""
    if count := len(rows):
        with torch.accelerator.device_index(numbers.device.index):
            _dequantize[(triton.cdiv(count, HEIGHT),)](
                *(numbers, rows.view(torch.int8), rows.view(torch.float32), numbers.numel(), count),
                *(of is INT8, ROW, ROW_BYTES, _WORDS, HEIGHT),
            )


def add_up(parts: Tensor, total: Tensor, of: Format) -> None:
    """Write the sums of the numbers in the rows of several ranks, in float32 [rows, ROW]."""
    ranks, count, _ = parts.shape
    if count:
        with torch.accelerator.device_index(parts.device.index):
            _add_up[(triton.cdiv(count, HEIGHT),)](
                *(total, parts.view(torch.int8), parts.view(torch.float32), ranks, count),
                *(of is INT8, ROW, ROW_BYTES, _WORDS, HEIGHT),
            )


@triton.jit
def _rounded(number):  # type: ignore[no-untyped-def] # a kernel's
    # A number below 2**22 loses its fraction, to the even one of two integers.
    return (number + 12582912.0) - 12582912.0


@triton.jit  # type: ignore[untyped-decorator]
def _encoded(number, is_integer: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel's
    # triton converts to float8 on the newest GPUs only, and its interpreter rounds some numbers wrongly.
    if is_integer:
        code = _rounded(number).to(tl.int32)
    else:
        bits = number.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Three bits of the mantissa stay, and the exponent counts from -7 instead of -127.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        small = _rounded(tl.abs(number) * 512.0).to(tl.int32)
        code = tl.where(tl.abs(number) < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    return code.to(tl.int8)


@triton.jit  # type: ignore[untyped-decorator]
def _decoded(code, is_integer: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel's
    if is_integer:
        number = code.to(tl.float32)
    else:  # the bits go to their places in float16, whose exponent counts from -15
        moved = ((code.to(tl.int32) << 7) & 0xBFFF).to(tl.int16)
        number = moved.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return number


@triton.jit(do_not_specialize=["numbers", "count"])  # type: ignore[untyped-decorator]
def _quantize(  # type: ignore[no-untyped-def] # a kernel
    source, codes, scales, numbers, count,
    largest: tl.constexpr, scale_min: tl.constexpr, is_integer: tl.constexpr,
    row: tl.constexpr, row_bytes: tl.constexpr, words: tl.constexpr, height: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * height
    lines = first + tl.arange(0, height)
    columns = tl.arange(0, row)
    places = lines[:, None] * row + columns[None, :]
    number = tl.load(source + places, mask=places < numbers, other=0.0).to(tl.float32)
    magnitude = tl.abs(number)
    # A maximum may leave NaN out.
    is_bad = tl.max(tl.where(magnitude < float("inf"), 0, 1), axis=1)
    scale = tl.maximum(tl.div_rn(tl.max(magnitude, axis=1), largest), scale_min)
    scale = tl.where(is_bad > 0, float("nan"), scale)
    quotient = tl.div_rn(number, tl.broadcast_to(scale[:, None], [height, row]))
    is_row = lines < count
    tl.store(scales + lines * words, scale, mask=is_row)
    code = codes + lines[:, None] * row_bytes + 4 + columns[None, :]
    tl.store(code, _encoded(quotient, is_integer), mask=is_row[:, None])


@triton.jit(do_not_specialize=["numbers", "count"])  # type: ignore[untyped-decorator]
def _dequantize(  # type: ignore[no-untyped-def] # a kernel
    target, codes, scales, numbers, count,
    is_integer: tl.constexpr, row: tl.constexpr, row_bytes: tl.constexpr, words: tl.constexpr,
    height: tl.constexpr,
):  # fmt: skip
    lines = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    columns = tl.arange(0, row)
    is_row = lines < count
    scale = tl.load(scales + lines * words, mask=is_row, other=0.0)
    code = tl.load(codes + lines[:, None] * row_bytes + 4 + columns[None, :], mask=is_row[:, None], other=0)
    places = lines[:, None] * row + columns[None, :]
    number = _decoded(code, is_integer) * scale[:, None]
    tl.store(target + places, number.to(target.dtype.element_ty), mask=places < numbers)


@triton.jit(do_not_specialize=["ranks", "count"])  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def] # a kernel
    total, codes, scales, ranks, count,
    is_integer: tl.constexpr, row: tl.constexpr, row_bytes: tl.constexpr, words: tl.constexpr,
    height: tl.constexpr,
):  # fmt: skip
    lines = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    columns = tl.arange(0, row)
    is_row = lines < count
    sums = tl.zeros([height, row], dtype=tl.float32)
    for rank in range(ranks):
        at = rank * count + lines
        scale = tl.load(scales + at * words, mask=is_row, other=0.0)
        code = tl.load(codes + at[:, None] * row_bytes + 4 + columns[None, :], mask=is_row[:, None], other=0)
        sums += _decoded(code, is_integer) * scale[:, None]
    tl.store(total + lines[:, None] * row + columns[None, :], sums, mask=is_row[:, None])
