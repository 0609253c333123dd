"""What `quantization` does with rows, by triton's kernels, which read each number and write each byte once.

torch runs some six kernels for it, with temporaries of four bytes for each number between them. This module
needs triton, which torch's CUDA builds include.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchft_like.quantization import FP8, INT8, ROW, ROW_BYTES, SCALE_BYTES, SCALE_MIN, Format

HEIGHT = 8  # rows of a program
# Kernels read constants of this type only.
_HEIGHT, _ROW, _ROW_BYTES, _SCALE_BYTES = map(tl.constexpr, (HEIGHT, ROW, ROW_BYTES, SCALE_BYTES))
_WORDS = tl.constexpr(ROW_BYTES // SCALE_BYTES)  # in a row, as which scales are read and written
_SCALE_MIN, _INT8_LARGEST, _FP8_LARGEST = map(tl.constexpr, (SCALE_MIN, INT8.largest, FP8.largest))


def quantize(numbers: Tensor, rows: Tensor, to: Format) -> None:
    """Write numbers to rows; `quantization.quantize` has the arguments."""
    if count := len(rows):
        with torch.accelerator.device_index(numbers.device.index):
            _quantize[(triton.cdiv(count, HEIGHT),)](
                *(numbers, rows.view(torch.int8), rows.view(torch.float32), numbers.numel(), count),
                to is INT8,
            )


def dequantize(rows: Tensor, numbers: Tensor, of: Format) -> None:
    """Write the numbers of rows; `quantization.dequantize` has the arguments."""
    if count := len(rows):
        with torch.accelerator.device_index(numbers.device.index):
            _dequantize[(triton.cdiv(count, HEIGHT),)](
                *(numbers, rows.view(torch.int8), rows.view(torch.float32), numbers.numel(), count),
                of is INT8,
            )


def add_up(parts: Tensor, total: Tensor, of: Format) -> None:
    """Write the sums of the numbers in the rows of several ranks, in float32 [rows, ROW]."""
    ranks, count, _ = parts.shape
    if count:
        with torch.accelerator.device_index(parts.device.index):
            _add_up[(triton.cdiv(count, HEIGHT),)](
                *(total, parts.view(torch.int8), parts.view(torch.float32), ranks, count),
                of is INT8,
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


@triton.jit
def _places(count):  # type: ignore[no-untyped-def] # a kernel's
    # The rows of this program, which of them there are, and the places of their numbers.
    rows = tl.program_id(0).to(tl.int64) * _HEIGHT + tl.arange(0, _HEIGHT)
    return rows, rows < count, rows[:, None] * _ROW + tl.arange(0, _ROW)[None, :]


@triton.jit
def _code_places(rows):  # type: ignore[no-untyped-def] # a kernel's
    return rows[:, None] * _ROW_BYTES + _SCALE_BYTES + tl.arange(0, _ROW)[None, :]


@triton.jit(do_not_specialize=["numbers", "count"])  # type: ignore[untyped-decorator]
def _quantize(source, codes, scales, numbers, count, is_integer: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel
    rows, is_row, places = _places(count)
    number = tl.load(source + places, mask=places < numbers, other=0.0).to(tl.float32)
    magnitude = tl.abs(number)
    # A maximum may leave NaN out.
    is_bad = tl.max(tl.where(magnitude < float("inf"), 0, 1), axis=1)
    largest: tl.constexpr = _INT8_LARGEST if is_integer else _FP8_LARGEST
    scale = tl.maximum(tl.div_rn(tl.max(magnitude, axis=1), largest), _SCALE_MIN)
    scale = tl.where(is_bad > 0, float("nan"), scale)
    quotient = tl.div_rn(number, tl.broadcast_to(scale[:, None], [_HEIGHT, _ROW]))
    tl.store(scales + rows * _WORDS, scale, mask=is_row)
    tl.store(codes + _code_places(rows), _encoded(quotient, is_integer), mask=is_row[:, None])


@triton.jit(do_not_specialize=["numbers", "count"])  # type: ignore[untyped-decorator]
def _dequantize(target, codes, scales, numbers, count, is_integer: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel
    rows, is_row, places = _places(count)
    scale = tl.load(scales + rows * _WORDS, mask=is_row, other=0.0)
    code = tl.load(codes + _code_places(rows), mask=is_row[:, None], other=0)
    number = _decoded(code, is_integer) * scale[:, None]
    tl.store(target + places, number.to(target.dtype.element_ty), mask=places < numbers)


@triton.jit(do_not_specialize=["ranks", "count"])  # type: ignore[untyped-decorator]
def _add_up(total, codes, scales, ranks, count, is_integer: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel
    rows, is_row, places = _places(count)
    sums = tl.zeros([_HEIGHT, _ROW], dtype=tl.float32)
    for rank in range(ranks):
        sent = rank * count + rows
        scale = tl.load(scales + sent * _WORDS, mask=is_row, other=0.0)
        code = tl.load(codes + _code_places(sent), mask=is_row[:, None], other=0)
        sums += _decoded(code, is_integer) * scale[:, None]
    tl.store(total + places, sums, mask=is_row[:, None])
