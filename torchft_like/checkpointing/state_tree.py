"""Nested training state as a JSON document and a list of raw buffers, and back.

The schema is closed: a value has one of the types listed in `ALLOWED`, exactly (a subclass is
another type), or it does not travel. Reading can therefore never run anything that a peer sent,
which is what pickle would do.

What is kept: values bit for bit, dtypes and shapes, key types and order, the module versions that
`Module.state_dict()` hangs on its OrderedDict, and that equal views of the same memory (tied
weights) are one memory again. What is not: tensors arrive contiguous on the CPU and need no
gradient, a Parameter arrives as the tensor in it, a DTensor as a `Shard`, which `shards.place` puts on the
receiver's mesh, tensors that overlap without being equal arrive
as separate copies, and so do containers that occur twice.

This module knows nothing of files, sockets or checksums.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchft_like.checkpointing.shards import Layout, Path, Shard, shard_of, shown
from torchft_like.dtypes import DTYPE_OF, NAME_OF, is_numpy_number, numpy_dtype
from torchft_like.errors import CheckpointFormatError

Json: TypeAlias = "bool | int | float | str | list[Json] | None"

DEPTH_MAX = 64
DIMENSIONS_MAX = 64
ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, Counter, torch.Size, "
    "torch.dtype, torch.device, plain dense tensors, DTensors, numpy arrays and scalars of numbers"
)


def flatten_state(state: object) -> tuple[Json, list[torch.Tensor]]:
    """The document that describes `state`, and the tensors whose bytes it refers to by index.

    The tensors are the state's own, wherever they are, and uint8 copies of everything else.

    Raises:
        CheckpointFormatError: a value is of a type that does not travel; names its path.
    """
    flattener = _Flattener()
    return flattener.encode(state, ()), flattener.buffers


def unflatten_state(tree: object, buffers: Sequence[torch.Tensor]) -> object:
    """The state that `tree` describes, on the memory of `buffers` (uint8, one dimension, on the CPU).

    Raises:
        CheckpointFormatError: the document is not one that `flatten_state` makes.
    """
    return _Unflattener(buffers).decode(tree, DEPTH_MAX)


# ---------------------------------------------------------------------------------- flatten


class _Flattener:
    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self._known: dict[object, int] = {}
        self._meshes: dict[DeviceMesh, int] = {}

    def encode(self, value: object, path: Path) -> Json:
        if value is None or type(value) is bool:
            return value
        if len(path) > DEPTH_MAX:
            raise CheckpointFormatError(
                f"{shown(path)} is nested deeper than {DEPTH_MAX} levels, or contains itself"
            )
        encode = _ENCODERS.get(type(value), _encode_other)
        return encode(self, value, path)

    def add_bytes(self, data: bytes) -> int:
        self.buffers.append(_tensor_of(data))
        return len(self.buffers) - 1

    def add_tensor(self, tensor: torch.Tensor) -> int:
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key = (*view, tensor.is_conj(), tensor.is_neg()) if tensor.numel() else object()
        if key not in self._known:
            self._known[key] = len(self.buffers)
            self.buffers.append(tensor)
        return self._known[key]

    def number_of(self, mesh: DeviceMesh) -> int:
        return self._meshes.setdefault(mesh, len(self._meshes))

    def items(self, mapping: Mapping[object, object], path: Path) -> Json:
        pairs: list[Json] = []
        for key, value in mapping.items():
            if not _is_key(key):
                raise CheckpointFormatError(
                    f"{shown(path)} has a key of type {_type_name(key)} ({key!r:.80}); keys that travel are "
                    "None, bool, int, float, str and tuples of these"
                )
            pairs.append([self.encode(key, path), self.encode(value, (*path, key))])
        return pairs


def _encode_int(_: _Flattener, value: int, __: Path) -> Json:
    return value if -(2**63) <= value < 2**64 else ["int", hex(value)]


def _encode_float(_: _Flattener, value: float, __: Path) -> Json:
    return value if math.isfinite(value) else ["float", struct.pack("<d", value).hex()]


def _encode_complex(_: _Flattener, value: complex, __: Path) -> Json:
    return ["complex", struct.pack("<dd", value.real, value.imag).hex()]


def _encode_str(_: _Flattener, value: str, __: Path) -> Json:
    data = value.encode("utf-8", "surrogatepass")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:  # half a surrogate pair: JSON would join two of them
        return ["str", data.hex()]
    return value


def _encode_bytes(flattener: _Flattener, value: bytes, _: Path) -> Json:
    return ["bytes", flattener.add_bytes(value)]


def _encode_list(flattener: _Flattener, value: list[object], path: Path) -> Json:
    return ["list", [flattener.encode(item, (*path, i)) for i, item in enumerate(value)]]


def _encode_tuple(flattener: _Flattener, value: tuple[object, ...], path: Path) -> Json:
    return ["tuple", [flattener.encode(item, (*path, i)) for i, item in enumerate(value)]]


def _encode_dict(flattener: _Flattener, value: dict[object, object], path: Path) -> Json:
    return ["dict", flattener.items(value, path)]


def _encode_counter(flattener: _Flattener, value: dict[object, object], path: Path) -> Json:
    return ["counter", flattener.items(value, path)]


def _encode_ordered_dict(flattener: _Flattener, value: dict[object, object], path: Path) -> Json:
    versions = flattener.encode(getattr(value, "_metadata", None), (*path, "_metadata"))
    return ["ordered_dict", flattener.items(value, path), versions]


def _encode_size(_: _Flattener, value: torch.Size, __: Path) -> Json:
    return ["size", list(value)]


def _encode_dtype(_: _Flattener, value: torch.dtype, path: Path) -> Json:
    return ["dtype", _dtype_name(value, path)]


def _encode_device(_: _Flattener, value: torch.device, __: Path) -> Json:
    return ["device", str(value)]


def _encode_tensor(flattener: _Flattener, value: torch.Tensor, path: Path) -> Json:
    if value.layout is not torch.strided or value.device.type == "meta":
        raise CheckpointFormatError(
            f"{shown(path)} is a tensor of layout {value.layout} on device {value.device}; "
            "only dense tensors with data travel"
        )
    name = _dtype_name(value.dtype, path)
    return ["tensor", flattener.add_tensor(value.detach()), name, list(value.shape)]


def _encode_dtensor(flattener: _Flattener, value: DTensor, path: Path) -> Json:
    if any(placement.is_partial() for placement in value.placements):
        raise CheckpointFormatError(
            f"{shown(path)} is a DTensor placed {', '.join(map(str, value.placements))}: partial values "
            "do not travel; redistribute it first"
        )
    shard = shard_of(value, flattener.number_of(value.device_mesh))
    layout = shard.layout
    forms: list[Json] = [
        list(layout.shape),
        list(layout.mesh_shape),
        list(layout.mesh_names),
        list(layout.placements),
    ]
    return ["dtensor", _encode_tensor(flattener, shard.local, path), shard.mesh, *forms]


def _encode_array(flattener: _Flattener, value: np.ndarray, path: Path) -> Json:
    index = flattener.add_bytes(value.tobytes())
    return ["array", index, _numpy_dtype_name(value.dtype, path), list(value.shape)]


def _encode_other(flattener: _Flattener, value: object, path: Path) -> Json:
    if isinstance(value, np.generic):
        index = flattener.add_bytes(value.tobytes())
        return ["scalar", index, _numpy_dtype_name(value.dtype, path)]
    raise CheckpointFormatError(
        f"{shown(path)} is a {_type_name(value)}: it does not travel. What does: {ALLOWED}"
    )


_ENCODERS: Mapping[type, Callable[..., Json]] = {
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    str: _encode_str,
    bytes: _encode_bytes,
    list: _encode_list,
    tuple: _encode_tuple,
    dict: _encode_dict,
    OrderedDict: _encode_ordered_dict,
    Counter: _encode_counter,
    torch.Size: _encode_size,
    torch.dtype: _encode_dtype,
    torch.device: _encode_device,
    torch.Tensor: _encode_tensor,
    torch.nn.Parameter: _encode_tensor,
    DTensor: _encode_dtensor,
    np.ndarray: _encode_array,
}


def _dtype_name(dtype: torch.dtype, path: Path) -> str:
    if dtype not in NAME_OF:
        raise CheckpointFormatError(f"{shown(path)} has dtype {dtype}, which does not travel")
    return NAME_OF[dtype]


def _numpy_dtype_name(dtype: np.dtype, path: Path) -> str:
    if not is_numpy_number(dtype.str):
        raise CheckpointFormatError(f"{shown(path)} has numpy dtype {dtype}; only numbers travel")
    return dtype.str


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(_is_key(part) for part in key)
    return key is None or type(key) in (bool, int, float, str)


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _tensor_of(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# -------------------------------------------------------------------------------- unflatten


class _Unflattener:
    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers

    def decode(self, node: object, depth_left: int) -> object:
        if node is None or isinstance(node, bool | int | float | str):
            return node
        _require(depth_left >= 0, f"it is nested deeper than {DEPTH_MAX} levels")
        tag, *fields = _list(node, length_min=1)
        _require(isinstance(tag, str) and tag in _DECODERS, f"tag {tag!r:.80} is unknown")
        kinds, decode = _DECODERS[str(tag)]
        _require(len(fields) == len(kinds), f"a {tag} has {len(fields)} fields")
        for field, kind in zip(fields, kinds, strict=True):
            _require(kind is None or type(field) is kind, f"a field of a {tag} is a {type(field).__name__}")
        return decode(self, depth_left - 1, *fields)

    def buffer(self, index: int) -> torch.Tensor:
        _require(0 <= index < len(self._buffers), f"buffer {index} does not exist")
        return self._buffers[index]

    def sequence(self, nodes: list[object], depth_left: int) -> list[object]:
        return [self.decode(node, depth_left) for node in nodes]

    def items(self, nodes: list[object], depth_left: int) -> dict[object, object]:
        found: dict[object, object] = {}
        for node in nodes:
            key_node, value_node, *_ = _list(node, length_min=2)
            key = self.decode(key_node, depth_left)
            _require(_is_key(key), f"a key is a {_type_name(key)}")
            found[key] = self.decode(value_node, depth_left)
        _require(len(found) == len(nodes), "a key occurs twice")
        return found


def _decode_int(_: _Unflattener, __: int, text: str) -> int:
    _require(re.fullmatch(r"-?0x[0-9a-f]+", text) is not None, "an int is not a number")
    return int(text, 16)


def _decode_float(_: _Unflattener, __: int, text: str) -> float:
    (value,) = _doubles(text, 1)
    return value


def _decode_complex(_: _Unflattener, __: int, text: str) -> complex:
    return complex(*_doubles(text, 2))


def _decode_str(_: _Unflattener, __: int, text: str) -> str:
    try:
        return _from_hex(text).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise _malformed("a str is not UTF-8") from error


def _decode_bytes(unflattener: _Unflattener, _: int, index: int) -> bytes:
    return unflattener.buffer(index).numpy().tobytes()


def _decode_ordered_dict(
    unflattener: _Unflattener, depth_left: int, nodes: list[object], versions: object
) -> OrderedDict[object, object]:
    found = OrderedDict(unflattener.items(nodes, depth_left))
    if versions is not None:
        vars(found)["_metadata"] = unflattener.decode(versions, depth_left)
    return found


def _decode_size(_: _Unflattener, __: int, shape: list[object]) -> torch.Size:
    return torch.Size(_shape(shape))


def _decode_dtype(_: _Unflattener, __: int, name: str) -> torch.dtype:
    _require(name in DTYPE_OF, f"dtype {name!r:.80} is unknown")
    return DTYPE_OF[name]


def _decode_device(_: _Unflattener, __: int, name: str) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, ValueError) as error:
        raise _malformed(f"device {name!r:.80} is unknown") from error


def _decode_tensor(
    unflattener: _Unflattener, depth_left: int, index: int, name: str, dims: list[object]
) -> torch.Tensor:
    dtype = _decode_dtype(unflattener, depth_left, name)
    raw, shape = unflattener.buffer(index), _shape(dims)
    _require(math.prod(shape) * dtype.itemsize == raw.numel(), "a tensor is not as large as its buffer")
    try:
        return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, _strides(shape))
    except (RuntimeError, TypeError) as error:
        raise _malformed("a tensor has an impossible shape") from error


def _decode_dtensor(
    unflattener: _Unflattener, depth_left: int, node: list[object], mesh: int, *forms: list[object]
) -> Shard:
    local = unflattener.decode(node, depth_left)
    if not isinstance(local, torch.Tensor):
        raise _malformed("a shard is no tensor")
    shape, mesh_shape, mesh_names, placements = forms
    layout = Layout(_shape(shape), _shape(mesh_shape), _texts(mesh_names), _texts(placements))
    return Shard(local, layout, mesh)


def _decode_array(unflattener: _Unflattener, _: int, index: int, name: str, dims: list[object]) -> np.ndarray:
    raw, dtype, shape = unflattener.buffer(index), _numpy_dtype(name), _shape(dims)
    _require(math.prod(shape) * dtype.itemsize == raw.numel(), "an array is not as large as its buffer")
    try:
        return raw.numpy().view(dtype).reshape(shape)
    except (ValueError, TypeError) as error:
        raise _malformed("an array has an impossible shape") from error


def _decode_scalar(unflattener: _Unflattener, depth_left: int, index: int, name: str) -> object:
    return _decode_array(unflattener, depth_left, index, name, [])[()]


_Kinds: TypeAlias = "tuple[type | None, ...]"

# For each tag the JSON types of its fields (None: any) and who reads them.
_DECODERS: Mapping[str, tuple[_Kinds, Callable[..., object]]] = {
    "int": ((str,), _decode_int),
    "float": ((str,), _decode_float),
    "complex": ((str,), _decode_complex),
    "str": ((str,), _decode_str),
    "bytes": ((int,), _decode_bytes),
    "list": ((list,), lambda un, depth, nodes: un.sequence(nodes, depth)),
    "tuple": ((list,), lambda un, depth, nodes: tuple(un.sequence(nodes, depth))),
    "dict": ((list,), lambda un, depth, nodes: un.items(nodes, depth)),
    "counter": ((list,), lambda un, depth, nodes: Counter(un.items(nodes, depth))),
    "ordered_dict": ((list, None), _decode_ordered_dict),
    "size": ((list,), _decode_size),
    "dtype": ((str,), _decode_dtype),
    "device": ((str,), _decode_device),
    "tensor": ((int, str, list), _decode_tensor),
    "dtensor": ((list, int, list, list, list, list), _decode_dtensor),
    "array": ((int, str, list), _decode_array),
    "scalar": ((int, str), _decode_scalar),
}


def _list(node: object, length_min: int) -> list[object]:
    if isinstance(node, list) and len(node) >= length_min:
        return node
    raise _malformed(f"a {type(node).__name__} stands where a list of {length_min} or more was expected")


def _shape(dims: list[object]) -> tuple[int, ...]:
    _require(len(dims) <= DIMENSIONS_MAX, f"a shape has {len(dims)} dimensions")
    sizes = tuple(dim for dim in dims if type(dim) is int and 0 <= dim < 2**63)
    _require(len(sizes) == len(dims), "a dimension is not a size")
    return sizes


def _texts(items: list[object]) -> tuple[str, ...]:
    texts = tuple(item for item in items if isinstance(item, str))
    _require(len(texts) == len(items) <= DIMENSIONS_MAX, "a name or a placement is no text")
    return texts


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    return tuple(math.prod(max(dim, 1) for dim in shape[i + 1 :]) for i in range(len(shape)))


def _numpy_dtype(code: str) -> np.dtype:
    try:
        return numpy_dtype(code)
    except ValueError as error:
        raise _malformed(str(error)) from error


def _doubles(text: str, count: int) -> tuple[float, ...]:
    data = _from_hex(text)
    _require(len(data) == 8 * count, "a float is not 8 bytes")
    return struct.unpack(f"<{count}d", data)


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise _malformed("a hexadecimal text is not one") from error


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise _malformed(problem)


def _malformed(problem: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"the description of the state is malformed: {problem}")
