"""A value as a structure and leaves."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from torchft_like.dtypes import is_numpy_number
from torchft_like.errors import PlainDataError
from torchft_like.plain_data.schema import (
    ALLOWED,
    ARRAY,
    BYTES,
    DEPTH_MAX,
    DEVICES,
    DICT,
    DIMENSIONS_MAX,
    DOUBLE,
    DTYPE_NUMBERS,
    FALSE,
    FLOAT,
    HEAD,
    INLINE_BYTES_MAX,
    INT,
    INT64,
    LEAF_ARRAY,
    LEAF_BYTES,
    LEAF_BYTES_MAX,
    LEAF_STR,
    LEAF_TENSOR,
    LEAVES_MAX,
    LENGTH,
    LIST,
    LONG,
    MAGIC,
    NO_LEAVES,
    NONE,
    SPEC,
    STR,
    STRUCTURE_BYTES_MAX,
    TAGS,
    TRUE,
    TUPLE,
    VALUES_MAX,
    Leaf,
    Message,
    extent,
    frombuffer,
    is_key,
    name_of,
)


def disassemble(value: object) -> Message:
    """Take a value apart.

    Raises:
        PlainDataError: a part of it is of a type that does not travel, it contains itself, or it is too
            large; names the part (`["a"][3]`), its type, and what to pass instead.
    """
    structure, leaves = dissect(value)
    return Message(structure, tuple(map(_as_tensor, leaves)) if leaves else ())


def dissect(value: object) -> tuple[bytes, list[Leaf]]:
    """Like `disassemble`, for a sender that needs bytes and no tensors: leaves are what they were."""
    sheet = _Sheet()
    try:
        _WRITERS.get(type(value), _refuse)(value, sheet, 0)
    except _Unfit as unfit:
        raise PlainDataError(f"{_show(unfit.path)} {unfit.problem}") from None
    leaves = sheet.leaves
    if not leaves:
        structure = NO_LEAVES + b"".join(sheet.parts)
    else:
        structure = b"".join([HEAD.pack(MAGIC, len(leaves)), *map(_spec_bytes, leaves), *sheet.parts])
    if len(structure) > STRUCTURE_BYTES_MAX:  # which a receiver refuses, when others have begun to receive
        raise PlainDataError(
            f"the value takes {len(structure)} bytes beside tensors, arrays and long texts: "
            f"{STRUCTURE_BYTES_MAX} travel at a time"
        )
    return structure, leaves


class _Unfit(Exception):  # noqa: N818 - never leaves this module
    """A value that does not travel; containers add their keys on the way up."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[object] = []


class _Sheet:
    """What was written so far, and how much more may be."""

    __slots__ = ("bytes_left", "leaves", "parts", "put", "values_left")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.put = self.parts.append
        self.leaves: list[Leaf] = []
        self.values_left = VALUES_MAX
        self.bytes_left = STRUCTURE_BYTES_MAX

    def put_data(self, tag: int, data: bytes) -> None:
        self.bytes_left -= len(data)
        if self.bytes_left < 0:
            raise _Unfit(f"is what makes the texts and bytes longer than {STRUCTURE_BYTES_MAX} together")
        self.put(LENGTH.pack(tag, len(data)))
        self.put(data)

    def put_leaf(self, tag: int, leaf: Leaf) -> None:
        if len(self.leaves) == LEAVES_MAX:
            raise _Unfit(f"is one tensor too many: {LEAVES_MAX} travel at a time")
        self.put(TAGS[tag])
        self.leaves.append(leaf)

    def open(self, tag: int, count: int, depth: int) -> None:
        if depth == DEPTH_MAX:
            raise _Unfit(f"is nested deeper than {DEPTH_MAX} levels, or contains itself")
        self.values_left -= count
        if self.values_left < 0:
            raise _Unfit(f"is what makes it more than {VALUES_MAX} values: put numbers into an array")
        self.put(LENGTH.pack(tag, count))


def _write_none(_: None, sheet: _Sheet, __: int) -> None:
    sheet.put(TAGS[NONE])


def _write_bool(value: bool, sheet: _Sheet, _: int) -> None:
    sheet.put(TAGS[TRUE if value else FALSE])


