"""Memory fences for two processes that share memory, from Python, which has none.

Two orders matter between processes:

* `before_publishing` and `after_seeing`: a message is written before its number is, and read after it.
* `full_fence`: "I sleep" is written before the last look at the number, and the number before the look at who
  sleeps. Each side writes one word, then reads the other's: were the write to wait in a buffer while the read
  goes ahead, both could miss each other, and a sleeper would not be woken.

The fence is a lock that is free: taking it is an atomic read-modify-write with acquire semantics, giving
it back one with release semantics. On x86 each is a full fence, and stores and loads keep their order
anyway, so that the first two need nothing. Elsewhere an acquire and a release let a store before them
sink in and a load after them rise in; a release that an acquire follows lets nothing through (C11 with
RCsc atomics, which AArch64's are), so two rounds make a full fence.

The lock must be free: `with` releases it whatever interrupts the caller, while a call of `release` may never
be made. And a fork gets a lock of its own, or it would inherit one that another thread held.

A single aligned 64-bit word of a `memoryview` of format Q is loaded and stored by one instruction. What
an interpreter does between two statements is far more than a compiler would dare to reorder.
"""

from __future__ import annotations

import platform

from lighthouse.forks import lock_of_each_process

_lock = lock_of_each_process()


def _one_round() -> None:
    with _lock:
        pass


def _two_rounds() -> None:
    with _lock:
        pass
    with _lock:
        pass


_is_x86 = platform.machine() in ("x86_64", "AMD64", "i686")

full_fence = _one_round if _is_x86 else _two_rounds
# None where the processor keeps the order by itself: a call of nothing costs 3 µs when the caches are cold.
before_publishing = after_seeing = None if _is_x86 else _two_rounds
