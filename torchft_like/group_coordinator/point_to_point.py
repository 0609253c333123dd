"""Tensors from one rank to another, and which ranks can be meant by that.

A tensor travels as a message that says what it is: a receiver that expected another dtype or shape gets
an error, and neither a part of the tensor nor a crash.

In a group of one, what is sent goes nowhere, and what is received is nothing: zeros, or None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchft_like.group_coordinator.arguments import Terms, checked_tensor, tensor_terms
from torchft_like.group_coordinator.messages import start_receiving, start_sending, taken_apart
from torchft_like.group_coordinator.plans import checked_rank, shape_text
from torchft_like.group_coordinator.transport import Transport

TENSOR = "tensor"


def send(transport: Transport, tensor: Tensor, dst: int) -> None:
    """Returns when the tensor may be changed."""

    def prepare() -> tuple[Terms, object]:
        return tensor_terms(checked_tensor(tensor)), tensor

    with transport.guard("send"):
        start_sending(transport, dst, TENSOR, prepare).land()


def recv(transport: Transport, size: Sequence[int], dtype: torch.dtype, src: int) -> Tensor:
    """A tensor of that size and dtype, on the coordinator's device."""
    with transport.guard("recv"):
        name = str(dtype).removeprefix("torch.")
        terms = ("dtype", name), ("shape", shape_text(torch.Size(size)))
        tag = transport.tag("from", src)
        tensor: Tensor = start_receiving(transport, src, tag, TENSOR, terms).land()
        return tensor.to(transport.device)


def peer(transport: Transport, rank: int | None, default: int, name: str) -> int | None:
    """Whom a caller means; None in a group of one, which has nobody to mean.

    Raises:
        ValueError: no rank of the group, or the caller itself.
    """
    found = checked_rank(default if rank is None else rank, transport.world_size, name)
    if transport.world_size == 1:
        return None
    if found == transport.rank:
        raise ValueError(f"{name} {found} is the caller itself: a rank does not send to itself")
    return found


def check_alone(transport: Transport, value: object) -> None:
    """In a group of one: refuse what could not be sent in a larger one.

    Raises:
        PlainDataError: it does not travel.
    """
    taken_apart(transport, value)
