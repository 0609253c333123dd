"""Rows of numbers as bytes: a scale, and one byte for each number.

A *row* is `ROW` consecutive numbers of a tensor, the last of which may be missing. Its scale is that of its
greatest magnitude, so a row of small numbers beside one of great numbers loses nothing. On the wire a row has
`ROW_BYTES` bytes, the scale in float32 first, and 0 for each number that is missing.

Numbers are divided by the scale and rounded to the nearest code, and a code multiplied by the scale is the
number again. That multiplication is rounded once, so the same bytes give the same bits, on a CPU as on a GPU.

ERROR of a number x in a row whose greatest magnitude is m, at most, but for the rounding of float32:

    int8    m / 254
    fp8     |x| / 17, or m / 458752 where that is more

An infinity or a NaN makes its whole row NaN. Numbers are quantized as float32: one beyond its range is an
infinity.

On a GPU triton's kernels do it, which read each number once, if they do there what torch does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from torchft_like import devices
from torchft_like.errors import ConfigError

ROW = 256
SCALE_BYTES = 4
ROW_BYTES = SCALE_BYTES + ROW
TILE_ROWS = 1024  # that a CPU converts at once: 1 MiB of float32, which stays in a core's cache
SCALE_MIN = 2.0**-126  # the least that float32 has with all of its digits
# A code of fp8, moved to the places of exponent and mantissa in float16, is smaller by this factor.
_FP8_IN_FLOAT16 = 256.0
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Format:
    """A format of codes.

    Attributes:
        wire: the dtype as which bytes are sent; ranks that disagree about the format disagree about it.
        largest: the code to which the greatest magnitude of a row is scaled.
    """

    name: str
    dtype: torch.dtype
    wire: torch.dtype
    largest: float


INT8 = Format("int8", torch.int8, torch.int8, 127.0)
FP8 = Format("fp8", torch.float8_e4m3fn, torch.uint8, 448.0)  # e4m3, without infinities
FORMATS = {each.name: each for each in (FP8, INT8)}


def format_named(name: str) -> Format:
    """Return the format of a name.

    Raises:
        ConfigError: there is none; the text lists the names.
    """
    if name not in FORMATS:
        raise ConfigError(f"there is no format {name!r:.40} to quantize to; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def rows_for(numbers: int) -> int:
    """Return how many rows so many numbers have."""
    return -(-numbers // ROW)


def quantize(numbers: Tensor, rows: Tensor, to: Format) -> None:
    """Write numbers to rows.

    Args:
        numbers: a contiguous floating point tensor with one dimension.
        rows: a contiguous tensor of bytes [rows_for(numbers), ROW_BYTES].
        to: the format of the rows.
    """
    (_kernels_for(numbers.device, to) or _BY_TORCH).quantize(numbers, rows, to)


def dequantize(rows: Tensor, numbers: Tensor, of: Format) -> None:
    """Write the numbers of rows, in the dtype of `numbers`; the arguments are those of `quantize`."""
    (_kernels_for(numbers.device, of) or _BY_TORCH).dequantize(rows, numbers, of)


def add_up(parts: Tensor, total: Tensor, divide_by: int | None, of: Format) -> None:
    """Write the sums of the numbers in the rows of several ranks, divided if there is a divisor.

    Args:
        parts: bytes [ranks, rows, ROW_BYTES].
        total: float32 [rows, ROW].
    """
    (_kernels_for(total.device, of) or _BY_TORCH).add_up(parts, total, divide_by, of)


def reduce(
    parts: Tensor, rows: Tensor, divide_by: int | None, of: Format, lost: Tensor | None = None
) -> None:
    """Write the sums to rows again, in the same format.

    Args:
        parts: bytes [ranks, rows, ROW_BYTES].
        rows: bytes [rows, ROW_BYTES].
        divide_by: by what the sums are divided before; None for nothing.
        lost: float32 [rows, ROW], for what the sums have lost by it.
    """
    (_kernels_for(rows.device, of) or _BY_TORCH).reduce(parts, rows, divide_by, of, lost)


# ---------------------------------------------------------------------------- by torch, on any device


def _quantize(numbers: Tensor, rows: Tensor, to: Format) -> None:
    whole = numbers.numel() // ROW
    matrix = numbers[: whole * ROW].view(whole, ROW)
    for tile in _tiles(whole, numbers):
        _quantize_whole(matrix[tile], rows[tile], to)
    if whole < len(rows):
        last = torch.zeros(1, ROW, dtype=numbers.dtype, device=numbers.device)
        last[0, : numbers.numel() - whole * ROW] = numbers[whole * ROW :]
        _quantize_whole(last, rows[whole:], to)


def _dequantize(rows: Tensor, numbers: Tensor, of: Format) -> None:
    whole = numbers.numel() // ROW
    matrix = numbers[: whole * ROW].view(whole, ROW)
    for tile in _tiles(whole, numbers):
        _dequantize_whole(rows[tile], matrix[tile], of)
    if whole < len(rows):
        last = torch.empty(1, ROW, dtype=numbers.dtype, device=numbers.device)
        _dequantize_whole(rows[whole:], last, of)
        numbers[whole * ROW :] = last[0, : numbers.numel() - whole * ROW]


def _add_up(parts: Tensor, total: Tensor, divide_by: int | None, of: Format) -> None:
    for tile in _tiles(len(total), total):
        _add_up_whole(parts[:, tile], total[tile], divide_by, of)


def _reduce(parts: Tensor, rows: Tensor, divide_by: int | None, of: Format, lost: Tensor | None) -> None:
    for tile in _tiles(len(rows), rows):
        total = torch.empty(len(rows[tile]), ROW, dtype=torch.float32, device=rows.device)
        _add_up_whole(parts[:, tile], total, divide_by, of)
        _quantize_whole(total, rows[tile], of)
        if lost is not None:
            _dequantize_whole(rows[tile], lost[tile], of)
            torch.sub(total, lost[tile], out=lost[tile])


_BY_TORCH = SimpleNamespace(quantize=_quantize, dequantize=_dequantize, add_up=_add_up, reduce=_reduce)


def _add_up_whole(parts: Tensor, total: Tensor, divide_by: int | None, of: Format) -> None:
    total.zero_()
    for part in parts:
        codes, scales = _decoded(part, of)
        total += codes.float().mul_(scales)  # rounded, as `addcmul` does on some processors only
    if divide_by is not None:
        total.div_(divide_by)


def _tiles(count: int, on: Tensor) -> Iterator[slice]:
    """Yield the rows that a device converts at once; those of an accelerator are all."""
    size = TILE_ROWS if on.is_cpu else max(count, 1)
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def _quantize_whole(matrix: Tensor, rows: Tensor, to: Format) -> None:
    matrix = matrix.float()
    largest = torch.maximum(matrix.amax(1, keepdim=True), -matrix.amin(1, keepdim=True))
    scales = (largest / to.largest).clamp_(min=SCALE_MIN).masked_fill_(~largest.isfinite(), torch.nan)
    _scales_of(rows).copy_(scales)
    quotients = matrix / scales
    if to is INT8:
        quotients.round_()  # to the even one of two, as the conversion to fp8 does
    rows[:, SCALE_BYTES:].view(to.dtype).copy_(quotients)


def _dequantize_whole(rows: Tensor, matrix: Tensor, of: Format) -> None:
    codes, scales = _decoded(rows, of)
    if matrix.dtype == torch.float32:
        matrix.copy_(codes).mul_(scales)
    else:  # to be rounded once
        matrix.copy_(codes.float().mul_(scales))


def _decoded(rows: Tensor, of: Format) -> tuple[Tensor, Tensor]:
    """Return codes as numbers, in an exact dtype, and the scales with which to multiply them."""
    codes, scales = rows[:, SCALE_BYTES:].view(torch.int8), _scales_of(rows)
    if of is INT8:
        return codes, scales
    # torch converts each code by itself, which takes six times as long. The codes of NaN are in rows only
    # whose scale is NaN. The factor is a power of two, and changes no digit.
    moved = codes.to(torch.int16).mul_(1 << 7).bitwise_and_(~0x4000)  # the sign comes with a copy of itself
    return moved.view(torch.float16), scales * _FP8_IN_FLOAT16


def _scales_of(rows: Tensor) -> Tensor:
    return rows[:, :SCALE_BYTES].view(torch.float32)


# ---------------------------------------------------------------------------- by triton, if it is right


@functools.cache
def _kernels_for(device: torch.device, of: Format) -> ModuleType | None:
    """Return triton's kernels, if they do what torch does on the device; None for torch itself."""
    module = "torchft_like.quantization_kernels"
    return devices.agreeing_kernels(module, device, lambda kernels: agree(kernels, device, of))


