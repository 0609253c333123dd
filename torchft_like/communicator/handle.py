"""Operations that go on while their caller does something else.

A thread waits for the operation, because a backend breaks off what somebody has waited for in vain: so a
wait with a timeout leaves the operation as it is. The thread ends with the operation, and every operation
ends: by itself, or in the timeout or the abort of its group. On a CUDA device the stream waits, no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Generic, TypeVar

from torchft_like.communicator.communicator import Epoch
from torchft_like.errors import StillUnderWayError

T = TypeVar("T")


class Handle(Generic[T]):
    """An operation that was begun. Until it is done its tensors belong to it: neither read nor write them.

    Args:
        text: what it is, for messages.
        finish: waits for the operation, or raises why it failed.
        settle: makes the result, in the thread of the first that waits: what has to be called in the same
            order on all ranks must be done there.
        is_over: for an operation for which streams wait: whether it is done. Then no thread waits.
        epoch: of the members; the handle is good for as long as it lasts.
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
        """The result, once the operation is done; on a CUDA device, once the present stream waits for it.

        Args:
            timeout: seconds; None waits as long as the operation takes. What the ranks make of it together, a
                tensor of their slices, they make afterwards: for that they wait until their group's timeout.

        Raises:
            StillUnderWayError: it takes longer than `timeout`. It goes on; wait again.
            GroupCoordinatorError: it failed.
            StaleEpochError: the members have changed since, whether the operation was done before or not.
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
            self._run_once()
        try:
            outcome = self._outcome.result(timeout)
        except FutureTimeoutError:
            if not self._outcome.done():
                raise StillUnderWayError(f"{self._text} is not done after {timeout:g} s") from None
            outcome = self._outcome.result()  # the operation's own error, or it was done just now
        return self._settled_once(outcome)

    def is_done(self) -> bool:
        """Whether everything was sent, or has come, or the operation has failed or is of the past."""
        if self._epoch is not None and self._epoch.ended is not None:
            return True
        return self._outcome.done() or (self._is_over is not None and self._is_over())

    def __repr__(self) -> str:
        if self._epoch is not None and self._epoch.ended is not None:
            return f"<stale, of epoch {self._epoch.number}>"
        return f"<{self._text}: {'done' if self.is_done() else 'under way'}>"

    def _settled_once(self, outcome: object) -> T:
        """The result, or the error of making it: the other ranks do not make it a second time."""
        with self._settling:
            if self._result is None:
                result: Future[T] = Future()
                try:
                    result.set_result(self._settle(outcome))
                except Exception as error:  # noqa: BLE001 - it is raised below, and again
                    result.set_exception(error)
                self._result = result
            return self._result.result()

    def _run_once(self) -> None:
        with self._settling:
            if not self._outcome.done():
                self._run()

    def _run(self) -> None:
        try:
            outcome = self._finish()
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(outcome)
