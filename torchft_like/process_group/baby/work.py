"""An operation that a subprocess runs."""

from __future__ import annotations

from typing import Any, Protocol

from torch.futures import Future

from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.baby.protocol import Outcome
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.work import FOREVER, ExplainedOperation


class Failures(Protocol):
    """Where an operation finds the error of a request that was not carried out."""

    def describe(self, request: Request) -> Exception:
        """Return the error of a request that failed, was refused, or lost its subprocess."""


class RemoteOperation(ExplainedOperation):
    """An operation in a subprocess.

    It is over, and its outputs are in the caller's tensors, once `wait` has returned, the future has
    completed, or `is_over` was true.
    """

    _error: Exception | None = None

    def __init__(self, requests: Requests, request: Request, result: list[Any], failures: Failures) -> None:
        self._requests = requests
        self._request = request
        self._result = result
        self._failures = failures

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until the operation is over.

        Raises:
            ProcessGroupAbortedError: the group was aborted before.
            SubprocessLostError: the subprocess died, or did not answer.
            ProcessGroupError: the operation is not over at the deadline; it goes on.
            RuntimeError: the backend failed.
        """
        if not self._requests.wait(self._request, deadline):
            raise ProcessGroupError("the operation is not done after the timeout of this wait; it goes on")
        if (error := self._error_of_request()) is not None:
            raise error.with_traceback(None)

    def is_over(self) -> bool:
        """Return whether the request is settled."""
        if not self._request.is_settled:
            self._requests.look()
        return self._request.is_settled

    def error(self) -> Exception | None:
        """Return the subprocess's error, or the error that it is gone."""
        return self._error_of_request() if self.is_over() else None

    def result(self) -> list[Any]:
        """Return the output tensors."""
        return self._result

    def future(self) -> Future[Any]:
        """Return a future of the list of output tensors, which a thread of the subprocess's requests
        completes.
        """
        future = self._new_future()
        self._requests.follow(self._request, lambda _: self._complete(future))
        return future

    def source_rank(self) -> int:
        """Return the rank of the sender as the subprocess answered it; -1 if it did not."""
        is_done = self.is_over() and self._request.outcome is Outcome.DONE
        return int(self._request.answer[0]) if is_done and self._request.answer else -1

    def _error_of_request(self) -> Exception | None:
        if not self._request.is_settled or self._request.outcome is Outcome.DONE:
            return None
        if self._error is None:
            error = self._failures.describe(self._request)
            was_refused = self._request.outcome is Outcome.REFUSED
            self._error = error if was_refused else self.explain(error) or error
        return self._error

    def _complete(self, future: Future[Any]) -> None:
        if (error := self._error_of_request()) is None:
            self._set_result(future)
        else:
            future.set_exception(error)

    def _new_future(self) -> Future[Any]:
        return Future()

    def _set_result(self, future: Future[Any]) -> None:
        future.set_result(self._result)
