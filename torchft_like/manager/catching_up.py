"""What a rank needs to catch up beside the steps (`core/catch_up.py`): a fetch on a thread of its own, and
how the script's steps are taken again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

STEPS_KEPT_MAX = 8


class Replay(Protocol):
    """How a script's committed steps are taken again, on the training thread; `GradientReplay` is one.

    What `take` does to the state is all that a committed step does to it, given what `keep` returned in that
    step.

    One that has `changed_by_steps`, too, which lists tensors of the state that nothing but such a step
    changes, lets a source copy them while the script computes (`checkpointing/copy_ahead.py`): on another
    thread, which also calls it.
    """

    def keep(self) -> object:
        """Return a copy of what the step would be taken with, not None; called instead of the step."""
        ...

    def take(self, steps: Sequence[object]) -> None:
        """Take steps again, in this order, with what `keep` returned in each.

        The present step, which follows, is then taken by the script itself: its gradients are left as they
        are.
        """
        ...


class FetchBeside(Generic[T]):
    """A state on its way, on a thread of its own.

    Args:
        fetch: returns the state, or raises; another thread can end it.
    """

    def __init__(self, fetch: Callable[[], T]) -> None:
        self._fetch = fetch
        self._future: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, name="torchft-fetch-beside", daemon=True)
        self._thread.start()

    @property
    def has_come(self) -> bool:
        """Whether the state is there."""
        return self._future.done() and self._future.exception() is None

    def result(self) -> T:
        """Return the state once it is there, or raise the error of the fetch."""
        return self._future.result()

    def raise_error(self) -> None:
        """Raise the error of the fetch, if it has failed."""
        if self._future.done():
            self._future.result()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._future.set_result(self._fetch())
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            self._future.set_exception(error)
