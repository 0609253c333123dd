"""The accelerator of this process, as threads that work beside the training thread have to treat it.

Two things must not come of what they do. A process that has used no device must not begin to, for a
context takes half a gigabyte of it. And a CUDA graph that another thread captures must not be spoilt: while
a capture lasts, in the mode that torch's captures have, CUDA fails every call of any thread that it holds
unsafe, such as a question to an event, and the capture with it. Whether it does is a setting of the
thread that calls. torch changes it around its own watchdog's questions and offers Python no function for
that, so it is changed here by CUDA's own function, of the library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._C._distributed_c10d import Work

# Of CUDA's enumeration cudaStreamCaptureMode: a call is unsafe only where its own thread captures.
THREAD_LOCAL = 1

_logger = logging.getLogger(__name__)


def is_in_use() -> bool:
    """Whether this process has used an accelerator; to ask uses none."""
    if (accelerator := torch.accelerator.current_accelerator()) is None:
        return False
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return is_initialized is None or bool(is_initialized())


@contextmanager
def beside_captures(device: torch.device | int | None) -> Iterator[None]:
    """A block with `device` as the thread's current one, whose calls spoil no capture of another thread.

    Every thread of this library that works with a GPU does it in such a block.

    Args:
        device: of an accelerator, or its index: what is current is a matter of the thread, and CUDA makes a
            context on the one that is. A CPU, None, and a process without accelerator change nothing.
    """
    index = device.index if isinstance(device, torch.device) else device
    if index is None or not is_in_use():
        yield
        return
    with torch.accelerator.device_index(index):
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # XPU, say
            yield
            return
        before = _exchange_capture_mode(THREAD_LOCAL)
        try:
            yield
        finally:
            _exchange_capture_mode(before)


def keeping(kept: object, is_past: Callable[[], bool]) -> Callable[[], bool]:
    """Such a question, which keeps something alive for as long as somebody may ask it."""
    return functools.partial(_ask, kept, is_past)


def _ask(kept: object, is_past: Callable[[], bool]) -> bool:
    return is_past()


@contextmanager
def after(works: Iterable[Work], tensors: object) -> Iterator[None]:
    """A block on a stream of its own, on which what the works have queued comes first.

    For a thread of the backend that learns that works are over: on the device their results may be still to
    come, and the stream that is current there waits for nobody. A future that is completed in the block
    makes whoever waits for it wait for the block's stream.

    Args:
        works: done, as far as the host can tell.
        tensors: theirs, in nested lists; where none is on a CUDA device nothing is changed.
    """
    devices = set(_cuda_devices(tensors)) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with ExitStack() as block:
        for device in devices:
            block.enter_context(beside_captures(device))
            block.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))  # type: ignore[no-untyped-call]
        if devices:
            for work in works:
                work.synchronize()
        yield


def _cuda_devices(tensors: object) -> Iterator[torch.device]:
    if isinstance(tensors, torch.Tensor):
        if tensors.is_cuda:
            yield tensors.device
    elif isinstance(tensors, list | tuple):
        for item in tensors:
            yield from _cuda_devices(item)


def _exchange_capture_mode(mode: int) -> int:
    """Set the thread's mode; gives the one before. A failure is logged: what comes next meets it, too."""
    if (exchange := _exchange_function()) is None:
        return mode
    value = ctypes.c_int(mode)
    if (code := exchange(ctypes.byref(value))) != 0:
        _logger.warning("the thread's capture mode could not be set: CUDA error %d", code)
        return mode
    return value.value


@functools.cache
def _exchange_function() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode
    except AttributeError:
        _logger.warning(
            "torch has not loaded CUDA's runtime as a shared library: capture graphs with "
            "capture_error_mode='thread_local', or threads that ask the device may spoil them"
        )
        return None
    function.argtypes, function.restype = [ctypes.POINTER(ctypes.c_int)], ctypes.c_int
    return function
