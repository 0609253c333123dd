"""Ending a training script in good order when the system asks for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether the script was asked to stop."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """SIGTERM asks to stop after the current step; a second one, like SIGINT, ends the script at once.

        with stop_on_signals() as stop:
            while not stop.requested:
                train_one_step()

    A replica that leaves between two steps costs the others nothing. Main thread only; the previous
    handler is restored at the end.
    """
    stop = Stop()

    def request(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    previous = signal.signal(signal.SIGTERM, request)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, previous)
