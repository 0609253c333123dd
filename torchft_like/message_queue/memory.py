"""Memory that processes share: files without a name.

A file in memory belongs to the processes that have it open: the system takes it back when the last of them is
gone, even if it was killed. Memory that is mapped was reserved in full, since touching a page that the system
cannot give kills the process, and it is sealed before its descriptor is sent: it can neither shrink, which
would kill a process that touches it, nor be written by the processes that got it to read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from torchft_like.errors import QueueDescriptorsError, QueueError, QueueMemoryError

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module of Python 3.11 lacks it
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60


def reserve(nbytes: int, purpose: str) -> int:
    """Return the descriptor of a new file in memory, every byte of which is reserved and zero."""
    with creating(nbytes, purpose) as descriptor:
        os.posix_fallocate(descriptor, 0, nbytes)
    return descriptor


@contextlib.contextmanager
def creating(nbytes: int, purpose: str) -> Iterator[int]:
    """Yield the descriptor of a new file in memory, which the block fills; it is closed if that fails."""
    with descriptors_for(purpose):
        available = available_bytes()
        if nbytes > available:
            raise QueueMemoryError(purpose, nbytes, available)
        descriptor = os.memfd_create("torchft-queue", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        yield descriptor
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise QueueMemoryError(purpose, nbytes, available_bytes()) from error
        raise


@contextlib.contextmanager
def descriptors_for(purpose: str) -> Iterator[None]:
    """Turn a shortage of descriptors in the block, which opens some, into an error that says so."""
    try:
        yield
    except Exception as error:
        if not is_for_want_of_descriptors(error):
            raise
        raise QueueDescriptorsError(
            f"{purpose} needs a file descriptor, and none is left: close files, or raise the limit of open "
            "files (ulimit -n)"
        ) from error


def is_for_want_of_descriptors(error: Exception) -> bool:
    """Return whether an OSError, or a ZMQError, means that no more files can be opened."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def seal(descriptor: int) -> None:
    """Fix the size of the file; a process that maps it from now on may only read."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        seal_size(descriptor)  # the kernel does not know the second seal


def seal_size(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)


def seal_content(descriptor: int) -> None:
    """Fix the content of the file: no process writes to it any more, this one included."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_WRITE)


def map_received(descriptor: int, nbytes: int, *, writable: bool) -> mmap.mmap:
    """Return a mapping of a file that another process made."""
    if os.fstat(descriptor).st_size != nbytes:
        raise QueueError(f"the writer's memory is not {nbytes} bytes: do all run the same version?")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
        raise QueueError("the writer's memory could shrink while it is read: do all run the same version?")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        return mmap.mmap(descriptor, nbytes, prot=protection)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise QueueMemoryError("mapping the writer's memory", nbytes, available_bytes()) from error


def available_bytes() -> int:
    """Return how many bytes this process may still take: of the machine's memory, within its control groups'
    limits.

    Files in memory need no room in /dev/shm. They count as memory of the process that first touches them.
    """
    of_machine = _number_in(Path("/proc/meminfo").read_text(), "MemAvailable:", otherwise=_NO_LIMIT) * 1024
    return min([of_machine, *_of_groups()])


def _number_in(text: str, *names: str, otherwise: int = 0) -> int:
    for line in text.splitlines():
        if line.startswith(names):
            return int(line.split()[1])
    return otherwise


def _of_groups() -> Iterator[int]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # without control groups there is no limit
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _of_ancestors(_CGROUPS, path, ("memory.max", "memory.current"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _of_ancestors(_CGROUPS / "memory", path, names)


def _of_ancestors(root: Path, path: str, names: tuple[str, str]) -> Iterator[int]:
    """Yield the bytes that each group around the path leaves; memory that can be dropped counts as free."""
    folder = root / path.strip("/")
    while folder.is_relative_to(root):
        try:
            limit, used = (folder.joinpath(name).read_text().strip() for name in names)
            if limit != "max":
                stat = folder.joinpath("memory.stat").read_text()
                droppable = _number_in(stat, "inactive_file ", "total_inactive_file ")
                yield int(limit) - int(used) + droppable
        except (OSError, ValueError):  # the root has no limit, and a container does not see its ancestors
            pass
        folder = folder.parent
