"""Operations that go on while their caller does something else.

A thread waits for the operation, because a backend ends an operation whose wait has timed out: so a wait with
a timeout leaves the operation as it is. The thread ends with the operation, and every operation ends: by
itself, or by the timeout or the abort of its group. On a CUDA device the stream waits, and no thread does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Generic, TypeVar

from torchft_like.communicator.epoch import Epoch
from torchft_like.errors import StillUnderWayError

T = TypeVar("T")


class Handle(Generic[T]):
    """An operation that was begun. Until it is done, its tensors must be neither read nor written.

    Args:
        text: the operation's name in messages.
        finish: waits for the operation, and raises its error.
        settle: makes the result, in the first thread that waits: calls that need the same order on all ranks
          belong there.
        is_over: whether the operation is done, if streams wait for it; then no thread waits.
        epoch: the epoch of the members; the handle can be used for as long as it lasts.
    """

    def __init__(
        self,
        text: str,
        finish: Callable[[], object],
        settle: Callable[[object], T],
        is_over: Callable[[], bool] | None = None,
        epoch: Epoch | None = None,
    ) -> None:
        self._text = text
        self._epoch = epoch
        self._finish = finish
        self._settle = settle
        self._is_over = is_over
        self._outcome: Future[object] = Future()
        self._settling = threading.Lock()
        self._result: Future[T] | None = None
        if is_over is None:
            threading.Thread(target=self._run, name="torchft-coordinator", daemon=True).start()

    def wait(self, timeout: float | None = None) -> T:
        """Return the result once the operation is done; on a CUDA device, once the current stream waits for
        it.

        Args:
            timeout: the limit in seconds; None waits as long as the operation takes. If the ranks then make
              the result together, such as a tensor of their slices, the limit of that is their group's
              timeout.

        Raises:
            StillUnderWayError: the operation takes longer than `timeout`. It goes on; wait again.
            GroupCoordinatorError: the operation failed.
            StaleEpochError: the members have changed since, even if the operation was done before.
        """
        if self._epoch is None:
            return self._wait(timeout)
        self._epoch.check(self._text)
        try:
            result = self._wait(timeout)
        except Exception as error:
            told = self._epoch.explained(self._text, error)
            if told is error:
                raise
            raise told from error
        self._epoch.check(self._text)
        return result

    def _wait(self, timeout: float | None) -> T:
        if self._is_over is not None:
            with self._settling:
                if not self._outcome.done():
                    self._run()
        try:
            outcome = self._outcome.result(timeout)
        except FutureTimeoutError:
            if not self._outcome.done():
                raise StillUnderWayError(f"{self._text} is not done after {timeout:g} s") from None
            outcome = self._outcome.result()  # the operation's own error, or it is done by now
        return self._settled_once(outcome)

    def is_completed(self) -> bool:
        """Return whether the operation is over: all has come or was sent, it failed, or its epoch is over."""
        if self._epoch is not None and self._epoch.ended is not None:
            return True
        return self._outcome.done() or (self._is_over is not None and self._is_over())

    def __repr__(self) -> str:
        if self._epoch is not None and self._epoch.ended is not None:
            return f"<stale, of epoch {self._epoch.number}>"
        return f"<{self._text}: {'done' if self.is_completed() else 'under way'}>"

    def _settled_once(self, outcome: object) -> T:
        """Return the result, or raise the error of making it: ranks make it together, and only once."""
        with self._settling:
            if self._result is None:
                result: Future[T] = Future()
                try:
                    result.set_result(self._settle(outcome))
                except Exception as error:  # noqa: BLE001 - it is raised below, and at later calls
                    result.set_exception(error)
                self._result = result
            return self._result.result()

    def _run(self) -> None:
        try:
            outcome = self._finish()
        except BaseException as error:  # noqa: BLE001 - it is raised in the threads that wait
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(outcome)
