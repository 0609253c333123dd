"""Which gangs to use for tensors of a device: those of the thread's block, or else the default ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from torchft_like.gang import current
from torchft_like.gang.gangs import Gangs, create_fake_gangs

_lock = threading.Lock()
_defaults: dict[torch.device, Gangs] = {}
_alone: dict[torch.device, Gangs] = {}


def get_current_gangs(device: torch.device | None = None) -> Gangs:
    """The gangs of the innermost block of the calling thread that is about a device, or the default ones.

    Args:
        device: left out, torch's default device.
    """
    wanted = _device(device)
    return current.innermost(wanted) or get_default_gangs(wanted)


@contextlib.contextmanager
def set_gangs(gangs: Gangs, *, meta: bool = False) -> Iterator[None]:
    """In the block, the gangs are the thread's current ones for their device, as in `with gangs:`.

    Args:
        meta: for the meta device, too.
    """
    current.push(gangs, meta=meta)
    try:
        yield
    finally:
        current.pop(gangs)


def get_default_gangs(device: torch.device | None = None) -> Gangs:
    """The gangs of the process for a device: what it has set, or else fake ones, the same each time.

    Args:
        device: left out, torch's default device.
    """
    wanted = _device(device)
    with _lock:
        if (found := _defaults.get(wanted)) is not None:
            return found
        place = torch.device("cpu") if wanted.type == "meta" else wanted
        return _alone.setdefault(place, create_fake_gangs(place))


def set_default_gangs(gangs: Gangs, *, meta: bool = False) -> None:
    """Make the gangs the default ones of the process for their device.

    Args:
        meta: for the meta device, too.
    """
    with _lock:
        _defaults[current.with_index(gangs.device)] = gangs
        if meta:
            _defaults[current.META] = gangs


class GangContext:
    """The current gangs as an object, for code that is handed what it needs; a test may hand it another."""

    def get_current_gangs(self, device: torch.device | None = None) -> Gangs:
        """What the function of that name gives."""
        return get_current_gangs(device)

    def set_gangs(self, gangs: Gangs, *, meta: bool = False) -> contextlib.AbstractContextManager[None]:
        """What the function of that name gives."""
        return set_gangs(gangs, meta=meta)


def _device(device: torch.device | None) -> torch.device:
    return current.with_index(torch.get_default_device() if device is None else torch.device(device))
