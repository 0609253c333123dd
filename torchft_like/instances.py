"""Values of a library's own classes, as plain parts and back: of tensors, enums, dataclasses, named tuples.

A class is taken only if this process has given it to `torch.serialization.add_safe_globals`, as torchao does
with its own: `torch.load(weights_only=True)` takes the same classes. So a peer can name no other class, and
none is imported for it. Nothing of a class is called but its `__tensor_flatten__` and `__tensor_unflatten__`,
and the look-up of an enum's member. This module knows nothing of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor

Parts: TypeAlias = "tuple[object, ...]"


@dataclass(frozen=True)
class TensorInstance:
    """A tensor of a library's own class that is not put together yet.

    Attributes:
        class_name: the class's module and qualified name.
        inner: its inner tensors, by name.
        shape: the shape of the whole.
    """

    class_name: str
    inner: Any
    shape: Any


def parts_of(value: object) -> Parts | None:
    """Return what a value is made of; None if it is of no kind that can be put together again.

    It is the name of an enum's member; the items of a named tuple; the fields of a dataclass, by name; or a
    tensor's inner tensors by name, its context, shape and strides. Several flags at once are of no such kind,
    nor is a dataclass that is a container, too.
    """
    kind: Any = type(value)
    if isinstance(value, Enum):
        return (value.name,) if value.name in kind.__members__ else None
    if _is_named_tuple(kind):
        return tuple(value)  # type: ignore[arg-type]
    if is_dataclass(kind) and kind.__new__ is object.__new__:
        names = _field_names(kind)
        is_whole = names >= getattr(value, "__dict__", {}).keys()
        return ({n: getattr(value, n) for n in sorted(names) if hasattr(value, n)},) if is_whole else None
    if isinstance(value, Tensor) and hasattr(kind, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return {name: getattr(value, name) for name in names}, context, value.size(), value.stride()
    return None


def name_of_class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_taken(kind: type) -> bool:
    """Return whether values of a class may be put together in this process."""
    return any(kind is known for _, known in _taken())


def together(name: str, parts: Parts, *, leaves_tensors: bool = False) -> object:
    """Put a value together.

    Args:
        leaves_tensors: whether to return a `TensorInstance` for a tensor.

    Raises:
        ValueError: this process does not take the class, or has another version of it; the text names it.
    """
    kind = next((known for known_name, known in _taken() if known_name == name), None)
    if kind is None:
        raise ValueError(
            f"it has a {name:.200}, which this process does not take: import what defines it on every "
            "replica, or give it to torch.serialization.add_safe_globals, before the state is healed"
        )
    try:
        if leaves_tensors and issubclass(kind, Tensor):
            inner, _, shape, _ = parts
            return TensorInstance(name, inner, torch.Size(shape))  # type: ignore[arg-type]
        return _make(kind, parts)
    except Exception as error:
        raise ValueError(f"no {name} can be made of its parts: {error!r:.300}") from error


def _make(kind: Any, parts: Parts) -> object:
    if issubclass(kind, Enum):
        (member,) = parts
        return kind[member]
    if _is_named_tuple(kind):
        return kind._make(parts)
    if is_dataclass(kind):
        (values,) = parts
        if not isinstance(values, dict) or not values.keys() <= _field_names(kind):
            raise ValueError("its fields are others")
        made = object.__new__(kind)  # type: ignore[arg-type]
        for name, value in values.items():  # as a pickle would: what __init__ does was done at the sender
            object.__setattr__(made, name, value)
        return made
    inner, context, shape, strides = parts
    if not isinstance(inner, dict) or not all(isinstance(tensor, Tensor) for tensor in inner.values()):
        raise ValueError("its inner tensors are something else")
    if hasattr(kind, "to_local"):
        raise ValueError("a DTensor travels as a shard")
    tensor = kind.__tensor_unflatten__(inner, context, shape, strides)
    if type(tensor) is not kind or tensor.is_nested:
        raise ValueError("it is no dense tensor of that class")
    return tensor


def _taken() -> Iterator[tuple[str, type]]:
    """Yield the name and class of each that was given to torch, and any other name that came with it."""
    for entry in torch.serialization.get_safe_globals():
        known, *others = entry if isinstance(entry, tuple) else (entry,)
        if isinstance(known, type):
            for name in (name_of_class(known), *others):
                yield name, known


def _field_names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")
