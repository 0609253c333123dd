"""The use of this process's accelerator by threads beside the training thread.

They must not do two things. A process that has used no device must not begin to, as a context takes half a
gigabyte of its memory. And a CUDA graph that another thread captures must not be spoilt: while a capture
lasts, in the mode of torch's captures, CUDA fails every call of any thread that it considers unsafe, such as
a query of an event, and the capture with it. Whether it does is a setting of the calling thread. torch
changes it around its own watchdog's queries and offers Python no function for that, so this module calls
CUDA's own function, in the library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

import torch
from torch._C._distributed_c10d import Work

# A value of CUDA's enumeration cudaStreamCaptureMode: a call is unsafe only in the thread that captures.
THREAD_LOCAL = 1

_logger = logging.getLogger(__name__)


def is_in_use() -> bool:
    """Return whether this process has used an accelerator; this uses none."""
    if (accelerator := torch.accelerator.current_accelerator()) is None:
        return False
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return is_initialized is None or bool(is_initialized())


@contextmanager
def beside_captures(device: torch.device | int | None) -> Iterator[None]:
    """Make `device` the thread's current one for a block whose calls spoil no capture of another thread.

    Every thread of this library that works with a GPU does it in such a block.

    Args:
        device: an accelerator's device, or its index: each thread has a current device, and CUDA makes a
          context on that one. A CPU, None, and a process without accelerator change nothing.
    """
    index = device.index if isinstance(device, torch.device) else device
    if index is None or not is_in_use():
        yield
        return
    with torch.accelerator.device_index(index):
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # it may be an XPU
            yield
            return
        before = _exchange_capture_mode(THREAD_LOCAL)
        try:
            yield
        finally:
            _exchange_capture_mode(before)


def agreeing_kernels(
    module: str, device: torch.device, agree: Callable[[ModuleType], bool]
) -> ModuleType | None:
    """Return a module of triton's kernels, if there is triton for a device, and they compute there what torch
    does, as `agree` says; None for torch itself.
    """
    if device.type != "cuda":
        return None
    try:
        kernels = importlib.import_module(module)
        if agree(kernels):
            return kernels
        _logger.warning("the results of %s on %s are not torch's, which is used", module, device)
    except ImportError:
        pass
    except Exception as error:  # noqa: BLE001 - a compiler may lack nearly anything
        _logger.warning("triton has no kernel for %s, and torch's take longer: %r", device, error)
    return None


def keeping(kept: object, is_past: Callable[[], bool]) -> Callable[[], bool]:
    """Return `is_past` as a function that keeps an object alive for as long as the function is kept."""
    return functools.partial(lambda _: is_past(), kept)


@contextmanager
def after(works: Iterable[Work], tensors: object) -> Iterator[None]:
    """Enter a block on a stream of its own, which waits for what the works have queued.

    It is for a thread of the backend that learns that works are over: on the device their results may still
    be to come, and the thread's current stream does not wait for them. A stream that waits for a future that
    is completed in the block waits for the block's stream.

    Args:
        works: works that are done, as far as the host can tell.
        tensors: the tensors of the works, in nested lists; if none is on a CUDA device nothing is changed.
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
    """Set the thread's mode, and return the one before. A failure is logged: later calls meet it, too."""
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
