"""Changing tensors in place where autograd, or inference mode, would not have it."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor


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
