"""The writer: it takes a value apart into a structure and leaves."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchft_like.dtypes import is_numpy_number
from torchft_like.errors import PlainDataError
from torchft_like.plain_data import schema as wire
from torchft_like.plain_data.schema import (
    Leaf,
    Schema,
    Shard,
    extent,
    is_key,
    name_of,
    nbytes_of,
    shown,
)

Writer: TypeAlias = Callable[..., None]


def write(value: object, schema: Schema) -> tuple[bytes, list[Leaf]]:
    """Return the structure of a value, and its leaves as they are: tensors may be views, on any device.

    Raises:
        PlainDataError: a part of the value is of a type that cannot be sent, the value contains itself, or it
          is too large; the text names the part. A schema may have another error for types.
    """
    sheet = Sheet(schema)
    try:
        schema.writers.get(type(value), schema.other)(value, sheet, 0)
    except Unfit as unfit:
        raise unfit.error(schema) from None
    leaves = sheet.leaves
    if not leaves:
        structure = wire.NO_LEAVES + b"".join(sheet.parts)
    else:
        specs = [_spec_bytes(leaf, schema.keeps_devices) for leaf in leaves]
        structure = b"".join([wire.HEAD.pack(wire.MAGIC, len(leaves)), *specs, *sheet.parts])
    require_length(len(structure), schema)
    return structure, leaves


def list_of(encoded: Sequence[bytes]) -> bytes:
    """Encode a list whose items are encoded already."""
    count = len(encoded)
    head = wire.SHORT_LISTS[count] if count < 256 else wire.LENGTH.pack(wire.LIST, count)
    return head + b"".join(encoded)


def encoded_bytes(data: bytes) -> bytes:
    """Encode as `encode([data])` does, in a fraction of the time."""
    if len(data) < 256:
        return wire.SHORT_BYTE_STRINGS[len(data)] + data
    return wire.LENGTH.pack(wire.BYTES, len(data)) + data


class Unfit(Exception):  # noqa: N818 - it never leaves a call of `write` or `encode`
    """A value that cannot be sent; containers add their keys on the way up."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[object] = []  # the innermost key first

    def within(self, key: object) -> Unfit:
        """Add the key under which a container has the value, and return the same error."""
        self.path.append(key)
        return self

    def error(self, schema: Schema) -> Exception:
        """Make the error for the caller."""
        kind = schema.type_error if isinstance(self, UnfitType) else PlainDataError
        return kind(f"{shown(self.path[::-1], schema.root)} {self.problem}")


class UnfitType(Unfit):
    """A value of a type that cannot be sent."""


class Sheet:
    """What was written so far, and how much more may be written."""

    __slots__ = (
        "bytes_left",
        "leaves",
        "meshes",
        "parts",
        "put",
        "schema",
        "values_left",
        "views",
        "writers",
    )

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.writers = schema.writers
        self.parts: list[bytes] = []
        self.put = self.parts.append
        self.leaves: list[Leaf] = []
        limits = schema.limits
        self.values_left = limits.values
        self.bytes_left = limits.structure_bytes
        if schema.joins_views:
            self.views: dict[object, int] = {}  # the leaf that shows the same elements
            self.meshes: dict[object, int] = {}

    def write(self, value: object, depth: int) -> None:
        """Write any value."""
        self.writers.get(type(value), self.schema.other)(value, self, depth)

    def claim(self, nbytes: int) -> None:
        """Count the bytes of a text or bytes."""
        self.bytes_left -= nbytes
        if self.bytes_left < 0:
            raise Unfit(
                f"is what makes the texts and bytes longer than {self.schema.limits.structure_bytes} together"
            )

    def put_data(self, tag: int, data: bytes) -> None:
        """Write a tag, a length and that many bytes."""
        self.claim(len(data))
        self.put(wire.LENGTH.pack(tag, len(data)))
        self.put(data)

    def put_leaf(self, tag: int, leaf: Leaf) -> None:
        """Write a tag, and add a leaf beside the structure."""
        if len(self.leaves) == self.schema.limits.leaves:
            raise Unfit(f"is one tensor too many: {self.schema.limits.leaves} travel at a time")
        self.put(wire.TAGS[tag])
        self.leaves.append(leaf)

    def open(self, tag: int, count: int, depth: int) -> None:
        """Begin a container of `count` items, which follow."""
        if depth == wire.DEPTH_MAX:
            raise Unfit(f"is nested deeper than {wire.DEPTH_MAX} levels, or contains itself")
        self.values_left -= count
        if self.values_left < 0:
            raise Unfit(
                f"is what makes it more than {self.schema.limits.values} values: put numbers into an array"
            )
        self.put(wire.LENGTH.pack(tag, count))

    def number_of(self, mesh: object) -> int:
        """Return the mesh's number among those that occur in the value."""
        return self.meshes.setdefault(mesh, len(self.meshes))


