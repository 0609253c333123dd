"""Tensors as memory: which have any that can be moved, and how to change it in place in spite of autograd and
inference mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's numbers are in memory, each at a place of its shape, and are all of it."""
    odd = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return tensor.layout is torch.strided and not odd


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether some of the tensor's elements share memory, as those of an expanded tensor do."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether an element of one tensor lies where one of the other does."""
    if not (is_dense(one) and is_dense(other)) or not (one.numel() and other.numel()):
        return False
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (begin, end), (other_begin, other_end) = _bytes_of(one), _bytes_of(other)
    if end <= other_begin or other_end <= begin:
        return False
    if one.dtype != other.dtype or (one.is_contiguous() and other.is_contiguous()):
        return True
    offset = min(one.storage_offset(), other.storage_offset())  # columns of a matrix lie between each other
    span = (max(end, other_end) - min(begin, other_begin)) // one.itemsize
    marks = torch.zeros(span, dtype=torch.bool, device="cpu")
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - offset).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - offset).any())


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first element and after the last."""
    begin = tensor.data_ptr()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (steps + 1) * tensor.itemsize


def writing_to(*tensors: Tensor) -> AbstractContextManager[None]:
    """Return a context in which these tensors can be changed in place, by any thread, unseen by autograd.

    Each thread has modes of its own, so the modes of a collective's caller do not hold on a backend's thread.
    Tensors made in inference mode can be changed in inference mode only.
    """
    is_inference = any(tensor.is_inference() for tensor in tensors)
    return torch.inference_mode() if is_inference else torch.no_grad()


def divide(tensors: Sequence[Tensor], divisor: int) -> None:
    """Divide in place; memory that several of the tensors share is divided once."""
    if len(tensors) > 1:
        with writing_to(*tensors):
            quotients = [tensor / divisor for tensor in tensors]
            for tensor, quotient in zip(tensors, quotients, strict=True):
                tensor.copy_(quotient)
        return
    (tensor,) = tensors
    if tensor.requires_grad or tensor.is_inference():
        with writing_to(tensor):
            tensor.div_(divisor)
    else:
        tensor.div_(divisor)  # the usual case, in which the context would take as long as a small division
