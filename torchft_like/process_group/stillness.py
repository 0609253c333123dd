"""Whether native threads of this process have run since one last looked."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection
from pathlib import Path

_TASKS = "/proc/self/task"


class Stillness:
    """Watches the threads with certain names.

    Linux counts how often a thread was given the processor. A thread that sleeps now and has the same
    count as before has done nothing in between.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._last: dict[str, str] | None = None

    def look(self) -> bool:
        """Whether all of them slept from the last look until this one; the first look says no.

        So does one for which there is no descriptor left.
        """
        before, self._last = self._last, self._counts()
        now = self._last
        return now is not None and before == now and all(entry.startswith("S") for entry in now.values())

    def _counts(self) -> dict[str, str] | None:
        counts = {}
        try:
            for task in os.listdir(_TASKS):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    if _read(task, "comm").strip() in self._names:
                        counts[task] = _state_and_switches(_read(task, "status"))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return None
        return counts


def _read(task: str, name: str) -> str:
    return Path(_TASKS, task, name).read_text()


def _state_and_switches(status: str) -> str:
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    switches = fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"]
    return f"{fields['State'][0]} {' '.join(switches)}"
