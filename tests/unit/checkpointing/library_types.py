"""Classes as a library of optimizers has them, for the tests of states."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch


class Rounding(Enum):
    NEAREST = auto()
    STOCHASTIC = auto()


@dataclass(frozen=True)
class Settings:
    rounding: Rounding
    block: int = 2
    kept: list[float] = field(default_factory=list)


Range = namedtuple("Range", "low high")


class Quantized(torch.Tensor):
    """A tensor of bytes and a scale for each row, as the low-bit optimizers have them."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, settings: Settings) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, settings: Settings) -> None:
        self.codes, self.scale, self.settings = codes, scale, settings

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale"], [self.settings]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, _shape: object, _strides: object) -> Quantized:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *arguments: Any) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            one = arguments[1][0]
            return cls(one.codes, one.scale, one.settings)
        raise NotImplementedError(func)


KINDS: list[Any] = [Rounding, Settings, Range, Quantized]


def quantized(fill: int = 7, scale: float = 0.5) -> Quantized:
    return Quantized(
        torch.full((4, 3), fill, dtype=torch.uint8), torch.full((4,), scale), Settings(Rounding.STOCHASTIC)
    )
