"""The resources of a job's processes, sampled between faults, and those that grow.

Each fault makes every survivor configure its process group anew; whatever that leaves behind adds up. A
process is compared with itself: its first samples with its last ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import psutil

SAMPLES_COMPARED = 3
# By how much a process may grow beyond its first samples: pools fill up, and some things are about to be
# closed.
ALLOWED_MORE = 4
ALLOWED_MORE_MB = 96
MAPPED_WITHIN_S = 0.2  # whoever makes shared memory maps it at once


class Watch:
    """The samples of processes over time, by the label of each start."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Counter[str]]] = defaultdict(list)
        self._shared_memory = frozenset(_inodes())

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
        """Return the entries of /dev/shm that were not there at first and that no process has mapped.

        The processes of the job have ended: an entry that a process has mapped belongs to another program.
        """
        found = _inodes().keys() - self._shared_memory - mapped_shared_memory()
        time.sleep(MAPPED_WITHIN_S)
        return [f"shared memory {name}" for name in sorted(found & _inodes().keys() - mapped_shared_memory())]


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
    held = Counter("threads" if thing.startswith("thread ") else thing for thing in things_of(pid))
    try:
        process = psutil.Process(pid)
        held["descendants"] = len(process.children(recursive=True))
        held["MB"] = process.memory_info().rss >> 20
    except (OSError, psutil.NoSuchProcess):
        return None
    return held


def things_of(pid: int) -> Iterator[str]:
    """Yield a name of each thread and each descriptor of a process, as far as it is there."""
    with contextlib.suppress(OSError):  # the process has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield f"thread {(task / 'comm').read_text().strip()}"
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed since
                yield f"descriptor {kind_of(os.readlink(descriptor))}"


def kind_of(name: str) -> str:
    """Replace what differs every time in a name: numbers and random parts."""
    return re.sub(r"[0-9a-zA-Z]*\d[0-9a-zA-Z]*", "*", name)


def mapped_shared_memory(but: Collection[int] = ()) -> set[str]:
    """Return the entries of /dev/shm that processes have mapped.

    Args:
        but: ids of processes to leave out.
    """
    mapped: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) not in but:
            with contextlib.suppress(OSError):  # gone since, or another user's
                mapped.update(map(int, re.findall(r"(\d+) +/dev/shm/", (folder / "maps").read_text())))
    # By inode: whoever made a semaphore has mapped it under its first name, which is no more.
    return {name for name, inode in _inodes().items() if inode in mapped}


def _inodes() -> dict[str, int]:
    with contextlib.suppress(OSError), os.scandir("/dev/shm") as entries:  # noqa: S108 - read only
        return {entry.name: entry.inode() for entry in entries}
    return {}
