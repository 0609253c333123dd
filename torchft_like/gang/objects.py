"""Lists of plain data from one member of a group to all: what is said before anything is sent.

Every member first hears from every other how many objects it has, who it thinks sends, and whether the
sender can. So a list of another length on one member is an error on all of them, and nobody waits for
what will not come. Nothing is unpickled, and nothing is allocated for more than `plain_data` allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchft_like import plain_data
from torchft_like.errors import GangError, PlainDataError
from torchft_like.plain_data import Message, TensorSpec
from torchft_like.plain_data.schema import STRUCTURE_BYTES_MAX

_NO_LIST = -1
Gather = Callable[[Tensor], list[Tensor]]
Broadcast = Callable[[Tensor, int], None]


class Announcement(NamedTuple):
    """What a member says before objects are sent.

    Attributes:
        length: of its list; -1 if what it gave is none.
        source: who sends, as it was told.
        structure_bytes: of its message, if it is the one who sends; -1 if it cannot.
    """

    length: int
    source: int
    structure_bytes: int


def check_agreement(said: Sequence[Announcement]) -> None:
    """Whether all members mean the same broadcast.

    Raises:
        ValueError: they do not; the same on every member.
    """
    if len({each.source for each in said}) > 1:
        raise ValueError(f"the members disagree about the source: {_by_rank([s.source for s in said])}")
    if strangers := [rank for rank, each in enumerate(said) if each.length == _NO_LIST]:
        raise ValueError(f"ranks {strangers} gave something else than a list of objects")
    if len({each.length for each in said}) > 1:
        raise ValueError(f"the members' lists differ in length: {_by_rank([s.length for s in said])}")


class ObjectBroadcast:
    """One broadcast, in the order in which its parts are called.

    Args:
        rank: of the caller.
        source: who sends.
        device: where the group's tensors are.
    """

    def __init__(self, rank: int, source: int, device: torch.device) -> None:
        self._rank = rank
        self._source = source
        self._device = device
        self._message: Message | None = None
        self._refusal: Exception | None = None

    def agree(self, objects: list[object], gather: Gather) -> int:
        """Compare what the members were told; gives the bytes that describe the objects.

        Raises:
            ValueError: the members were told different things, or one gave no list.
            PlainDataError: on the source, for an object that cannot be sent.
            GangError: on the others, for the same reason.
        """
        is_list = isinstance(objects, list)
        if not is_list:
            self._refusal = ValueError(f"objects are given in a list, not in a {type(objects).__name__}")
        elif self._rank == self._source:
            self._take_apart(objects)
        size = -1 if self._refusal is not None else len(self._message.structure) if self._message else 0
        length = len(objects) if is_list else _NO_LIST
        own = torch.tensor([length, self._source, size], dtype=torch.int64, device=self._device)
        said = [Announcement(*map(int, each.tolist())) for each in gather(own)]
        if is_list:
            check_agreement(said)
        if self._refusal is not None:
            raise self._refusal
        if said[self._source].structure_bytes < 0:
            raise GangError(f"rank {self._source} cannot send its objects; its own error says why")
        return said[self._source].structure_bytes

    def transfer(self, objects: list[object], structure_bytes: int, broadcast: Broadcast) -> None:
        """Send the objects, or replace those of the list by what comes.

        Raises:
            GangError: what came is not a message.
        """
        if (message := self._message) is not None:
            broadcast(_bytes_to_tensor(message.structure, self._device), self._source)
            for tensor in message.tensors:
                if tensor.numel():
                    broadcast(tensor.detach().to(self._device).contiguous(), self._source)
            return
        try:
            objects[:] = self._receive(structure_bytes, len(objects), broadcast)
        except PlainDataError as error:
            raise GangError(f"rank {self._source} sent something else than objects: {error}") from error

    def _take_apart(self, objects: list[object]) -> None:
        try:
            self._message = plain_data.disassemble(list(objects))
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are told first
            self._refusal = error

    def _receive(self, structure_bytes: int, count: int, broadcast: Broadcast) -> list[object]:
        if structure_bytes > STRUCTURE_BYTES_MAX:
            raise PlainDataError(f"it announces {structure_bytes} bytes of structure")
        buffer = torch.empty(structure_bytes, dtype=torch.uint8, device=self._device)
        broadcast(buffer, self._source)
        structure = buffer.cpu().numpy().tobytes()
        tensors = [self._receive_tensor(spec, broadcast) for spec in plain_data.tensor_specs(structure)]
        received = plain_data.assemble(structure, tensors)
        if not isinstance(received, list) or len(received) != count:
            raise PlainDataError(f"it is no list of {count} objects")
        return received

    def _receive_tensor(self, spec: TensorSpec, broadcast: Broadcast) -> Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        if tensor.numel():
            broadcast(tensor, self._source)
        return tensor if spec.device_type == self._device.type else tensor.to(spec.device_type)


def _bytes_to_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _by_rank(values: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
