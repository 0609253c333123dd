"""The resources of a job's processes, sampled between faults, and those that grow.

Each fault makes every survivor configure its process group anew; whatever that leaves behind adds up. A
process is compared with itself: its first samples with its last ones.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

import psutil

SAMPLES_COMPARED = 3
# By how much a process may grow beyond its first samples: pools fill up, and some things are about to be
# closed.
ALLOWED_MORE = 4
ALLOWED_MORE_MB = 96


class Watch:
    """The samples of processes over time, by the label of each start."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Counter[str]]] = defaultdict(list)
        self._shared_memory = _shared_memory()

    def sample(self, pids: Mapping[str, int]) -> None:
        """Sample each of these processes once."""
        for label, pid in pids.items():
            if (held := holdings(pid)) is not None:
                self._samples[label].append(held)

    def leaks(self) -> list[str]:
        """Return the resources that have grown, in words."""
        found = [f"{label}: {what}" for label, samples in self._samples.items() for what in growth(samples)]
        return sorted(found)

    def compared(self) -> int:
        """Return how many processes lived long enough to be compared with themselves."""
        return sum(len(samples) >= 2 * SAMPLES_COMPARED for samples in self._samples.values())

    def shared_memory_left(self) -> list[str]:
        """Return the entries of /dev/shm that were not there at first."""
        return [f"shared memory {name}" for name in sorted(_shared_memory() - self._shared_memory)]


def growth(samples: list[Counter[str]]) -> list[str]:
    """Return the resources of which all last samples of a process have more than any first sample, in
    words.
    """
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
    """Count descriptors by kind, threads, descendants and resident MB; return None for a process that is
    gone.
    """
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
        with contextlib.suppress(OSError):  # it was closed since
            target = re.sub(r"\d+", "*", os.readlink(f"/proc/{pid}/fd/{name}"))
            held[f"descriptors of {target}"] += 1
    return held


def _shared_memory() -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(os.listdir("/dev/shm"))  # noqa: S108 - read only
    return frozenset()
