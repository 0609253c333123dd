"""Ending a training script when a signal asks for it: in good order, or at once.

A Python signal handler runs only between two instructions of the main thread, and a backward pass
that waits for a slow peer has none for as long as it waits. The operating system's own note of the
signal (`signal.set_wakeup_fd`) is read by a thread here, which then makes the wait fail.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from torchft_like.errors import ShutdownError


class Interruptible(Protocol):
    """What can end its own waits: a Manager."""

    def interrupt(self, e: Exception) -> None: ...


class Stop:
    """Whether the script was asked to stop."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def stop_on_signals(manager: Interruptible | None = None) -> Iterator[Stop]:
    """SIGTERM asks to stop after the current step; a second one, like Ctrl-C, ends the script at once.

        with Manager(...) as manager, stop_on_signals(manager) as stop:
            while not stop.requested:
                train_one_step()

    A replica that leaves between two steps costs the others nothing. With a `manager`, Ctrl-C also
    ends a collective that waits for its peers. Main thread only; what was installed before is put
    back at the end.
    """
    stop = Stop()

    def request(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    previous = signal.signal(signal.SIGTERM, request)
    try:
        with _released_by_interrupt(manager):
            yield stop
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _released_by_interrupt(manager: Interruptible | None) -> Iterator[None]:
    if manager is None:
        yield
        return
    read_end, write_end = socket.socketpair()
    write_end.setblocking(False)
    thread = threading.Thread(
        target=_release_on_interrupt, args=(read_end, manager), name="torchft-signals", daemon=True
    )
    previous = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        write_end.close()
        thread.join()
        read_end.close()


def _release_on_interrupt(read_end: socket.socket, manager: Interruptible) -> None:
    while number := read_end.recv(1):
        if number[0] == signal.SIGINT:
            manager.interrupt(ShutdownError("interrupted from the keyboard"))
