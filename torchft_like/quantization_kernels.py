"""What `quantization` does with rows, by triton's kernels, which read each number and write each byte once.

torch runs some six kernels for it, with temporaries of four bytes for each number between them. This module
needs triton, which torch's CUDA builds include.
"""

from __future__ import annotations

from typing import Any

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
    _launch(_quantize, len(rows), rows.view(torch.int8), numbers, numbers.numel(), len(rows), to is INT8)


def dequantize(rows: Tensor, numbers: Tensor, of: Format) -> None:
    """Write the numbers of rows; `quantization.dequantize` has the arguments."""
    _launch(_dequantize, len(rows), rows.view(torch.int8), numbers, numbers.numel(), len(rows), of is INT8)


def add_up(parts: Tensor, total: Tensor, divide_by: int | None, of: Format) -> None:
    """Write the sums of several ranks' numbers; `quantization.add_up` has the arguments."""
    ranks, count, _ = parts.shape
    _launch(_add_up, count, parts.view(torch.int8), total, ranks, count, divide_by or 1, of is INT8)


def reduce(parts: Tensor, rows: Tensor, divide_by: int | None, of: Format, lost: Tensor | None) -> None:
    """Add up, and quantize the sums, in one pass; `quantization.reduce` has the arguments."""
    ranks, count, _ = parts.shape
    own = rows.view(torch.int8)
    _launch(_reduce, count, parts.view(torch.int8), own, lost, ranks, count, divide_by or 1, of is INT8)


def _launch(kernel: Any, count: int, bytes_: Tensor, *args: object) -> None:
    """Run a kernel on so many rows; a product is rounded before it is added, as torch does it."""
    if count:
        with torch.accelerator.device_index(bytes_.device.index):
            kernel[(triton.cdiv(count, HEIGHT),)](bytes_, *args, enable_fp_fusion=False)


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
def _scales(bytes_):  # type: ignore[no-untyped-def] # a kernel's
    return bytes_.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def _code_places(rows):  # type: ignore[no-untyped-def] # a kernel's
    return rows[:, None] * _ROW_BYTES + _SCALE_BYTES + tl.arange(0, _ROW)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _write(number, bytes_, rows, is_row, is_integer: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel's
    # Writes rows of numbers; returns their codes and scales.
    magnitude = tl.abs(number)
    # A maximum may leave NaN out.
    is_bad = tl.max(tl.where(magnitude < float("inf"), 0, 1), axis=1)
    largest: tl.constexpr = _INT8_LARGEST if is_integer else _FP8_LARGEST
    scale = tl.maximum(tl.div_rn(tl.max(magnitude, axis=1), largest), _SCALE_MIN)
    scale = tl.where(is_bad > 0, float("nan"), scale)
    code = _encoded(tl.div_rn(number, tl.broadcast_to(scale[:, None], [_HEIGHT, _ROW])), is_integer)
    tl.store(_scales(bytes_) + rows * _WORDS, scale, mask=is_row)
    tl.store(bytes_ + _code_places(rows), code, mask=is_row[:, None])
    return code, scale


@triton.jit  # type: ignore[untyped-decorator]
def _read(bytes_, rows, is_row, is_integer: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel's
    scale = tl.load(_scales(bytes_) + rows * _WORDS, mask=is_row, other=0.0)
    code = tl.load(bytes_ + _code_places(rows), mask=is_row[:, None], other=0)
    return _decoded(code, is_integer) * scale[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _sums(bytes_, rows, is_row, ranks, count, divide_by, is_integer: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel's
    total = tl.zeros([_HEIGHT, _ROW], dtype=tl.float32)
    for rank in range(ranks):
        total += _read(bytes_, rank * count + rows, is_row, is_integer)
    return tl.div_rn(total, tl.full([_HEIGHT, _ROW], 1.0, tl.float32) * divide_by)


@triton.jit(do_not_specialize=["numbers", "count"])  # type: ignore[untyped-decorator]
def _quantize(bytes_, source, numbers, count, is_integer: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel
    rows, is_row, places = _places(count)
    number = tl.load(source + places, mask=places < numbers, other=0.0).to(tl.float32)
    _write(number, bytes_, rows, is_row, is_integer)


@triton.jit(do_not_specialize=["numbers", "count"])  # type: ignore[untyped-decorator]
def _dequantize(bytes_, target, numbers, count, is_integer: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel
    rows, is_row, places = _places(count)
    number = _read(bytes_, rows, is_row, is_integer)
    tl.store(target + places, number.to(target.dtype.element_ty), mask=places < numbers)


@triton.jit(do_not_specialize=["ranks", "count", "divide_by"])  # type: ignore[untyped-decorator]
def _add_up(bytes_, total, ranks, count, divide_by, is_integer: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel
    rows, is_row, places = _places(count)
    sums = _sums(bytes_, rows, is_row, ranks, count, divide_by, is_integer)
    tl.store(total + places, sums, mask=is_row[:, None])


@triton.jit(do_not_specialize=["ranks", "count", "divide_by"])  # type: ignore[untyped-decorator]
def _reduce(  # type: ignore[no-untyped-def] # a kernel
    bytes_,
    own,
    lost,
    ranks,
    count,
    divide_by,
    is_integer: tl.constexpr,
):
    rows, is_row, places = _places(count)
    sums = _sums(bytes_, rows, is_row, ranks, count, divide_by, is_integer)
    code, scale = _write(sums, own, rows, is_row, is_integer)
    if lost is not None:
        tl.store(lost + places, sums - _decoded(code, is_integer) * scale[:, None], mask=is_row[:, None])
