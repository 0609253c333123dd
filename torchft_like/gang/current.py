"""The gangs that a block of code shall use, for callees that cannot be handed them: a stack per thread.

It is kept in a context variable, so that tasks of one thread do not see each other's, and what
stands for the thread, so that no thread inherits another's. (Not its number, which the next thread gets.)
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torchft_like.gang.gangs import Gangs


class _Stack(NamedTuple):
    thread: object
    gangs: tuple[Gangs, ...]


_stack: ContextVar[_Stack | None] = ContextVar("torchft_current_gangs", default=None)
_local = threading.local()


def _calling_thread() -> object:
    if not hasattr(_local, "thread"):
        _local.thread = object()
    return _local.thread


def maybe_get_current_gangs() -> Gangs | None:
    """The gangs of the innermost `with gangs:` that the calling thread is in; None outside of any."""
    gangs = _present()
    return gangs[-1] if gangs else None


def push(gangs: Gangs) -> None:
    """`with gangs:` begins."""
    _stack.set(_Stack(_calling_thread(), (*_present(), gangs)))


def pop(gangs: Gangs) -> None:
    """`with gangs:` ends. Generators may end theirs out of order: the innermost of its own goes."""
    present = _present()
    for place in reversed(range(len(present))):
        if present[place] is gangs:
            _stack.set(_Stack(_calling_thread(), present[:place] + present[place + 1 :]))
            return


def _present() -> tuple[Gangs, ...]:
    stack = _stack.get()
    return stack.gangs if stack is not None and stack.thread is _calling_thread() else ()
