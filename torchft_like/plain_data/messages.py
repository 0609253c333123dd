"""Messages, taken apart into a structure and leaves, and put together again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchft_like.plain_data.reading import FOREIGN, LeafSource, Reader, Structure, foreign
from torchft_like.plain_data.schema import Buffer, Leaf, Message, TensorSpec, frombuffer, settled
from torchft_like.plain_data.schemas import CALLS, MESSAGES
from torchft_like.plain_data.writing import Sheet, Unfit, require_length, write


def disassemble(value: object) -> Message:
    """Take a message apart.

    Raises:
        PlainDataError: a part of the value is of a type that cannot be sent, the value contains itself, or it
          is too large; the text names the part (`a[3]`), its type, and what to pass instead.
    """
    structure, leaves = dissect(value)
    return Message(structure, tuple(map(_as_tensor, leaves)) if leaves else ())


def dissect(value: object) -> tuple[bytes, list[Leaf]]:
    """Take a message apart as `disassemble` does, but leave its leaves as they are, for a sender that needs
    bytes.
    """
    structure, leaves = write(value, MESSAGES)
    if leaves:
        leaves = [settled(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return structure, leaves


def tensor_specs(structure: bytes) -> list[TensorSpec]:
    """Return the descriptions of the tensors that belong to the structure of a message, in their order.

    Raises:
        PlainDataError: the bytes are no structure.
    """
    return list(Structure(structure, MESSAGES).specs)


def assemble(structure: bytes, tensors: Sequence[Tensor]) -> object:
    """Put a value together that `disassemble` took apart, on the memory and the devices of `tensors`.

    Raises:
        PlainDataError: the bytes are no structure, or the tensors are not those that it describes.
    """
    known = Structure(structure, MESSAGES)
    if known.specs or tensors:
        _require_same(known.specs, tensors)
    return known.value(_Tensors(tensors))


def assemble_from(structure: bytes, leaves: LeafSource) -> object:
    """Put a value together that `dissect` took apart; each leaf is fetched once, in order, while it is read.

    Raises:
        PlainDataError: the bytes are no structure.
        FaultToleranceError: the source of the leaves raised it.
    """
    return Structure(structure, MESSAGES).value(leaves)


def encode(values: Sequence[object]) -> bytes:
    """Encode values without leaves, one after the other, for `decode`.

    Raises:
        PlainDataError: a value is of a type that cannot be sent, or too large.
    """
    sheet = Sheet(CALLS)
    index = 0
    try:
        for index, value in enumerate(values):  # noqa: B007 - the handler below reads it
            sheet.write(value, 0)
    except Unfit as unfit:
        raise unfit.within(index).error(CALLS) from None
    data = b"".join(sheet.parts)
    require_length(len(data), CALLS)
    return data


def decode(data: bytes, start: int = 0, count: int = 1) -> list[object]:
    """Decode `count` values that `encode` has encoded.

    Raises:
        PlainDataError: there are fewer values, or more.
    """
    try:
        values, end = Reader(data, CALLS, CALLS.limits).values(start, count)
        if end != len(data):
            raise ValueError("it goes on after its end")
    except FOREIGN as error:
        raise foreign(error) from error
    return values


def _require_same(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
    if len(specs) != len(tensors):
        raise foreign(ValueError(f"the structure speaks of {len(specs)} tensors, and {len(tensors)} came"))
    for index, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
        if spec.dtype != tensor.dtype or spec.shape != tuple(tensor.shape):
            problem = (
                f"the structure speaks of tensor {index} as {spec.dtype} {spec.shape}, and it came as "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
            raise foreign(ValueError(problem))


class _Tensors:
    """Leaves that came as tensors, which the value takes over."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._next = iter(tensors)

    def tensor(self, _: TensorSpec) -> Tensor:
        return next(self._next)

    def memory(self, _: int) -> Buffer:
        tensor = next(self._next)
        if tensor.dtype is not torch.uint8:
            raise ValueError("an array is not in a tensor of bytes")
        return tensor.detach().cpu().contiguous().numpy().reshape(-1).data

    def data(self, nbytes: int) -> bytes:
        return bytes(self.memory(nbytes))


def _as_tensor(leaf: Leaf) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    data = bytearray(leaf) if isinstance(leaf, bytes) or not leaf.flags.writeable else leaf
    if isinstance(data, bytearray):
        return frombuffer(data, torch.uint8, (len(data),))
    return torch.from_numpy(data.reshape(-1).view(np.uint8))
