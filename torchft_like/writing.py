"""Tensors as memory: which have any that can be moved, and how it is changed in place where autograd, or
inference mode, would not have it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether its numbers are in memory, each in a place of its shape, and all that there is to it."""
    odd = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return tensor.layout is torch.strided and not odd


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether several of its elements are one in memory, as those of an expanded tensor are."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def writing_to(*tensors: Tensor) -> AbstractContextManager[None]:
    """A context in which these can be changed in place, by any thread, and autograd does not see it.

    Each thread has modes of its own, so what the caller of a collective has set is of no use to a
    backend's thread. Tensors made in inference mode can be changed in inference mode only.
    """
    is_inference = any(tensor.is_inference() for tensor in tensors)
    return torch.inference_mode() if is_inference else torch.no_grad()


def divide(tensor: Tensor, divisor: int) -> None:
    """Divide in place."""
    if tensor.requires_grad or tensor.is_inference():
        with writing_to(tensor):
            tensor.div_(divisor)
    else:
        tensor.div_(divisor)  # as nearly always, and the context takes as long as a small division
