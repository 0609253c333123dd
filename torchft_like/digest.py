"""A fingerprint of a state dict: equal exactly when two replicas hold the same bits.

The codec encodes the state, dicts in the order of the bytes of their keys, and SHA-256 is taken of the
result. A value that cannot be encoded is refused, because a digest that skips a value is worse than none. The
module knows nothing of replicas or of the Manager.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from operator import itemgetter

import torch
from torch import Tensor, nn

from torchft_like.instances import parts_of
from torchft_like.plain_data import (
    DICT,
    PLAIN_KEYS,
    SIMPLE,
    TAGS_END,
    Limits,
    Schema,
    Sheet,
    Unfit,
    UnfitType,
    about_key,
    bytes_of,
    refuse,
    settled,
    write,
    write_dtype,
    write_instance,
    write_tensor,
)


def state_digest(state_dict: Mapping[str, object]) -> str:
    """Return the SHA-256 over the names, shapes, dtypes and bytes of everything in `state_dict`, as 64 hex
    digits.

    It may hold None, bool, int, float, str, bytes, dense tensors, and dicts, lists and tuples of
    these, as the state dicts of modules and optimizers do; and enums, dataclasses and tensors of a
    library's own class that tell what they are made of (`__tensor_flatten__`). Neither the order of a
    dict nor the device, strides or `requires_grad` of a tensor counts; `-0.0` and `0.0`, `1` and
    `True`, a list and a tuple all differ. Digests of different versions of this package differ.

    Raises:
        TypeError: a value or a key is of another type; the text says where.
        ValueError: the state is nested more than 64 deep.
    """
    structure, leaves = write(state_dict, _DIGESTED)
    digest = hashlib.sha256(structure)
    for leaf in leaves:
        digest.update(bytes_of(settled(leaf) if isinstance(leaf, Tensor) else leaf))
    return digest.hexdigest()


def _write_other(value: object, sheet: Sheet, depth: int) -> None:
    """Write a subclass as its base type: the two compare equal."""
    for kind in (bool, int, float, str, bytes, list, tuple):
        if isinstance(value, kind):
            SIMPLE[kind](value, sheet, depth)
            return
    if isinstance(value, Mapping):
        _write_sorted(value, sheet, depth)
    elif (parts := parts_of(value)) is not None:
        write_instance(value, parts, sheet, depth)
    else:
        refuse(value, sheet, depth)


def _write_sorted(value: Mapping[object, object], sheet: Sheet, depth: int) -> None:
    """Write a dict in the order of the bytes of its keys, however it was built."""
    sheet.open(DICT, len(value), depth)
    key: object = None
    try:
        written = []
        for key in value:
            if isinstance(key, tuple | Mapping | Tensor):
                raise UnfitType(about_key(key, sheet.schema))
            alone = Sheet(sheet.schema)
            alone.write(key, depth + 1)
            written.append((b"".join(alone.parts), key))
        for data, key in sorted(written, key=itemgetter(0)):
            sheet.put(data)
            sheet.write(value[key], depth + 1)
    except Unfit as unfit:
        raise unfit.within(key)  # noqa: B904 - the same error


# A digest is never read, so only the depth is limited.
_DIGESTED = Schema(
    writers={
        **SIMPLE,
        dict: _write_sorted,
        Tensor: write_tensor,
        nn.Parameter: write_tensor,
        torch.dtype: write_dtype,
    },
    other=_write_other,
    keys=PLAIN_KEYS | {bytes},
    tags_end=TAGS_END,
    allowed="None, bool, int, float, str, bytes, dense tensors, and dicts, lists and tuples of these",
    root="the state",
    limits=Limits(2**62, 2**62, 2**62, 2**62),
    inline_bytes_max=2**32 - 1,
    type_error=TypeError,
)