def refuse(value: object, sheet: Sheet, _: int) -> None:
    """Refuse a value of a type that cannot be sent."""
    name = name_of(value)
    article = "an" if name[0] in "aeiou" else "a"
    cure, allowed = _cure(value), sheet.schema.allowed
    raise UnfitType(f"is {article} {name}, which does not travel; pass {cure}. What travels: {allowed}")


def write_none(_: None, sheet: Sheet, __: int) -> None:
    sheet.put(wire.TAGS[wire.NONE])


def write_bool(value: bool, sheet: Sheet, _: int) -> None:
    sheet.put(wire.TAGS[wire.TRUE if value else wire.FALSE])


def write_int(value: int, sheet: Sheet, _: int) -> None:
    if 0 <= value < 256:
        sheet.put(wire.SMALL_INTS[value])
    elif -(2**63) <= value < 2**63:
        sheet.put(wire.INT.pack(wire.INT64, value))
    else:
        sheet.put_data(wire.LONG, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def write_float(value: float, sheet: Sheet, _: int) -> None:
    sheet.put(wire.FLOAT.pack(wire.DOUBLE, value))


def write_complex(value: complex, sheet: Sheet, _: int) -> None:
    sheet.put(wire.TWO_FLOATS.pack(wire.COMPLEX, value.real, value.imag))


def write_str(value: str, sheet: Sheet, _: int) -> None:
    data = value.encode() if value.isascii() else value.encode("utf-8", "surrogatepass")
    if len(data) < 256:
        sheet.claim(len(data))
        sheet.put(wire.SHORT_STRS[len(data)] + data)
    elif len(data) > sheet.schema.inline_bytes_max:
        sheet.put_leaf(wire.LEAF_STR, data)
    else:
        sheet.put_data(wire.STR, data)


def write_bytes(value: bytes, sheet: Sheet, _: int) -> None:
    if len(value) > sheet.schema.inline_bytes_max:
        sheet.put_leaf(wire.LEAF_BYTES, value)
    else:
        sheet.claim(len(value))
        sheet.put(encoded_bytes(value))


def write_items(items: list[object] | tuple[object, ...], sheet: Sheet, depth: int) -> None:
    sheet.open(wire.LIST if isinstance(items, list) else wire.TUPLE, len(items), depth)
    writers, other, depth = sheet.writers, sheet.schema.other, depth + 1
    index = 0
    try:
        for index, item in enumerate(items):  # noqa: B007 - the handler below reads it
            writers.get(type(item), other)(item, sheet, depth)
    except Unfit as unfit:
        raise unfit.within(index)  # noqa: B904 - the same error


def write_dict(value: dict[object, object], sheet: Sheet, depth: int) -> None:
    sheet.open(wire.DICT, len(value), depth)
    _write_pairs(value, sheet, depth + 1)


def write_counter(value: dict[object, object], sheet: Sheet, depth: int) -> None:
    sheet.open(wire.COUNTER, len(value), depth)
    _write_pairs(value, sheet, depth + 1)


def write_ordered_dict(value: OrderedDict[object, object], sheet: Sheet, depth: int) -> None:
    """Write the pairs, and then the versions that `Module.state_dict()` attaches to an OrderedDict."""
    sheet.open(wire.ORDERED_DICT, len(value), depth)
    _write_pairs(value, sheet, depth + 1)
    try:
        sheet.write(getattr(value, "_metadata", None), depth + 1)
    except Unfit as unfit:
        raise unfit.within("_metadata")  # noqa: B904 - the same error


def _write_pairs(value: Mapping[object, object], sheet: Sheet, depth: int) -> None:
    writers, other, keys = sheet.writers, sheet.schema.other, sheet.schema.keys
    key: object = None
    try:
        for key, item in value.items():
            if type(key) is not str and not is_key(key, keys):
                raise UnfitType(about_key(key, sheet.schema))
            writers[type(key)](key, sheet, depth)
            writers.get(type(item), other)(item, sheet, depth)
    except Unfit as unfit:
        raise unfit.within(key)  # noqa: B904 - the same error


def about_key(key: object, schema: Schema) -> str:
    """Describe what is wrong with a key that cannot be sent."""
    names = sorted(kind.__name__ for kind in schema.keys - {tuple, type(None)})
    tuples = " and tuples of these" if tuple in schema.keys else ""
    return f"is under a key of type {name_of(key)}; keys that travel are None, {', '.join(names)}{tuples}"


def write_tensor(value: Tensor, sheet: Sheet, _: int) -> None:
    """Write a dense tensor, as a leaf beside the structure."""
    if value.is_nested:
        raise UnfitType("is a nested tensor: only dense ones travel; pass `.unbind()`")
    if value.layout is not torch.strided or value.is_quantized:
        raise UnfitType(f"is a tensor of layout {value.layout}: only dense ones travel; pass `.to_dense()`")
    keeps_devices = sheet.schema.keeps_devices
    if value.is_meta or (keeps_devices and value.device.type not in wire.DEVICES):
        raise UnfitType(f"is a tensor on {value.device}, which does not travel; pass `.cpu()`")
    if value.dtype not in wire.DTYPE_NUMBERS:
        raise UnfitType(f"has dtype {value.dtype}, which does not travel; pass `.to` one that does")
    if value.dim() > wire.DIMENSIONS_MAX:
        raise Unfit(f"has {value.dim()} dimensions, and {wire.DIMENSIONS_MAX} travel; pass `.flatten()`")
    if not value.numel():
        _require_readable(value.shape)
    elif sheet.schema.joins_views:
        view = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        before = sheet.views.setdefault((*view, value.is_conj(), value.is_neg()), len(sheet.leaves))
        if before != len(sheet.leaves):
            sheet.put(wire.LENGTH.pack(wire.SAME_TENSOR, before))
            return
    sheet.put_leaf(wire.LEAF_TENSOR, value.detach())


def write_shard(value: Shard, sheet: Sheet, depth: int) -> None:
    layout = value.layout
    sheet.open(wire.SHARD, 6, depth)
    sheet.write(value.local, depth + 1)
    for form in (value.mesh, layout.shape, layout.mesh_shape, layout.mesh_names, layout.placements):
        sheet.write(form, depth + 1)


def write_array(value: np.ndarray, sheet: Sheet, _: int) -> None:
    code = _number_code(value)
    if not value.size:
        _require_readable(value.shape)
    sheet.put_leaf(wire.LEAF_ARRAY, np.ascontiguousarray(value))
    sheet.put(wire.ARRAY.pack(len(code), value.ndim, 0) + code + struct.pack(f"<{value.ndim}Q", *value.shape))


def _write_scalar(value: np.generic, sheet: Sheet, _: int) -> None:
    code = _number_code(value)
    sheet.put(wire.SHORT.pack(wire.SCALAR, len(code)) + code + value.tobytes())


def _number_code(value: np.ndarray | np.generic) -> bytes:
    code = value.dtype.str
    if not is_numpy_number(code):
        kind = "an array" if isinstance(value, np.ndarray) else "a scalar"
        raise UnfitType(f"is {kind} of numpy dtype {value.dtype}: only numbers travel; pass `.tolist()`")
    return code.encode()


def write_dtype(value: torch.dtype, sheet: Sheet, _: int) -> None:
    if value not in wire.DTYPE_NUMBERS:
        raise UnfitType(f"is dtype {value}, which does not travel")
    sheet.put(wire.SHORT.pack(wire.DTYPE, wire.DTYPE_NUMBERS[value]))


def write_device(value: torch.device, sheet: Sheet, _: int) -> None:
    sheet.put_data(wire.DEVICE, str(value).encode())


def write_size(value: torch.Size, sheet: Sheet, _: int) -> None:
    if len(value) > wire.DIMENSIONS_MAX:
        raise Unfit(f"has {len(value)} dimensions, and {wire.DIMENSIONS_MAX} travel; pass a `tuple(...)`")
    sheet.put(wire.SHORT.pack(wire.SIZE, len(value)) + struct.pack(f"<{len(value)}Q", *value))


def write_other_state(value: object, sheet: Sheet, depth: int) -> None:
    if isinstance(value, np.generic):
        _write_scalar(value, sheet, depth)
    else:
        refuse(value, sheet, depth)


def _require_readable(shape: Sequence[int]) -> None:
    if extent(shape) > wire.LEAF_BYTES_MAX:
        raise Unfit(f"is empty and has the shape {tuple(shape)}, which does not travel; pass `.flatten()`")


def require_length(length: int, schema: Schema) -> None:
    """Raise PlainDataError for a structure that a receiver would refuse for its length."""
    if length > schema.limits.structure_bytes:
        raise PlainDataError(
            f"{schema.root} takes {length} bytes beside tensors, arrays and long texts: "
            f"{schema.limits.structure_bytes} travel at a time; keep large lists of numbers in tensors"
        )


# The first entry that fits a value says what to pass instead.
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


def _spec_bytes(leaf: Leaf, keeps_devices: bool) -> bytes:
    if isinstance(leaf, Tensor):
        device = wire.DEVICES.index(leaf.device.type) if keeps_devices else 0
        dimensions = leaf.dim()
        head = wire.SPEC.pack(wire.DTYPE_NUMBERS[leaf.dtype], device, dimensions)
        return head + struct.pack(f"<{dimensions}Q", *leaf.shape)
    return wire.SPEC.pack(wire.DTYPE_NUMBERS[torch.uint8], 0, 1) + struct.pack("<Q", nbytes_of(leaf))
