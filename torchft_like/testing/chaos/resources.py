"""What the processes of a job hold, sampled between faults, and what they hold ever more of.

Each fault makes every survivor configure its process group anew; whatever that leaves behind adds up.
A process is compared with itself: what it held in its first samples and what it holds in its last ones.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

import psutil

SAMPLES_COMPARED = 3
# What a process may hold more of than at first: pools that fill up, and what is about to be closed.
ALLOWED_MORE = 4
ALLOWED_MORE_MB = 96


class Watch:
    """Samples of processes over time, by the label of each start."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Counter[str]]] = defaultdict(list)
        self._shared_memory = _shared_memory()

    def sample(self, pids: Mapping[str, int]) -> None:
        """Look at each of these processes once."""
        for label, pid in pids.items():
            if (held := holdings(pid)) is not None:
                self._samples[label].append(held)

    def leaks(self) -> list[str]:
        """What there is more of, in words."""
        found = [f"{label}: {what}" for label, samples in self._samples.items() for what in growth(samples)]
        return sorted(found)

    def compared(self) -> int:
        """How many processes lived long enough to be compared with themselves."""
        return sum(len(samples) >= 2 * SAMPLES_COMPARED for samples in self._samples.values())

    def shared_memory_left(self) -> list[str]:
        """Entries of /dev/shm that were not there at first."""
        return [f"shared memory {name}" for name in sorted(_shared_memory() - self._shared_memory)]


def growth(samples: list[Counter[str]]) -> list[str]:
    """What the last samples of a process all have more of than the first ones ever had, in words."""
    if len(samples) < 2 * SAMPLES_COMPARED:
        return []
    first, last = samples[:SAMPLES_COMPARED], samples[-SAMPLES_COMPARED:]
    found = []
    for thing in sorted(set().union(*last)):
        before, after = max(sample[thing] for sample in first), min(sample[thing] for sample in last)
        allowed = ALLOWED_MORE_MB if thing == "MB" else ALLOWED_MORE
        if after > before + allowed:
            found.append(f"{after} {thing}, {before} at first")
    return found


def holdings(pid: int) -> Counter[str] | None:
    """Descriptors by kind, threads, descendants and resident MB; None for a process that is gone."""
    try:
        process = psutil.Process(pid)
        names = os.listdir(f"/proc/{pid}/fd")
        held = Counter(
            {"threads": process.num_threads(), "descendants": len(process.children(recursive=True))}
        )
        held["MB"] = process.memory_info().rss >> 20
    except (OSError, psutil.NoSuchProcess):
        return None
    for name in names:
        with contextlib.suppress(OSError):  # closed since
            target = re.sub(r"\d+", "*", os.readlink(f"/proc/{pid}/fd/{name}"))
            held[f"descriptors of {target}"] += 1
    return held


def _shared_memory() -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(os.listdir("/dev/shm"))  # noqa: S108 - read only
    return frozenset()
