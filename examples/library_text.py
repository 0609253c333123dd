"""The source text of Python's standard library, cut into windows: what the examples train on."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


class StandardLibraryText(Dataset[tuple[Tensor, Tensor]]):
    """The windows of `context` bytes, one after the other."""

    def __init__(self, context: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.bytes = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the window `index`: inputs and targets, `[context]` int64 each."""
        return self.window(index * self.context)

    def window(self, start: int) -> tuple[Tensor, Tensor]:
        """Return the window that begins at a byte; targets are one byte ahead of inputs."""
        tokens = self.bytes[start : start + self.context + 1].long()
        return tokens[:-1], tokens[1:]
