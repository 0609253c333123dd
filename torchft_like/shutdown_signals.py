"""The end of a training script by a signal: in good order, or at once.

A Python signal handler runs only between two instructions of the main thread, and a backward pass that waits
for a slow peer has none for as long as it waits. A thread of this module reads the operating system's own
notice of the signal (`signal.set_wakeup_fd`), and then makes the wait fail.

The ranks of a replica group get their SIGTERM one after the other, and not at the same place of the
script: through the Manager they agree on the step after which they leave.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from lighthouse.forks import Turn, in_each_fork
from torchft_like.errors import ShutdownError


class Stoppable(Protocol):
    """An object that can end its own waits, and agree with other ranks on where to stop: a Manager."""

    def interrupt(self, e: Exception) -> None: ...

    def request_stop(self) -> None: ...

    @property
    def stop_agreed(self) -> bool: ...


class Stop:
    """Whether the script has to stop: it was asked to and, with a Manager, all ranks of its group agree."""

    def __init__(self, manager: Stoppable | None) -> None:
        self._manager = manager
        self._is_asked = False

    @property
    def requested(self) -> bool:
        """Whether to stop now; the script reads it between two steps."""
        return self._is_asked if self._manager is None else self._manager.stop_agreed

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self._is_asked:
            raise KeyboardInterrupt
        self._is_asked = True
        if self._manager is not None:
            self._manager.request_stop()


@contextmanager
def stop_on_signals(manager: Stoppable | None = None) -> Iterator[Stop]:
    """Let SIGTERM stop the script after the current step; a second one, like Ctrl-C, ends the script at once.

        with Manager(...) as manager, stop_on_signals(manager) as stop:
            while not stop.requested:
                train_one_step()

    A replica that leaves between two steps costs the others nothing. With a `manager`, a SIGTERM to one rank
    makes all ranks of its replica group leave, after the same step, or where there is no quorum for it within
    15 s; and Ctrl-C, or the second SIGTERM, also ends a collective that waits for its peers. Only the main
    thread may use this. The handlers installed before are restored at the end, and in processes that are
    forked meanwhile.
    """
    stop = Stop(manager)
    previous = signal.signal(signal.SIGTERM, stop.on_signal)
    with _put_back(lambda: signal.signal(signal.SIGTERM, previous)), _released_by_interrupt(manager):
        yield stop


@contextmanager
def _released_by_interrupt(manager: Stoppable | None) -> Iterator[None]:
    if manager is None:
        yield
        return
    read_end, write_end = socket.socketpair()
    write_end.setblocking(False)
    thread = threading.Thread(
        target=_release_on_interrupt, args=(read_end, manager), name="torchft-signals", daemon=True
    )
    thread.start()
    try:
        previous = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        with _put_back(lambda: signal.set_wakeup_fd(previous)):
            yield
    finally:
        write_end.shutdown(socket.SHUT_WR)  # forks, such as loader workers, may have copies of it
        write_end.close()
        thread.join()
        read_end.close()


def _release_on_interrupt(read_end: socket.socket, manager: Stoppable) -> None:
    is_asked = False
    while number := read_end.recv(1):
        if number[0] == signal.SIGINT:
            manager.interrupt(ShutdownError("interrupted from the keyboard"))
        elif number[0] == signal.SIGTERM:
            if is_asked:
                manager.interrupt(ShutdownError("a second SIGTERM"))
            is_asked = True


# Functions that restore what was installed before; the innermost is the last.
_to_put_back: list[Callable[[], object]] = []


@contextmanager
def _put_back(what: Callable[[], object]) -> Iterator[None]:
    """Restore something at the end of the block, and in each process that is forked within it."""
    _to_put_back.append(what)
    try:
        yield
    finally:
        if what in _to_put_back:
            _to_put_back.remove(what)
            what()


def _leave_to_the_parent() -> None:
    """Restore the handlers in a fork, such as a data-loader worker, which has to obey signals."""
    while _to_put_back:
        _to_put_back.pop()()


in_each_fork(Turn.SIGNALS, _leave_to_the_parent)
