"""A group that fails as a test says, and groups that swallow its errors, for the tests of both."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupDummy,
)
from torchft_like.process_group.collectives import BY_NAME, tensors_of
from torchft_like.process_group.work import FOREVER, FinishedOperation

from .conftest import LIMIT_S
from .test_collectives import ALONE

SPOILT = -7.0


class OopsError(Exception):
    """A fault that no other code raises."""


class Failing(ProcessGroupDummy):
    """Rank 1 of 3; the outputs of its calls are spoilt, and its calls fail when the test says so."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.error_at_issue: Exception | None = None
        self.works: list[Pending] = []
        self.aborts: list[str] = []

    def size(self) -> int:
        return 3

    def rank(self) -> int:
        return 1

    def abort(self, reason: str = "abort() was called", *, errored: bool = True) -> None:
        self.aborts.append(reason)

    def _run(self, collective: Any, args: Any, kwargs: Any) -> Any:
        self.calls[collective.name] += 1
        if self.error_at_issue is not None:
            raise self.error_at_issue
        for output in tensors_of(collective.bind(args, kwargs).outputs):
            output.fill_(SPOILT)
        if collective.blocking:
            raise OopsError
        self.works.append(Pending())
        return self.works[-1]


class Pending(FinishedOperation):
    """An operation that is over once the test says so."""

    def __init__(self) -> None:
        super().__init__([])
        self.over = threading.Event()
        self._promise: Future[Any] = Future()

    def finish(self, error: Exception | None = None) -> None:
        self._failure = error
        self.over.set()
        if error is None:
            self._promise.set_result([])
        else:
            self._promise.set_exception(error)

    def wait_until(self, deadline: float) -> None:
        if not self.over.wait(min(LIMIT_S, deadline - time.monotonic())):
            raise RuntimeError("it takes too long")
        super().wait_until(FOREVER)

    def get_future(self) -> Future[Any]:
        return self._promise

    def is_completed(self) -> bool:
        return self.over.is_set()


class Promise(Work):
    """Of a backend: over when its future is; a wait can be bounded, as that of Gloo's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.future: Future[list[Tensor]] = Future()
        is_over = self._is_over = threading.Event()
        self.future.add_done_callback(lambda _: is_over.set())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._is_over.wait(timeout.total_seconds() or None):
            raise RuntimeError("Operation timed out!")
        self.future.wait()
        return True

    def is_completed(self) -> bool:
        return self.future.done()

    def get_future(self) -> Future[list[Tensor]]:
        return self.future


class FakeManager:
    """Answers as a Manager would, or in the trouble that it is given, and keeps what it is told.

    Args:
        participants, rank: of the step that is open.
        factor: what the gradients are multiplied by, in place of an average.
    """

    def __init__(self, pg: Any, participants: int = 3, rank: int | None = 1, factor: int = 1) -> None:
        self.process_group = pg
        self.error: Exception | None = None
        self.trouble: Exception | None = None
        self.healing: frozenset[int] = frozenset()
        self.is_alone = False
        self.quorums_waited_for = 0
        self.reduced: list[tuple[str, Any]] = []
        self._participants, self._rank, self._factor = participants, rank, factor

    def wait_quorum(self) -> None:
        self.quorums_waited_for += 1
        self._meet_trouble()

    def group_allreduce(self, tensors: list[Tensor], options: Any, collective: Any) -> Any:
        self._meet_trouble()
        self.reduced.append((collective.name, options.reduceOp))
        return FinishedOperation([tensor.mul_(self._factor) for tensor in tensors])

    def num_participants(self) -> int:
        self._meet_trouble()
        return self._participants

    def replica_rank(self) -> int | None:
        return int(self.process_group.rank())

    def replica_world_size(self) -> int:
        return int(self.process_group.size())

    def current_step(self) -> int:
        return 0

    def init_process_group(self) -> None:
        """There is one, if any is needed."""

    def wait_for_turn(self) -> None:
        """Nothing is deferred."""

    def is_exchanging_state(self) -> bool:
        return self.is_alone

    def healing_ranks(self) -> frozenset[int]:
        return self.healing

    def participating_rank(self) -> int | None:
        self._meet_trouble()
        return self._rank

    def errored(self) -> Exception | None:
        return self.error

    def report_error(self, e: Exception) -> None:
        self.error = self.error or e

    def _meet_trouble(self) -> None:
        if self.trouble is not None:
            raise self.trouble


class Subject:
    """A group that swallows errors, and the group within, which has them."""

    def __init__(self, kind: str) -> None:
        self.inner = Failing()
        if kind == "managed":
            self.manager = FakeManager(self.inner)
            self.group: Any = ManagedProcessGroup(self.manager)
            self.error: Callable[[], Any] = self.manager.errored
            self.configure: Callable[[], None] = self._begin_step
        else:
            swallowing = ErrorSwallowingProcessGroupWrapper(self.inner)
            self.group, self.error = swallowing, swallowing.error
            self.configure = lambda: swallowing.configure("127.0.0.1:1/x", 1, 3)

    def _begin_step(self) -> None:
        self.inner.configure("127.0.0.1:1/x", 1, 3)
        self.manager.error = None

    def call(self, name: str) -> tuple[Any, list[Tensor]]:
        """Make rank 1's call in a world of 3; return the work and the outputs."""
        args = copy.deepcopy(ALONE[name][0])
        work = getattr(self.group, name)(*args)
        return work, list(tensors_of(BY_NAME[name].bind(args, {}).outputs))
