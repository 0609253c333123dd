"""The end of a try: what it has made is ended, and what its function held is freed.

A traceback refers to the frames of all functions that the error has passed, and these to their variables: the
model, its gradients, the process groups. So the frames are cleared, and what refers to itself is collected,
before anybody counts on a port or on memory.

What was there before a try is frozen (`gc.freeze`) while it lasts, and at its end neither looked through nor
collected: with torch that is 300,000 objects, and was most of the time between two tries.

Python cannot end a thread. A try ends as a process does: it waits for its threads that are not daemons, and
leaves the daemons alone. The workers of an executor are Python's, which waits for their work, not for them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import thread as executors
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchft_like.runtime import living

logger = logging.getLogger(__name__)

THREADS_END_S = 1.0
_OF_FSDP = "torch.distributed.fsdp._fully_shard"
_caches: weakref.WeakSet[functools._lru_cache_wrapper[Any]] = weakref.WeakSet()  # torch's


class Try:
    """What the process has while a try begins; the rest is the try's."""

    def __init__(self) -> None:
        self._made_until = living.now()
        self._threads = frozenset(threading.enumerate())
        _note_caches(gc.get_objects())
        gc.freeze()

    def end(self, error: BaseException) -> None:
        """End what this try has made, and free what its function held; what fails is logged."""
        living.end_since(self._made_until)
        if dist.is_initialized():
            _destroy_torchs_groups()
        for each in _with_causes(error):
            traceback.clear_frames(each.__traceback__)
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            try:
                torch.cuda.empty_cache()
            except RuntimeError as failure:  # a health check finds out whether it is of use
                logger.warning("the device's cache could not be emptied: %s", failure)

    def check_threads(self) -> None:
        """Raise an error while a thread of this try runs for which a process would wait at its end."""
        deadline = time.monotonic() + THREADS_END_S
        for each in threading.enumerate():
            if each in self._threads or each.daemon or each in executors._threads_queues:
                continue
            each.join(max(0.0, deadline - time.monotonic()))
            if each.is_alive():
                raise RuntimeError(f"thread {each.name!r} of the last try does not end: {_place_of(each)}")


def _destroy_torchs_groups() -> None:
    """Let torch forget its groups, whose connections are closed once nobody keeps them.

    torch's caches of DTensor operations keep meshes, and each mesh its groups. A later try would also compute
    with what is cached for the mesh of an earlier one, which equals its own. After an error in a forward or
    backward pass FSDP and the graph of autograd keep each other, where the collector cannot see it.
    """
    try:
        dist.destroy_process_group()
    except Exception:  # of a backend that is broken
        logger.exception("torch's process groups could not be destroyed in good order")
    made = gc.get_objects()
    _note_caches(made)
    for cache in _caches:
        cache.cache_clear()
    for each in made:
        kind = type(each)
        if issubclass(kind, DeviceMesh):
            vars(each).get("_pg_registry", {}).clear()
        elif str(kind.__module__).startswith(_OF_FSDP) and not issubclass(kind, torch.nn.Module):
            getattr(each, "__dict__", {}).clear()
    planners = getattr(sys.modules.get("torch.distributed.tensor._redistribute"), "_planner_cache", {})
    planners.clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def _note_caches(objects: Iterable[object]) -> None:
    for each in objects:  # to ask one for more than its type would wake torch's deprecated names
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("torch.distributed"):
            _caches.add(each)


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Undo at the end of a block what tries have frozen in it."""
    is_the_scripts = gc.get_freeze_count() > 0
    gc.unfreeze()  # what is frozen is not listed, and there may be caches of torch's
    try:
        yield
    finally:
        if not is_the_scripts:
            gc.unfreeze()


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and all that led to it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _place_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}"
