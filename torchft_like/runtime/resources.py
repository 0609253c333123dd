"""What this process holds of things with threads, ports or memory of their own, in the order of their making.

Each of them enters itself when it is made. It stays here only for as long as somebody else keeps it. Who runs
a function again ends what the last run has left.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import Protocol, TypeVar

from lighthouse.forks import Turn, in_each_fork

_logger = logging.getLogger(__name__)

_numbers = itertools.count()
_tracked: weakref.WeakValueDictionary[int, Endable] = weakref.WeakValueDictionary()


class Endable(Protocol):
    """A Manager, a server, a process group, a queue; one that has ended may be ended again."""

    def shutdown(self) -> None: ...


E = TypeVar("E", bound=Endable)


def track(thing: E) -> E:
    """Enter a thing that `end_since` has to end, at the end of its constructor; return it."""
    _tracked[next(_numbers)] = thing
    return thing


def mark() -> int:
    """Return a number that is greater than that of everything made so far."""
    return next(_numbers)


def end_since(number: int) -> None:
    """End what was made after `mark` returned this number, the last first; what fails is logged."""
    refs = _tracked.valuerefs()  # at once: other threads make things meanwhile
    for ref in sorted(refs, key=lambda ref: ref.key, reverse=True):
        if ref.key > number and (thing := ref()) is not None:
            try:
                thing.shutdown()
            except Exception:  # the others have to be ended nevertheless
                _logger.exception("%s could not be ended", thing)


in_each_fork(Turn.OBJECTS, _tracked.clear)  # what is in it is the parent's
