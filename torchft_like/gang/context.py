"""The gangs to use for tensors of a device: those of the thread's innermost block, or else the default
ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from torchft_like.gang import current
from torchft_like.gang.gangs import Gangs, create_fake_gangs

_defaults: dict[torch.device, Gangs] = {}
_alone: dict[torch.device, Gangs] = {}


def get_current_gangs(device: torch.device | None = None) -> Gangs:
    """Return the gangs of the innermost block of the calling thread that is about a device, or the default
    ones.

    Args:
        device: the device of the tensors; None for torch's default device.
    """
    wanted = _device(device)
    return current.innermost(wanted) or get_default_gangs(wanted)


@contextlib.contextmanager
def set_gangs(gangs: Gangs, *, meta: bool = False) -> Iterator[None]:
    """Make the gangs the thread's current ones for their device in the block, as `with gangs:` does.

    Args:
        meta: whether they are the current ones for the meta device, too.
    """
    current.push(gangs, meta=meta)
    try:
        yield
    finally:
        current.pop(gangs)


def get_default_gangs(device: torch.device | None = None) -> Gangs:
    """Return the gangs that the process has set for a device, or else fake ones, the same each time.

    Args:
        device: the device of the tensors; None for torch's default device.
    """
    wanted = _device(device)
    if (found := _defaults.get(wanted)) is not None:
        return found
    place = torch.device("cpu") if wanted.type == "meta" else wanted
    return _alone.setdefault(place, create_fake_gangs(place))


def set_default_gangs(gangs: Gangs, *, meta: bool = False) -> None:
    """Make the gangs the default ones of the process for their device.

    Args:
        meta: whether they are the default ones for the meta device, too.
    """
    _defaults[current.with_index(gangs.device)] = gangs
    if meta:
        _defaults[current.META] = gangs


class GangContext:
    """The current gangs as an object, for code that gets its dependencies as arguments; a test may pass
    another one.
    """

    def get_current_gangs(self, device: torch.device | None = None) -> Gangs:
        """Return what the function `get_current_gangs` returns."""
        return get_current_gangs(device)

    def set_gangs(self, gangs: Gangs, *, meta: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return what the function `set_gangs` returns."""
        return set_gangs(gangs, meta=meta)


def _device(device: torch.device | None) -> torch.device:
    return current.with_index(torch.get_default_device() if device is None else torch.device(device))
