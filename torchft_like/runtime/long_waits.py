"""The log line of a wait that takes minutes: once a minute it says what the process waits for.

A message queue wakes often and looks by itself. A call of a coordinator, a gang or a managed group sleeps in
its backend: while it is under way it has an entry in `calls`, and a thread looks on its behalf. It is not the
timer thread, on which all timeouts depend: a log may block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Protocol

from lighthouse.forks import Turn, in_each_fork

LONG_WAIT_S = 60.0
_LOOKS = 4  # looks of the thread in that time


class Group(Protocol):
    """What a call is over; its text is for the log."""

    @property
    def endings(self) -> Sequence[object]:
        """What ends it: the configurations of its process groups, and what these end with."""


# The calls that are under way, each with the monotonic time of its beginning, its name, and the group it is
# over. A call enters and deletes its entry itself, without a function: most calls take microseconds.
calls: dict[object, tuple[float, str, Group]] = {}


def oldest_call(configuration: object) -> object | None:
    """Return the key of the oldest call under way in a configuration of a process group; None if there is
    none.
    """
    own = [(began, call) for call, (began, _, over) in calls.copy().items() if configuration in over.endings]
    return min(own, key=itemgetter(0))[1] if own else None


_log = logging.getLogger(__name__)


class LongWait:
    """One wait, which logs what it waits for.

    Args:
        began: the monotonic time of its beginning, in seconds; None for now.
        is_expected: the wait may take as long as it likes: nothing is logged.
    """

    __slots__ = ("_began", "_is_expected", "next_line")

    def __init__(self, began: float | None = None, *, is_expected: bool = False) -> None:
        self._began = time.monotonic() if began is None else began
        self._is_expected = is_expected
        self.next_line: float = self._began + LONG_WAIT_S

    def look(self, now: float, what: Callable[[], str]) -> None:
        """Log a line, if one is due.

        Args:
            now: the monotonic time in seconds.
            what: returns words for the waiting part and for what it waits for.
        """
        if now >= self.next_line:
            self.next_line = now + LONG_WAIT_S
            if not self._is_expected:
                _log.info("waiting for %.0f s: %s", now - self._began, what())

    @property
    def seconds(self) -> float:
        """The seconds since the wait began."""
        return time.monotonic() - self._began


class _Watch:
    """Looks at `calls`, on a thread that begins with the first communicator of a process."""

    def __init__(self) -> None:
        self._waits: dict[object, LongWait] = {}
        self._has_begun = False
        in_each_fork(Turn.OBJECTS, self._forget)

    def begin(self) -> None:
        """Look at `calls` from now on, several times in LONG_WAIT_S."""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=self._run, name="torchft-long-waits", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(LONG_WAIT_S / _LOOKS)
            self._look()

    def _look(self) -> None:
        now, present = time.monotonic(), calls.copy()  # at once: calls come and go on other threads
        waits = {call: self._waits.get(call) or LongWait(began) for call, (began, _, _) in present.items()}
        self._waits = waits
        for call, (_, name, over) in present.items():
            waits[call].look(now, lambda name=name, over=over: f"{name} over {over}")  # type: ignore[misc]

    def _forget(self) -> None:
        """Forget all calls: in a fork they, and the thread, are the parent's."""
        calls.clear()
        self._waits.clear()
        self._has_begun = False


_watch = _Watch()
watch_calls: Callable[[], None] = _watch.begin