def agree(
    kernels: ModuleType, device: torch.device, of: Format, dtypes: Sequence[torch.dtype] = _DTYPES
) -> bool:
    """Return whether kernels write the bytes that torch writes, and read the same numbers in these dtypes."""
    numbers = torch.linspace(-3, 3, 5 * ROW + 5, dtype=torch.float64).exp().mul(1e3).to(device, torch.float32)
    numbers[::2] *= -1
    numbers[ROW + 7], numbers[4 * ROW + 9] = torch.nan, torch.inf
    finite = [0, 2, 3, 5]  # rows; of the others, only the scale has a meaning
    rows = [torch.empty(6, ROW_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    kernels.quantize(numbers, rows[0], of)
    _quantize(numbers, rows[1], of)
    if not torch.equal(rows[0][finite], rows[1][finite]):
        return False
    for dtype in dtypes:
        read = [numbers.to(dtype) for _ in range(2)]
        kernels.dequantize(rows[0], read[0], of)
        _dequantize(rows[1], read[1], of)
        if not torch.equal(read[0].nan_to_num(0.5), read[1].nan_to_num(0.5)):
            return False
    parts = torch.stack([rows[1], rows[1].flip(0), rows[1]])
    for divide_by in (None, 3):
        results = []
        for add, reduce_, own in ((kernels.add_up, kernels.reduce, rows[0]), (_add_up, _reduce, rows[1])):
            total, lost = (torch.empty(6, ROW, device=device) for _ in range(2))
            add(parts, total, divide_by, of)
            reduce_(parts, own, divide_by, of, lost)
            results.append([total.nan_to_num(0.5), lost.nan_to_num(0.5), own[finite]])
        if not all(map(torch.equal, *results)):
            return False
    return True
