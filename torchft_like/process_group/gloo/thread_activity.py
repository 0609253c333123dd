"""Whether native threads of this process have run since the last look.

To the kernel a thread that Python starts has the name of the thread that started it: if a callback on a
native thread aborts a group, the thread that looks would watch itself. So threads that Python has started do
not count.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_TASKS = "/proc/self/task"


class _Activity(NamedTuple):
    """A thread's state now, and its counters since it started."""

    is_asleep: bool
    slept: int  # how often it went to sleep by itself
    preempted: int


# The first sleep may have begun before, and may be one within a piece of work, for a lock say.
SLEEPS = 2


class ThreadWatch:
    """A watch over the threads with certain names, which go to sleep between any two pieces of work.

    Linux counts how often a thread was given the processor. A thread that sleeps now and has the same
    count as before has done nothing in between. No answer is yes while the process has no descriptor left.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._first = self._last = _activities(name)

    def __str__(self) -> str:
        return f"{self._name}: {self._first} at first, {self._last} at the last look"

    def have_slept_since(self) -> bool:
        """Return whether all of them slept from the last look, or the constructor's, until this one."""
        before, self._last = self._last, _activities(self._name)
        now = self._last
        return now is not None and before == now and all(thread.is_asleep for thread in now.values())

    def have_paused(self) -> bool:
        """Return whether each thread has gone to sleep twice, or ended, so that its piece of work is over.

        It is False if there was no such thread.
        """
        now = _activities(self._name)
        if not self._first or now is None:
            self._first = self._first or now
            return False
        begun = [(thread, now[task]) for task, thread in self._first.items() if task in now]
        return all(later.slept >= thread.slept + SLEEPS for thread, later in begun)


def _activities(name: str) -> Mapping[str, _Activity] | None:
    """Return the activity of each thread; None if there is no descriptor left to look with."""
    found = {}
    try:
        for task in set(os.listdir(_TASKS)) - _started_by_python():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
                if _read(task, "comm").strip() == name:
                    found[task] = _activity(_read(task, "status"))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    return found


def _started_by_python() -> set[str]:
    foreign = threading._DummyThread  # stands for a thread that Python has not started
    return {str(thread.native_id) for thread in threading.enumerate() if not isinstance(thread, foreign)}


def _read(task: str, name: str) -> str:
    return Path(_TASKS, task, name).read_text()


def _activity(status: str) -> _Activity:
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return _Activity(
        is_asleep=fields["State"].startswith("S"),
        slept=int(fields["voluntary_ctxt_switches"]),
        preempted=int(fields["nonvoluntary_ctxt_switches"]),
    )
