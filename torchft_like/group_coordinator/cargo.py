"""The tensors of one message as what a lane carries: flat bytes, large tensors alone, small ones joined.

Large tensors are sent from, and received into, their own memory. Small ones cost a copy, and spare the
latency of a collective each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchft_like.group_coordinator.plans import parcels
from torchft_like.group_coordinator.transport import Transport, as_bytes
from torchft_like.plain_data import TensorSpec


class Cargo:
    """Tensors that leave, or the memory for those that come.

    Attributes:
        flats: what moves, contiguous uint8 tensors of one dimension, on each rank in the same order.
    """

    def __init__(
        self, transport: Transport, tensors: Sequence[Tensor], places: Sequence[str], *, is_incoming: bool
    ) -> None:
        self._transport, self._places = transport, places
        self._tensors = list(tensors)
        self._parcels = parcels([tensor.nbytes for tensor in tensors], places)
        load = _joined_memory if is_incoming else _joined
        self.flats = [load([as_bytes(tensors[index]) for index in parcel]) for parcel in self._parcels]

    @classmethod
    def outgoing(cls, transport: Transport, tensors: Sequence[Tensor]) -> Cargo:
        """Of a message's tensors, as the sender holds them."""
        carried = [transport.carried(tensor) for tensor in tensors]
        return cls(transport, carried, [tensor.device.type for tensor in tensors], is_incoming=False)

    @classmethod
    def incoming(cls, transport: Transport, specs: Sequence[TensorSpec]) -> Cargo:
        """Memory for what `specs` describe."""
        tensors = [transport.empty(spec.shape, spec.dtype, spec.device_type) for spec in specs]
        return cls(transport, tensors, [spec.device_type for spec in specs], is_incoming=True)

    def unload(self) -> list[Tensor]:
        """The tensors of an incoming cargo, once all of `flats` have arrived."""
        for flat, parcel in zip(self.flats, self._parcels, strict=True):
            if len(parcel) > 1:
                parts = [as_bytes(self._tensors[index]) for index in parcel]
                torch._foreach_copy_(parts, list(torch.split(flat, [len(part) for part in parts])))
        return list(map(self._transport.delivered, self._tensors, self._places))


def _joined(flats: list[Tensor]) -> Tensor:
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def _joined_memory(flats: list[Tensor]) -> Tensor:
    if len(flats) == 1:
        return flats[0]
    return torch.empty(sum(map(len, flats)), dtype=torch.uint8, device=flats[0].device)
