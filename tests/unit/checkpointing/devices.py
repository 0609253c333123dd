"""A device without one: tensors of which a test says that they lie on it, and copies that take their time."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from torchft_like.checkpointing import host_memory, state_stream
from torchft_like.checkpointing.host_memory import TorchDevices

# When a copy is carried out: as soon as it is begun, when somebody waits for it, or at some moment between.
PACES = ("eager", "lazy", "uneven")


class PlayedDevice(TorchDevices):
    """One device, whose streams carry out their copies in their order.

    Attributes:
        copies: how many copies were begun.
        buffers: how many buffers were made.
    """

    def __init__(self, pace: str = "eager", seed: int = 0) -> None:
        self.copies = self.buffers = 0
        self._pace = pace
        self._chance = random.Random(seed)
        self._kept: list[Tensor] = []
        self._storages: set[int] = set()
        self._stream: deque[Callable[[], object]] = deque()

    def put(self, tensor: Tensor) -> Tensor:
        """Say that a tensor lies on the device."""
        self._kept.append(tensor)
        self._storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    def has(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._storages

    def buffer(self, nbytes: int) -> Tensor:
        self.buffers += 1
        return torch.full((nbytes,), 0xAA, dtype=torch.uint8)

    def stream_after_current(self, device: torch.device) -> Any:
        return self._stream

    def on(self, stream: Any) -> nullcontext[None]:
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copies += 1
        self._stream.append(lambda: target.copy_(source))
        if self._pace == "eager" or (self._pace == "uneven" and self._chance.random() < 0.5):
            self._run(self._chance.randint(1, len(self._stream)) if self._pace == "uneven" else 1)

    def mark(self, stream: Any) -> Callable[[], object]:
        passed: list[bool] = []
        self._stream.append(lambda: passed.append(True))

        def wait() -> None:
            while not passed:
                self._run(1)

        return wait

    def synchronize(self, device: torch.device) -> None:
        self._run(len(self._stream))

    @property
    def is_idle(self) -> bool:
        """Whether no copy is under way."""
        return not self._stream

    def _run(self, count: int) -> None:
        for _ in range(count):
            self._stream.popleft()()


@contextlib.contextmanager
def played(device: PlayedDevice, **sizes: int) -> Iterator[PlayedDevice]:
    """Have the checkpoints use the device, with pieces and buffers of other sizes than they have."""
    with contextlib.ExitStack() as patches:
        for module in (host_memory, state_stream):
            patches.enter_context(patch.object(module, "devices", device))
            for name, value in sizes.items():
                if hasattr(module, name):
                    patches.enter_context(patch.object(module, name, value))
        yield device
