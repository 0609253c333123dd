"""Whether native threads of this process have run since one last looked."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

_tasks = Path("/proc/self/task")


class Stillness:
    """Watches the threads with certain names.

    Linux counts how often a thread was given the processor. A thread that sleeps now and has the same
    count as before has done nothing in between.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._last: dict[str, str] | None = None

    def look(self) -> bool:
        """Whether all of them slept from the last look until this one; the first look says no."""
        before, self._last = self._last, self._counts()
        return before == self._last and all(entry.startswith("S") for entry in self._last.values())

    def _counts(self) -> dict[str, str]:
        counts = {}
        for task in _tasks.iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if (task / "comm").read_text().strip() in self._names:
                    counts[task.name] = _state_and_switches((task / "status").read_text())
        return counts


def _state_and_switches(status: str) -> str:
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    switches = fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"]
    return f"{fields['State'][0]} {' '.join(switches)}"
