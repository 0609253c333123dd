"""The resources that a process and its descendants hold, and what they hold more of than before.

It counts processes, threads by name, descriptors by kind, entries of /dev/shm, mapped files by name,
anonymous mappings, and resident memory. Two footprints differ where something was left behind.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchft_like.testing.chaos.campaign import kind_of, mapped_shared_memory, things_of

SETTLE_S = 30.0
PAUSE_S = 0.05
MB = 1 << 20
GRPC_POOL = {"thread event_engine": 2}  # gRPC has one or two more of them, for a while, on a busy machine


@dataclass(frozen=True)
class Allowance:
    """The increase that is allowed in what no program holds constant, because of the memory allocator.

    Attributes:
        mappings: of memory without a file: arenas, heap, stacks of threads that the C library keeps.
        bytes: of resident memory.
    """

    mappings: int
    bytes: int


@dataclass(frozen=True)
class Footprint:
    """The resources that a process and its descendants hold at one time."""

    things: Counter[str]
    mappings: int
    resident: int

    def excess(self, before: Footprint, allowed: Allowance) -> list[str]:
        """Return what there is more of than before, in words."""
        more = sorted((self.things - before.things).items())
        found = [f"{count} more: {thing}" for thing, count in more if count > GRPC_POOL.get(thing, 0)]
        if (mappings := self.mappings - before.mappings) > allowed.mappings:
            found.append(f"{mappings} more: anonymous mappings")
        if (resident := self.resident - before.resident) > allowed.bytes:
            found.append(f"{resident / MB:.1f} MB more: resident memory")
        return found


def take() -> Footprint:
    """Count the resources of this process and its descendants."""
    gc.collect()
    own = psutil.Process()
    everybody = [own, *own.children(recursive=True)]
    things = Counter(thing for process in everybody for thing in ("process", *things_of(process.pid)))
    if shared := set(os.listdir("/dev/shm")):
        shared -= mapped_shared_memory(
            but={process.pid for process in everybody}
        )  # other tests' processes have
    things.update(f"/dev/shm/{kind_of(name)}" for name in shared)
    names = _mapped(own.pid)
    things.update(f"mapped {kind_of(name)}" for name in names if name)
    return Footprint(things, sum(not name for name in names), own.memory_info().rss)


def excess_after(before: Footprint, allowed: Allowance) -> list[str]:
    """Return what is still held once everything that ends by itself has had time to end."""
    deadline = time.monotonic() + SETTLE_S
    while (found := take().excess(before, allowed)) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return found


def left_by(act: Callable[[int], object], warm_up: int, repeats: int, allowed: Allowance) -> list[str]:
    """Return what `repeats` calls leave behind, after `warm_up` calls that are not counted."""
    for index in range(warm_up):
        act(index)
    before = settled()
    for index in range(repeats):
        act(warm_up + index)
    return excess_after(before, allowed)


def settled() -> Footprint:
    """Return a footprint that no longer shrinks: what is about to end must not hide what is left."""
    deadline = time.monotonic() + SETTLE_S
    last = take()
    while time.monotonic() < deadline:
        time.sleep(2 * PAUSE_S)
        now = take()
        if now.things == last.things:
            return now
        last = now
    return last


def _mapped(pid: int) -> list[str]:
    """Return the name behind each mapping, empty for the memory allocator's: anonymous ones and the heap.

    The kernel shows the heap in two or more lines where two neighbouring parts of it could not be merged.
    """
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line[73:].strip().replace("[heap]", "") for line in lines]
