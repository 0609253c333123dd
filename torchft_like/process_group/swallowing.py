"""Groups that keep the errors of collectives from the training script.

A failed collective must not end a training loop that is able to drop the step and try again. Here the call
succeeds, the error is reported, and until the next `configure` no further collective is tried.

INVARIANTS
* An error counts for the configuration in which its collective was issued, and for no later one.
* After an error the inner group is aborted: this rank will take part in nothing more, and peers that wait for
  it must fail, too.
* Outputs are filled in only when the backend is done with them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Unpack

from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.errors import FaultToleranceError
from torchft_like.process_group.base import About, ProcessGroup
from torchft_like.process_group.collectives import Call, Collective, tensors_of
from torchft_like.process_group.configuration import Configuration
from torchft_like.process_group.work import (
    FOREVER,
    FollowingOperation,
    Operation,
    OperationWork,
    finished_work,
    operation_of,
)
from torchft_like.process_group.wrapper import ProcessGroupWrapper
from torchft_like.writing import writing_to

Report = Callable[[Exception], None]

# Mistakes of the caller, not states of the group: another attempt would fail in the same way.
MISTAKES = (TypeError, ValueError, NotImplementedError)

_logger = logging.getLogger(__name__)


class SwallowingGroup(ProcessGroupWrapper):
    """The common part of groups that hide errors; a subclass defines what becomes of an error."""

    hides_errors = True

    def _report_of(self, configuration: Configuration, error: Exception) -> None:
        """Handle an operation's error, which counts only if `configuration` is the present one."""
        raise NotImplementedError

    def _swallow(
        self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Work | None:
        """Run a collective on the inner group; report an error, and fill in the outputs."""
        if len(args) < len(collective.tensor_places):
            collective.bind(args, kwargs)  # it raises an error that names what is missing
        configuration, bind = self.configuration, functools.partial(collective.bind, args, kwargs)
        try:
            work = self.parent._run(collective, args, kwargs)
        except MISTAKES:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a backend is reported
            self._report_of(configuration, error)
            return skipped(bind(), self.parent)
        if work is None:
            return None
        return OperationWork(SwallowedOperation(operation_of(work), bind, self, configuration))


class ErrorSwallowingProcessGroupWrapper(SwallowingGroup):
    """A group whose collectives always succeed; `error()` tells whether they really did.

    After the first error collectives are skipped until `configure`. A skipped collective has the result of a
    group of one: the caller's own share in its place, zeros where only a peer could have written, and tensors
    that are both input and output unchanged. So has the one that failed, except that a tensor that is both
    input and output (allreduce, broadcast, reduce) is undefined. `configure` still raises, and so do mistakes
    of the caller (TypeError, ValueError, NotImplementedError).

    Args:
        pg: the group that runs the collectives.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._failed: tuple[Configuration, Exception] | None = None  # the last configuration with an error
        # The one that a present or former `configure` call replaces.
        self._replaced: Configuration | None = None
        self._lock = threading.RLock()  # an abort may complete futures, whose errors come back here

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """Configure the inner group and forget the error. What `configure` raises is not swallowed."""
        with self._lock:  # an error of the last configuration would abort the next one
            self._failed, self._replaced = None, self.configuration
        super().configure(store_addr, rank, world_size, **about)

    def error(self) -> Exception | None:
        """Return the first error since `configure`."""
        failed = self._failed
        return failed[1] if failed is not None and failed[0] is self.configuration else None

    hidden_error = error

    def errored(self) -> Exception | None:
        return self.error() or super().errored()

    def report_error(self, e: Exception) -> None:
        """Skip collectives from now on because of `e`, the first error, and release the peers by an abort."""
        self._report_of(self.configuration, e)

    def make_alike(self) -> ProcessGroup | None:
        alike = super().make_alike()
        return None if alike is None else ErrorSwallowingProcessGroupWrapper(alike)

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        if self._failed is not None and self.error() is not None:
            return skipped(collective.bind(args, kwargs), self)
        return self._swallow(collective, args, kwargs)

    def _report_of(self, configuration: Configuration, error: Exception) -> None:
        with self._lock:
            is_present = configuration is self.configuration and configuration is not self._replaced
            if not is_present or self.error() is not None:
                return
            self._failed = configuration, error
            _logger.warning("collectives are skipped until the next configure: %r", error)
            self.abort(f"a collective failed: {error!r}")


def skipped(call: Call, pg: ProcessGroup) -> Work | None:
    """Skip a call, and leave its outputs in a defined state."""
    place = _place_in(pg)
    _fill_in(call, place)
    return None if call.collective.blocking else finished_work(call.result, source=place.peer)


class _Place(NamedTuple):
    rank: int
    size: int

    @property
    def peer(self) -> int:
        """The sender of a message that was skipped: for torch, a member other than the caller."""
        return 0 if self.rank else min(1, self.size - 1)


def _place_in(pg: ProcessGroup) -> _Place:
    try:
        return _Place(pg.rank(), max(pg.size(), 1))
    except FaultToleranceError:  # the group was never configured
        return _Place(0, 1)


def _fill_in(call: Call, place: _Place) -> None:
    """Write the result of `call` in a group of one; zeros if its tensors do not fit the group's size.

    A tensor that the call would both read and write is left as it is.
    """
    if call.collective.input is call.collective.output:
        return
    try:
        call.apply_locally(*place)
    except (IndexError, RuntimeError, ValueError) as error:
        _logger.debug("%s was called with tensors that do not fit: %s", call.collective.name, error)
        for output in tensors_of(call.outputs):
            with contextlib.suppress(RuntimeError), writing_to(output):  # some outputs cannot be written to
                output.zero_()


class SwallowedOperation(FollowingOperation):
    """An operation that always succeeds, with the outputs of its call; an error goes to `group`.

    The first call of `wait`, `future`, `is_over` or `synchronize` notices it. `bind` reads the call's
    arguments only when its outputs are asked for, because that takes longer than most operations.
    """

    _has_failed = False

    def __init__(
        self, inner: Operation, bind: Callable[[], Call], group: SwallowingGroup, configuration: Configuration
    ) -> None:
        self.inner = inner
        self._bind = bind
        self._group = group
        self._configuration = configuration
        self._filling_in = threading.Lock()

    @functools.cached_property
    def _call(self) -> Call:
        return self._bind()

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until the operation is over; a passed deadline is an error like any other."""
        try:
            self.inner.wait(deadline)
        except Exception as error:  # noqa: BLE001 - any error goes to the group
            self._fail(error)

    def is_over(self) -> bool:
        """Return whether the operation is over; then the outputs are filled in."""
        is_over = self.inner.is_over()
        if is_over and not self._has_failed:
            self.wait()
        return is_over

    def error(self) -> None:
        """Return None: the group has the error."""

    def result(self) -> list[Any]:
        return self._call.result

    def future(self) -> Future[Any]:
        def settle(done: Future[Any]) -> list[Any]:
            self._settle(done.value)
            return self._call.result

        return self.inner.future().then(settle)

    def synchronize(self) -> None:
        self._settle(self.inner.synchronize)

    def source_rank(self) -> int:
        """Return the sender's rank; after an error, that of another member."""
        return _place_in(self._group.parent).peer if self._has_failed else self.inner.source_rank()

    def _settle(self, outcome: Callable[[], object]) -> None:
        try:
            outcome()
        except Exception as error:  # noqa: BLE001 - any error goes to the group
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Report the error, and fill in the outputs that the call does not read from."""
        self._group._report_of(self._configuration, error)
        with self._filling_in:
            if self._has_failed:
                return
            self._has_failed = True
            if self.inner.is_over():
                _fill_in(self._call, _place_in(self._group.parent))
