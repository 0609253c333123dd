"""A fingerprint of a state dict: equal exactly when two replicas hold the same bits.

The state is written into SHA-256 in one canonical form: every value as a type tag, its length and
its bytes, dicts in the order of their keys. What has no canonical form is refused, because a digest
that skips something is worse than none. The module knows nothing of replicas or of the Manager.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

DEPTH_MAX = 64


def state_digest(state_dict: Mapping[str, object]) -> str:
    """SHA-256 over the names, shapes, dtypes and bytes of everything in `state_dict`, as 64 hex digits.

    It may hold None, bool, int, float, str, bytes, dense tensors, and dicts, lists and tuples of
    these, as the state dicts of modules and optimizers do. Neither the order of a dict nor the
    device, strides or `requires_grad` of a tensor counts; `-0.0` and `0.0`, `1` and `True`, a
    list and a tuple all differ.

    Raises:
        TypeError: a value or a key is of another type; the message says where.
        ValueError: it is nested more than 64 deep.
    """
    digest = hashlib.sha256()
    _add(digest, state_dict, "state")
    return digest.hexdigest()


def _add(digest: Hash, value: object, where: str, depth: int = 0) -> None:
    if depth > DEPTH_MAX:
        raise ValueError(f"{where[:80]}...: nested more than {DEPTH_MAX} deep")
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value, where)
    elif isinstance(value, Mapping):
        _add_header(digest, "dict", len(value))
        for encoded, key in sorted((_scalar(key, f"a key of {where}"), key) for key in value):
            _add_bytes(digest, *encoded)
            _add(digest, value[key], f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        _add_header(digest, "tuple" if isinstance(value, tuple) else "list", len(value))
        for index, item in enumerate(value):
            _add(digest, item, f"{where}[{index}]", depth + 1)
    else:
        _add_bytes(digest, *_scalar(value, where))


def _add_tensor(digest: Hash, tensor: torch.Tensor, where: str) -> None:
    # A subclass may hold its numbers anywhere; only the two plain classes are known to hold all of them.
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(f"{where} is a {type(tensor).__name__} that is not dense and plain: no digest of it")
    _add_bytes(digest, f"tensor {tensor.dtype} {list(tensor.shape)}", _raw(tensor))


def _raw(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _scalar(value: object, where: str) -> tuple[str, bytes]:
    """Type tag and bytes of a value that holds no others."""
    match value:
        case None:
            return "none", b""
        case bool() | int():
            return type(value).__name__, str(int(value)).encode()
        case float():
            return "float", struct.pack("<d", value)
        case str():
            return "str", value.encode()
        case bytes():
            return "bytes", value
    raise TypeError(f"{where} is of type {type(value).__name__}: no digest of it")


def _add_bytes(digest: Hash, tag: str, data: bytes | memoryview) -> None:
    _add_header(digest, tag, len(data))
    digest.update(data)


def _add_header(digest: Hash, tag: str, length: int) -> None:
    """Tag and length first, so that no two different states write the same bytes."""
    digest.update(f"{tag}:{length}\n".encode())