def _write_int(value: int, sheet: _Sheet, _: int) -> None:
    if -(2**63) <= value < 2**63:
        sheet.put(INT.pack(INT64, value))
    else:
        sheet.put_data(LONG, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _write_float(value: float, sheet: _Sheet, _: int) -> None:
    sheet.put(FLOAT.pack(DOUBLE, value))


def _write_str(value: str, sheet: _Sheet, _: int) -> None:
    data = value.encode("utf-8", "surrogatepass")
    if len(data) > INLINE_BYTES_MAX:
        sheet.put_leaf(LEAF_STR, data)
    else:
        sheet.put_data(STR, data)


def _write_bytes(value: bytes, sheet: _Sheet, _: int) -> None:
    if len(value) > INLINE_BYTES_MAX:
        sheet.put_leaf(LEAF_BYTES, value)
    else:
        sheet.put_data(BYTES, value)


def _write_items(items: list[object] | tuple[object, ...], sheet: _Sheet, depth: int) -> None:
    sheet.open(LIST if type(items) is list else TUPLE, len(items), depth)
    index = 0
    try:
        for index, item in enumerate(items):  # noqa: B007 - the handler below reads it
            _WRITERS.get(type(item), _refuse)(item, sheet, depth + 1)
    except _Unfit as unfit:
        unfit.path.append(index)
        raise


def _write_dict(value: dict[object, object], sheet: _Sheet, depth: int) -> None:
    sheet.open(DICT, len(value), depth)
    key: object = None
    try:
        for key, item in value.items():
            if type(key) is not str and not is_key(key):
                raise _Unfit(
                    f"is under a key of type {name_of(key)}; keys that travel are None, bool, int, float, "
                    "str, bytes and tuples of these"
                )
            _WRITERS[type(key)](key, sheet, depth + 1)
            _WRITERS.get(type(item), _refuse)(item, sheet, depth + 1)
    except _Unfit as unfit:
        unfit.path.append(key)
        raise


def _write_tensor(value: Tensor, sheet: _Sheet, _: int) -> None:
    if value.is_nested:
        raise _Unfit("is a nested tensor: only dense ones travel; pass `.unbind()`")
    if value.layout is not torch.strided or value.is_quantized:
        raise _Unfit(f"is a tensor of layout {value.layout}: only dense ones travel; pass `.to_dense()`")
    if value.device.type not in DEVICES:
        raise _Unfit(f"is a tensor on {value.device}, which does not travel; pass `.cpu()`")
    if value.dtype not in DTYPE_NUMBERS:
        raise _Unfit(f"has dtype {value.dtype}, which does not travel; pass `.to` one that does")
    if value.dim() > DIMENSIONS_MAX:
        raise _Unfit(f"has {value.dim()} dimensions, and {DIMENSIONS_MAX} travel; pass `.flatten()`")
    if not value.numel():
        _require_readable(value.shape)
    sheet.put_leaf(LEAF_TENSOR, value.detach().resolve_conj().resolve_neg().contiguous())


def _write_array(value: np.ndarray, sheet: _Sheet, _: int) -> None:
    code = value.dtype.str
    if not is_numpy_number(code):
        raise _Unfit(f"is an array of {value.dtype}: only numbers travel; pass `.tolist()`")
    if not value.size:
        _require_readable(value.shape)
    sheet.put_leaf(LEAF_ARRAY, np.ascontiguousarray(value))
    text = code.encode()
    sheet.put(ARRAY.pack(len(text), value.ndim, 0) + text + struct.pack(f"<{value.ndim}Q", *value.shape))


def _require_readable(shape: Sequence[int]) -> None:
    if extent(shape) > LEAF_BYTES_MAX:
        raise _Unfit(f"is empty and has the shape {tuple(shape)}, which does not travel; pass `.flatten()`")


def _refuse(value: object, _: _Sheet, __: int) -> None:
    name = name_of(value)
    article = "an" if name[0] in "aeiou" else "a"
    raise _Unfit(f"is {article} {name}, which does not travel; pass {_cure(value)}. What travels: {ALLOWED}")


_WRITERS: Mapping[type, Callable[..., None]] = {
    type(None): _write_none,
    bool: _write_bool,
    int: _write_int,
    float: _write_float,
    str: _write_str,
    bytes: _write_bytes,
    list: _write_items,
    tuple: _write_items,
    dict: _write_dict,
    Tensor: _write_tensor,
    torch.nn.Parameter: _write_tensor,
    np.ndarray: _write_array,
}

# The first that fits says what to pass instead.
_CURES: tuple[tuple[Callable[[object], bool], str], ...] = (
    (
        lambda value: isinstance(value, Tensor) and hasattr(value, "to_local"),
        "its local shard, `.to_local()`",
    ),
    (lambda value: isinstance(value, Tensor), "a plain tensor, `.as_subclass(torch.Tensor)`"),
    (lambda value: isinstance(value, np.generic), "`.item()`"),
    (lambda value: isinstance(value, np.ndarray), "a plain array, `numpy.asarray`"),
    (lambda value: isinstance(value, dict), "a plain `dict(...)`"),
    (lambda value: isinstance(value, tuple), "a plain `tuple(...)`"),
    (lambda value: isinstance(value, list | set | frozenset | range), "a plain `list(...)`"),
    (lambda value: isinstance(value, int | float | str), "its plain value"),
    (lambda value: isinstance(value, bytearray | memoryview), "`bytes(...)`"),
    (lambda value: isinstance(value, complex), "its `.real` and `.imag`"),
    (lambda value: isinstance(value, torch.dtype | torch.device), "its name, `str(...)`"),
    (lambda _: True, "the plain data in it"),
)


def _cure(value: object) -> str:
    return next(cure for fits, cure in _CURES if fits(value))


def _show(path: Sequence[object]) -> str:
    keys = list(reversed(path))  # the innermost was added first
    return "".join(map(_show_key, keys[:16])) + ("..." if len(keys) > 16 else "") or "the value"


def _show_key(key: object) -> str:
    if type(key) is str:
        return f'["{key:.80}"]'
    try:
        return f"[{key!r:.80}]"
    except Exception:  # noqa: BLE001 - of an int with many digits, deep tuples, or whatever was refused as a key
        return f"[{name_of(key)}]"


def _spec_bytes(leaf: Leaf) -> bytes:
    if isinstance(leaf, Tensor):
        head = SPEC.pack(DTYPE_NUMBERS[leaf.dtype], DEVICES.index(leaf.device.type), leaf.dim())
        return head + struct.pack(f"<{leaf.dim()}Q", *leaf.shape)
    nbytes = leaf.nbytes if isinstance(leaf, np.ndarray) else len(leaf)
    return SPEC.pack(DTYPE_NUMBERS[torch.uint8], 0, 1) + struct.pack("<Q", nbytes)


def _as_tensor(leaf: Leaf) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    data = bytearray(leaf) if isinstance(leaf, bytes) or not leaf.flags.writeable else leaf
    if isinstance(data, bytearray):
        return frombuffer(data, torch.uint8, (len(data),))
    return torch.from_numpy(data.reshape(-1).view(np.uint8))
