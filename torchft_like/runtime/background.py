"""Work on threads of its own, for which the end of the process waits.

A thread that comes back from C++ into an interpreter that has ended is unwound through torch's destructors,
and that ends the process ("terminate called without an active exception"), whatever its exit status was to
be. Any call of torch can be that C++: a wait for an operation, and as well a copy.

What such a thread waits for has to be ended by a hook of its own at exit, as groups are. Hooks run in reverse
order, so the one here comes after those of the modules that import it.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

from lighthouse.forks import Turn, in_each_fork

P = ParamSpec("P")

# Backends go in milliseconds, on a busy machine in seconds. What nothing ends, such as a wait for a peer in a
# group of torch's own, holds the process up for as long, and not for ever.
SECONDS_AT_EXIT = 15.0

_under_way: set[threading.Event] = set()


def run_in_background(name: str, act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call `act` on a new daemon thread of that name; the end of the process waits for it."""
    over = _begun()  # here, because the process may end before the thread has run at all

    def carry_out() -> None:
        try:
            act(*args, **kwargs)
        finally:
            _end(over)

    try:
        threading.Thread(target=carry_out, name=name, daemon=True).start()
    except BaseException:  # the system has no thread
        _end(over)
        raise


@contextmanager
def awaited_at_exit() -> Iterator[None]:
    """Have the end of the process wait for the end of the block, on a thread that goes on after it."""
    over = _begun()
    try:
        yield
    finally:
        _end(over)


def _begun() -> threading.Event:
    over = threading.Event()
    _under_way.add(over)
    return over


def _end(over: threading.Event) -> None:
    _under_way.discard(over)
    over.set()


@atexit.register
def _wait() -> None:
    deadline = time.monotonic() + SECONDS_AT_EXIT
    while (left := list(_under_way)) and time.monotonic() < deadline:
        left[0].wait(deadline - time.monotonic())


in_each_fork(Turn.LOCKS, _under_way.clear)  # the threads are the parent's
