"""The handle of an operation that a subprocess carries out."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

from torch.futures import Future

from lighthouse.forks import lock_of_each_process
from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.baby.channel import FOREVER
from torchft_like.process_group.baby.protocol import Outcome
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.work import ExplainedWork


class Failures(Protocol):
    """What a work asks when its request was not carried out."""

    def describe(self, request: Request) -> Exception:
        """The error of a request that failed, was refused, or lost its subprocess."""


class BabyWork(ExplainedWork):
    """An operation in a subprocess.

    It is done, and its outputs are in the caller's tensors, once `wait` has returned, the future has
    completed, or `is_completed` was true.
    """

    _error: Exception | None = None
    _future: Future[Any] | None = None

    def __init__(self, requests: Requests, request: Request, result: list[Any], failures: Failures) -> None:
        ExplainedWork.__init__(self)
        self._requests = requests
        self._request = request
        self._result = result
        self._failures = failures

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the operation is done.

        Raises:
            ProcessGroupAbortedError: the group was aborted before.
            SubprocessLostError: the subprocess died, or did not answer.
            ProcessGroupError: it is not done after `timeout`; it goes on.
            RuntimeError: the backend failed.
        """
        # As in C++, a timeout of zero is none.
        deadline = time.monotonic() + timeout.total_seconds() if timeout else FOREVER
        if not self._requests.wait(self._request, deadline):
            raise ProcessGroupError(f"the operation is not done after {timeout}; it goes on")
        if self._request.outcome is Outcome.DONE:
            return True
        if (error := self.exception()) is not None:
            raise error.with_traceback(None)
        return True

    def get_future(self) -> Future[Any]:
        """Completes with the list of output tensors."""
        with _making_future:
            is_new = self._future is None
            future = self._future = self._future or self._new_future()
        if is_new:
            self._requests.follow(self._request, self._complete)
        return future

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if not self._request.is_settled:
            self._requests.look()
        return self._request.is_settled

    def is_success(self) -> bool:
        """Whether it is done without an error."""
        return self.is_completed() and self._request.outcome is Outcome.DONE

    def exception(self) -> Exception | None:
        """The error, once it failed."""
        return self._error_of_request() if self.is_completed() else None

    def result(self) -> list[Any]:
        """The output tensors."""
        return self._result

    def source_rank(self) -> int:
        """Who sent what a receive from any source got; -1 if that is not what it was."""
        return int(self._request.answer[0]) if self.is_success() and self._request.answer else -1

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Until the operation is done."""
        self.wait()

    def block_current_stream(self) -> None:
        """Until the operation is done."""
        self.wait()

    def _error_of_request(self) -> Exception | None:
        if not self._request.is_settled or self._request.outcome is Outcome.DONE:
            return None
        if self._error is None:
            error = self._failures.describe(self._request)
            was_refused = self._request.outcome is Outcome.REFUSED
            self._error = error if was_refused else self.explain(error) or error
        return self._error

    def _complete(self, _: Request) -> None:
        if self._future is None:
            return
        if (error := self.exception()) is None:
            self._set_result(self._future)
        else:
            self._future.set_exception(error)

    def _new_future(self) -> Future[Any]:
        return Future()

    def _set_result(self, future: Future[Any]) -> None:
        future.set_result(self._result)


_making_future = lock_of_each_process()
