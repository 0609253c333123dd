"""Which descriptors this process has open, and a shortage of them."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections.abc import Iterator

LIMIT_S = 20.0

Descriptors = set[tuple[str, int, int, str]]


def open_descriptors() -> Descriptors:
    """Return the open descriptors: number, device, inode and what the number stands for."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            path = f"/proc/self/fd/{name}"
            status = os.stat(path)
            found.add((name, status.st_dev, status.st_ino, os.readlink(path)))
    return found


def left_open_since(before: Descriptors) -> Descriptors:
    """Return the descriptors that were opened after `before` and stay open.

    Threads of earlier tests may open sockets at any time: those are closed again, a leak is not.
    """
    if not (left := open_descriptors() - before):
        return left
    gc.collect()
    left &= open_descriptors()
    deadline = time.monotonic() + LIMIT_S
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left &= open_descriptors()
    return left


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open so many descriptors, and no more, for the time of a block: no garbage gives any
    back.
    """
    gc.disable()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(name) for name, *_ in open_descriptors()) + 64, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.enable()
