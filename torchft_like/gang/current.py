"""The gangs that a block of code uses, for callees that cannot get them as an argument: a stack per thread.

It is kept in a context variable, so that tasks of one thread do not see each other's, together with an object
that stands for the thread, so that no thread inherits another's. (The thread's number would not do: a later
thread gets it again.)
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torchft_like.gang.gangs import Gangs

META = torch.device("meta")


class _Block(NamedTuple):
    """A block that the thread is in, and the devices for whose tensors its gangs are used."""

    gangs: Gangs
    devices: tuple[torch.device, ...]


class _Stack(NamedTuple):
    thread: object
    blocks: tuple[_Block, ...]


_stack: ContextVar[_Stack | None] = ContextVar("torchft_current_gangs", default=None)
_local = threading.local()


def _calling_thread() -> object:
    if not hasattr(_local, "thread"):
        _local.thread = object()
    return _local.thread


def maybe_get_current_gangs() -> Gangs | None:
    """Return the gangs of the innermost `with gangs:` that the calling thread is in; None outside of any."""
    blocks = _present()
    return blocks[-1].gangs if blocks else None


def innermost(device: torch.device) -> Gangs | None:
    """Return the gangs of the innermost block about a device; None outside of any."""
    return next((block.gangs for block in reversed(_present()) if device in block.devices), None)


def push(gangs: Gangs, *, meta: bool = False) -> None:
    """Begin a `with gangs:` block.

    Args:
        meta: whether the gangs are those of the meta device, too.
    """
    devices = (with_index(gangs.device), *([META] if meta else []))
    _stack.set(_Stack(_calling_thread(), (*_present(), _Block(gangs, devices))))


def pop(gangs: Gangs) -> None:
    """End a `with gangs:` block. Generators may end theirs out of order: the innermost block of these gangs
    ends.
    """
    present = _present()
    for place in reversed(range(len(present))):
        if present[place].gangs is gangs:
            _stack.set(_Stack(_calling_thread(), present[:place] + present[place + 1 :]))
            return


def with_index(device: torch.device) -> torch.device:
    """Return the device with its index: "cuda" alone means the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _present() -> tuple[_Block, ...]:
    stack = _stack.get()
    return stack.blocks if stack is not None and stack.thread is _calling_thread() else ()
