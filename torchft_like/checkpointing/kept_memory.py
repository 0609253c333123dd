"""Memory that outlives the snapshot in it, as fresh memory costs more than all that is done with it.

The kernel zeroes each page that it gives, which takes longer than to fill that page and to send it. So the
memory of the last snapshot is kept, marked as free (MADV_FREE): the kernel takes pages of it where a process
needs some, and the next snapshot finds the others as they were. The pages are huge where the system allows
it: a page fault for each small one would take as long as the zeros.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress

HUGE_FROM = 4 * 1024 * 1024  # bytes of memory that is worth huge pages
FOLD_MAX = 2  # kept memory that is larger than what is wanted by more than this is given back


class KeptMemory:
    """A lender of memory, which keeps one piece of what was given back."""

    def __init__(self) -> None:
        # A deque needs no lock, which the garbage collector might take while it is held.
        self._kept: deque[mmap.mmap] = deque(maxlen=1)

    def lend(self, nbytes: int, borrower: object) -> memoryview:
        """Return so many bytes of memory, which are the borrower's until it is garbage.

        They hold anything: zeros, or what an earlier borrower has written.
        """
        memory = self._fitting(max(nbytes, 1))
        weakref.finalize(borrower, self._keep, memory).atexit = False
        return memoryview(memory)[:nbytes]

    def _fitting(self, nbytes: int) -> mmap.mmap:
        with suppress(IndexError):
            if nbytes <= len(memory := self._kept.pop()) <= FOLD_MAX * nbytes:
                return memory
        return fresh_memory(nbytes)

    def _keep(self, memory: mmap.mmap) -> None:
        memory.madvise(mmap.MADV_FREE)
        self._kept.append(memory)


def fresh_memory(nbytes: int) -> mmap.mmap:
    """Return memory of huge pages, if the kernel has some."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
