"""Operations that go on while their caller does something else, and the epoch of the members that began them.

A thread waits for the operation, because a backend ends an operation whose wait has timed out: so a wait with
a timeout leaves the operation as it is. The thread ends with the operation, and every operation ends: by
itself, or by the timeout or the abort of its group. On a CUDA device the stream waits, and no thread does.

INVARIANT: whatever was begun in an epoch ends in it, or raises StaleEpochError; a result that came in
time is given up, too, because no member can tell whether the others of that epoch had theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torchft_like.errors import GroupCoordinatorError, StaleEpochError, StillUnderWayError
from torchft_like.futures import complete, in_background
from torchft_like.process_group.configuration import Configuration
from torchft_like.runtime.durations import seconds_of

T = TypeVar("T")


class Epoch(Configuration):
    """The time for which members that change are the present ones; it is set when that is over. Its `mark`,
    the same on all members, tells its messages from those of other epochs.
    """

    def __init__(self, number: int, mark: int = 0) -> None:
        super().__init__(number)
        self.mark = mark

    def require_present(self, what: str) -> None:
        """Raise a StaleEpochError if the epoch is over; `what` is an object of its members."""
        if self.reason is not None:
            raise self.stale(what)

    def stale(self, what: str, cause: BaseException | None = None) -> StaleEpochError:
        error = StaleEpochError(f"{what} is of epoch {self.number}, which is over: {self.reason}")
        error.__cause__ = cause
        return error

    def explained(self, what: str, error: BaseException) -> BaseException:
        is_old = self.reason is not None and isinstance(error, GroupCoordinatorError)
        return self.stale(what, error) if is_old and not isinstance(error, StaleEpochError) else error


LASTING = Epoch(0)  # of members that never change


class Handle(Generic[T]):
    """An operation that was begun. Until it is done, its tensors must be neither read nor written.

    Args:
        finish: waits for the operation, and raises its error.
        settle: makes the result, in the first thread that waits, with a function that returns what `finish`
          has returned or raises what it has raised. Calls that need the same order on all ranks belong there.
        is_over: whether the operation is done, if streams wait for it; then no thread waits.
        epoch: that of the members; the handle can be used for as long as it lasts.
    """

    def __init__(
        self,
        text: str,
        finish: Callable[[], Any],
        settle: Callable[[Callable[[], Any]], T] = lambda outcome: outcome(),
        is_over: Callable[[], bool] | None = None,
        epoch: Epoch = LASTING,
    ) -> None:
        self._text = text
        self._epoch = epoch
        self._finish = finish
        self._settle = settle
        self._is_over = is_over
        self._outcome: Future[Any] = Future() if is_over else in_background("torchft-coordinator", finish)
        self._settling = threading.Lock()
        self._result: Future[T] | None = None

    def wait(self, timeout: timedelta | float | None = None) -> T:
        """Return the result once the operation is done, or the current stream of a CUDA device waits for it.

        Args:
            timeout: the limit, seconds or timedelta; None waits as long as the operation takes. If the ranks
              then make the result together, such as a tensor of their slices, the limit of that is their
              group's timeout.

        Raises:
            StillUnderWayError: the operation takes longer than `timeout`. It goes on; wait again.
            GroupCoordinatorError: the operation failed.
            StaleEpochError: the members have changed since, even if the operation was done before.
        """
        timeout_s = None if timeout is None else seconds_of(timeout, may_be_0=True)
        self._epoch.require_present(self._text)
        try:
            result = self._wait(timeout_s)
        except Exception as error:  # noqa: BLE001 - any error is explained
            raise self._epoch.explained(self._text, error)  # noqa: B904 - it has its cause
        self._epoch.require_present(self._text)
        return result

    def _wait(self, timeout_s: float | None) -> T:
        if self._is_over is None and not wait([self._outcome], timeout_s).done:
            raise StillUnderWayError(f"{self._text} is not done after {timeout_s:g} s")
        with self._settling:  # ranks make the result together, and only once
            if not self._outcome.done():
                complete(self._outcome, self._finish)
            if self._result is None:
                # Ctrl-C ends this wait and is no result: later waits would raise it again.
                self._result = complete(Future(), lambda: self._settle(self._outcome.result), Exception)
            return self._result.result()

    def is_completed(self) -> bool:
        """Return whether the operation is over: all has come or was sent, it failed, or its epoch is over."""
        if self._epoch.reason is not None:
            return True
        return self._outcome.done() or (self._is_over is not None and self._is_over())

    def __repr__(self) -> str:
        if self._epoch.reason is not None:
            return f"<stale, of epoch {self._epoch.number}>"
        return f"<{self._text}: {'done' if self.is_completed() else 'under way'}>"
