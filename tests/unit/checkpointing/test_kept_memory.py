"""Memory of snapshots: kept from one to the next, and never taken from one that somebody reads."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path
from typing import cast

import torch

from torchft_like.checkpointing.host_memory import KeptMemory
from torchft_like.checkpointing.state_stream import Snapshot
from torchft_like.plain_data import Buffer

STATE = [torch.arange(1000.0), b"abc"]
MEGABYTE = 2**20


def address(memory: Buffer) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


class Borrower:
    """Whoever has memory."""


def test_the_next_snapshot_is_made_in_the_memory_of_the_last() -> None:
    memory = KeptMemory()
    last = Snapshot(STATE, memory).fill()
    place = address(next(last.pieces(0, 64)))
    del last
    gc.collect()
    assert address(next(Snapshot(STATE, memory).fill().pieces(0, 64))) == place


def test_what_the_last_snapshot_left_is_not_in_the_next() -> None:
    memory = KeptMemory()
    last = Snapshot([torch.full((4096,), 255, dtype=torch.uint8)], memory).fill()
    sums = b"".join(Snapshot(STATE).fill().sums())
    del last
    gc.collect()
    assert b"".join(Snapshot(STATE, memory).fill().sums()) == sums


def test_a_snapshot_that_is_read_keeps_its_memory() -> None:
    memory = KeptMemory()
    Snapshot(STATE, memory)
    gc.collect()  # there is memory that was given back
    read = Snapshot(STATE, memory).fill()
    payload = b"".join(read.pieces(0, read.nbytes))
    Snapshot([torch.zeros(1000), b"xyz"], memory).fill()
    assert b"".join(read.pieces(0, read.nbytes)) == payload


def test_the_kernel_may_take_memory_that_nobody_has() -> None:
    memory, borrower = KeptMemory(), Borrower()
    lent = memory.lend(8 * MEGABYTE, borrower)
    torch.frombuffer(lent, dtype=torch.uint8).fill_(1)
    before = takeable()
    del borrower
    gc.collect()
    assert takeable() - before >= 8 * MEGABYTE


def takeable() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("LazyFree"))
    return int(line.split()[1]) * 1024


def test_memory_that_is_much_too_large_or_too_small_is_given_back() -> None:
    memory, borrower = KeptMemory(), Borrower()
    for kept, wanted in ((5 * MEGABYTE, 2 * MEGABYTE), (MEGABYTE, 2 * MEGABYTE)):
        memory.lend(kept, Borrower())
        assert len(cast(mmap.mmap, memory.lend(wanted, borrower).obj)) == wanted


def test_no_more_than_one_piece_is_kept() -> None:
    memory = KeptMemory()
    borrowers = [Borrower() for _ in range(3)]
    for borrower in borrowers:
        memory.lend(MEGABYTE, borrower)
    borrowers.clear()
    del borrower
    gc.collect()
    assert len(memory._kept) == 1
