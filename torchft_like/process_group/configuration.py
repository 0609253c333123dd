"""Which configuration of a group something belongs to, and what ends it.

A group that is configured a hundred times has a hundred configurations, one after the other. What belongs to
one of them (an operation, an error, a part of the group) keeps its `Configuration` and compares it, by
identity, with the group's present one. There is no other mark.

INVARIANTS
* A signal is set once, by the first caller; later reasons are dropped.
* A hook that is added runs once, whether the signal was set before it was added or is set after.
* A configuration is over for ever once it is set; `configure` begins another one.
* Whatever a configuration was told to end with ends it at any time: before its members have begun to
  meet, while they do, and after.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from torchft_like.errors import ProcessGroupAbortedError

ANEW = "the group is being configured anew"


class AbortSignal:
    """A signal that is set once, by the first caller, and runs the hooks that end operations under way.

    A hook runs on the thread that aborts, must not block, and runs at once if the signal is set
    already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: list[Callable[[], object]] = []
        self.reason: str | None = None

    def set(self, reason: str) -> bool:
        """Abort; return whether this call was the first."""
        with self._lock:
            if self.reason is not None:
                return False
            self.reason = reason
            hooks = list(self._hooks)
        with contextlib.ExitStack() as all_of_them:  # even if one of them fails, for want of a thread say
            for hook in reversed(hooks):
                all_of_them.callback(hook)
        return True

    @contextlib.contextmanager
    def ends(self, hook: Callable[[], object]) -> Any:
        """Call `hook` at an abort, for the time of a `with` block."""
        self.add(hook)
        try:
            yield
        finally:
            self.remove(hook)

    def add(self, hook: Callable[[], object]) -> None:
        """Call `hook` at an abort, from now on; at once if it has happened."""
        with self._lock:
            late = self.reason is not None
            if not late:
                self._hooks.append(hook)
        if late:
            hook()

    def remove(self, hook: Callable[[], object]) -> None:
        """Call `hook` at an abort no more."""
        with self._lock, contextlib.suppress(ValueError):
            self._hooks.remove(hook)

    def end_with(self, other: AbortSignal, end: Callable[[str], object]) -> None:
        """Call `end` with the reason when `other` is set; at once if it is set already.

        `other` may live longer than what `end` refers to: it drops `end` when this signal is set.
        """

        def hook() -> None:
            end(str(other.reason))

        other.add(hook)
        self.add(lambda: other.remove(hook))

    def check(self) -> None:
        """Raise a ProcessGroupAbortedError if the signal is set."""
        if self.reason is not None:
            raise ProcessGroupAbortedError(self.reason)


class Configuration(AbortSignal):
    """One configuration of a group: the signal of its end, which is compared by identity. `number` counts how
    often the group was configured, this time included.
    """

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
