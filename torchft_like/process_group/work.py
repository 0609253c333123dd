"""Handles of operations, as torch's `Work`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.errors import ProcessGroupAbortedError
from torchft_like.futures import empty_future
from torchft_like.process_group.operations import Explain, Operation, Operations


class ExplainedWork(Work):
    """An operation whose every wait ends by itself; of the group it needs only the words for an error."""

    explain: Explain = staticmethod(lambda _: None)


class DoneWork(Work):
    """An operation that is over: it carries `result`, or `error`.

    Both `wait` and `get_future` give the same.

    Args:
        source: what `source_rank` says; -1 is nobody.
    """

    def __init__(self, result: list[Any], error: Exception | None = None, source: int = -1) -> None:
        super().__init__()
        self._result = result
        self._error = error
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True, or the error."""
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[Any]:
        """A completed future."""
        future = empty_future()
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._result)
        return future

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Whether it carries a result."""
        return self._error is None

    def exception(self) -> Exception | None:
        """The error it carries."""
        return self._error

    def result(self) -> list[Any]:
        """The output tensors."""
        return self._result

    def source_rank(self) -> int:
        """Who sent what a receive from any source got."""
        return self._source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def block_current_stream(self) -> None:
        """There is nothing to wait for."""


class Issuer(Protocol):
    """Where works come from: a generation of a group."""

    operations: Operations

    def explain(self, error: Exception) -> Exception | None:
        """See `Explain`."""


class GroupWork(Work):
    """An operation of a backend, whose errors are told in the group's words.

    The future completes on the backend's thread and carries its tensors, or the error. The group hears
    of an error from whoever waits, or through the future if there is one.

    It is made before the operation is started, and takes it then: what Python does after the start competes
    with the backend's threads, and takes many times as long where cores are few.
    """

    _future: Future[Any] | None = None
    _work: Work = DoneWork([])
    _issuer: Issuer

    def take(self, work: Work, issuer: Issuer) -> None:
        """From now on it is this operation."""
        self._work = work
        self._issuer = issuer

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the operation is done.

        Raises:
            ProcessGroupAbortedError: the group was aborted before.
            RuntimeError: the backend failed.
        """
        if not timeout:
            try:
                if self._issuer.operations.wait_briefly(self._work):
                    return True
            except RuntimeError:
                pass  # it failed, or takes longer; most do not, and their wait ends here
        return self._wait(timeout)

    def _wait(self, timeout: timedelta | None) -> bool:
        try:
            return self._wait_for_backend(timeout)
        except RuntimeError as error:
            if self._work.is_completed() or isinstance(error, ProcessGroupAbortedError):
                # Whoever keeps the error keeps this object: let that not keep the connections open.
                self._work = DoneWork([], type(error)(*error.args))
            if (better := self._issuer.explain(error)) is not None:
                raise better from error
            raise

    def _wait_for_backend(self, timeout: timedelta | None) -> bool:
        return self._issuer.operations.wait(self._work, timeout)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing that the backend may still do."""
        return self._work.is_completed()

    def get_future(self) -> Future[Any]:
        """Completes with the list of output tensors."""
        if self._future is None:
            issuer = self._issuer
            self._future = issuer.operations.follow(self._work, issuer.explain)
        return self._future

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._work.is_completed() or self._issuer.operations.given_up is not None

    def is_success(self) -> bool:
        """Whether it is done without an error."""
        return self._work.is_completed() and self._work.is_success()

    def exception(self) -> Any:
        """The error, once it failed."""
        return self._work.exception() if self._work.is_completed() else self._issuer.operations.given_up

    def result(self) -> list[torch.Tensor]:
        """The output tensors, once it is done."""
        return self._work.result()

    def source_rank(self) -> int:
        """Who sent what a receive from any source got."""
        return self._work._source_rank()

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self._work.synchronize()

    def block_current_stream(self) -> None:
        """Make the current stream wait, without the thread."""
        self._work.block_current_stream()


class Taker(Operation, Protocol):
    """A handle that was made for an operation that is yet to be started."""

    def take(self, work: Work, issuer: Issuer | None) -> None:
        """It was started.

        Args:
            issuer: None for a work whose every wait ends by itself and tells errors in the right words.
        """


class PointToPointWork(GroupWork):
    """A send or a receive, which moves its message in `wait`: one wait, in one piece, is never given up."""

    _was_waited = False

    def __init__(self, work: Work, issuer: Issuer) -> None:
        Work.__init__(self)
        self.take(work, issuer)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See GroupWork.wait."""
        return self._wait(timeout)

    def _wait_for_backend(self, timeout: timedelta | None) -> bool:
        if not self._was_waited:  # a second wait would be for another message
            self._was_waited = self._work.wait() if timeout is None else self._work.wait(timeout)
        return self._was_waited


class _Nobody:
    """Issues works whose errors are told in the backend's words."""

    operations = Operations()

    def explain(self, error: Exception) -> None:
        return None


class AbandonableWork(PointToPointWork):
    """An operation whose wait nothing can end: it is left to a thread of its own.

    Args:
        over: called with a function that ends the wait; gives the context in which it does.
    """

    def __init__(self, work: Work, over: Callable[[Callable[[], object]], Any]) -> None:
        super().__init__(work, _Nobody())
        self._over = over

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See GroupWork.wait; after an abort the thread stays until the backend's own timeout."""
        ended = threading.Event()
        outcome: list[Exception] = []

        def wait_aside() -> None:
            try:
                super(AbandonableWork, self).wait(timeout)
            except Exception as error:  # noqa: BLE001 - it is raised where the caller waits
                outcome.append(error)
            ended.set()

        with self._over(ended.set):
            threading.Thread(target=wait_aside, name="torchft-abandonable", daemon=True).start()
            ended.wait()
        if outcome:
            raise outcome[0]
        return True
