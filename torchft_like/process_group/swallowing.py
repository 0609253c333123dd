"""Errors that do not reach the training script.

A failed collective must not end a training loop that is able to drop the step and try again. Here
the call succeeds, whoever is responsible hears of the error, and until the next `configure` no
further collective is tried.

INVARIANTS
* An error counts for the configuration in which its collective was issued, and for no later one.
* After an error the inner group is aborted: this rank will take part in nothing more, and peers that
  wait for it must hear so.
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
from torchft_like.process_group.alone import tensors_of
from torchft_like.process_group.base import About, ProcessGroup
from torchft_like.process_group.collectives import Call, Collective
from torchft_like.process_group.configuration import Configuration
from torchft_like.process_group.work import (
    FOREVER,
    Operation,
    OperationWork,
    finished_work,
    operation_of,
)
from torchft_like.process_group.wrapper import ProcessGroupWrapper
from torchft_like.writing import writing_to

Report = Callable[[Exception], None]

# Mistakes of the caller, not states of the group: trying again would bring the same.
MISTAKES = (TypeError, ValueError, NotImplementedError)

_logger = logging.getLogger(__name__)


class SwallowingGroup(ProcessGroupWrapper):
    """What the groups here have in common; a subclass says what becomes of an error."""

    hides_errors = True

    def _report_of(self, configuration: Configuration, error: Exception) -> None:
        """An operation of `configuration` failed, which is no news if that is an earlier one."""
        raise NotImplementedError

    def _swallow(
        self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Work | None:
        """Run a collective on the inner group; an error is reported, and the outputs are filled in."""
        if len(args) < len(collective.tensor_places):
            collective.bind(args, kwargs)  # which says best what is missing
        configuration = self.configuration
        try:
            work = self.parent._run(collective, args, kwargs)
        except MISTAKES:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a backend raises: that is the point
            self._report_of(configuration, error)
            return skipped(collective.bind(args, kwargs), self.parent)
        if work is None:
            return None
        return OperationWork(
            SwallowedOperation(operation_of(work), collective, args, kwargs, self, configuration)
        )


class ErrorSwallowingProcessGroupWrapper(SwallowingGroup):
    """A group whose collectives always succeed; `error()` tells whether they really did.

    After the first error collectives are skipped until `configure`. A skipped one leaves what a group
    of one would: the caller's own share in its place, zeros where only a peer could have filled, and
    unchanged what is both input and output. So does the one that failed, except that what is both
    input and output (allreduce, broadcast, reduce) is undefined.

    What still raises: `configure`, and mistakes of the caller (TypeError, ValueError,
    NotImplementedError).

    Args:
        pg: the group that does the work.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._failed: tuple[Configuration, Exception] | None = None  # the last that has
        self._replaced: Configuration | None = None  # by a `configure` that is under way, or was
        self._lock = threading.RLock()  # an abort may complete futures, whose errors come back here

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """See ProcessGroup.configure; forgets the error. What it raises itself is not swallowed."""
        with self._lock:  # an error of before would abort what is about to begin
            self._failed, self._replaced = None, self.configuration
        super().configure(store_addr, rank, world_size, **about)

    def error(self) -> Exception | None:
        """The first error since `configure`."""
        failed = self._failed
        return failed[1] if failed is not None and failed[0] is self.configuration else None

    hidden_error = error

    def errored(self) -> Exception | None:
        """See ProcessGroup.errored."""
        return self.error() or super().errored()

    def report_error(self, e: Exception) -> None:
        """Skip collectives from now on because of `e`, and release the peers; the first one counts."""
        self._report_of(self.configuration, e)

    def make_alike(self) -> ProcessGroup | None:
        """See ProcessGroup.make_alike."""
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
    """Do not run a call, and leave its outputs in a defined state."""
    place = _place_in(pg)
    _fill_in(call, place)
    return None if call.collective.blocking else finished_work(call.result, source=place.peer)


class _Place(NamedTuple):
    rank: int
    size: int

    @property
    def peer(self) -> int:
        """Whom to name as the sender of what nobody sent: torch insists on a member, not the caller."""
        return 0 if self.rank else min(1, self.size - 1)


def _place_in(pg: ProcessGroup) -> _Place:
    try:
        return _Place(pg.rank(), max(pg.size(), 1))
    except FaultToleranceError:  # it was never configured
        return _Place(0, 1)


def _fill_in(call: Call, place: _Place) -> None:
    """What `call` gives when nobody else takes part; zeros if its tensors do not fit the group's size.

    What it would read and write is left as it is.
    """
    if call.collective.input is call.collective.output:
        return
    try:
        call.apply_locally(*place)
    except (IndexError, RuntimeError, ValueError) as error:
        _logger.debug("%s was called with tensors that do not fit: %s", call.collective.name, error)
        for output in tensors_of(call.outputs):
            with contextlib.suppress(RuntimeError), writing_to(output):  # of some that cannot be written to
                output.zero_()


class SwallowedOperation(Operation):
    """One that always succeeds, with the outputs of its call; an error goes to `group`.

    An error is noticed by whichever call comes first of `wait`, `future`, `is_over` and `synchronize`. The
    call's arguments are bound only when a caller asks for its outputs: most operations take less time.
    """

    _has_failed = False

    def __init__(
        self,
        inner: Operation,
        collective: Collective,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        group: SwallowingGroup,
        configuration: Configuration,
    ) -> None:
        self._inner = inner
        self._collective = collective
        self._args = args
        self._kwargs = kwargs
        self._group = group
        self._configuration = configuration
        self._filling_in = threading.Lock()

    @functools.cached_property
    def _call(self) -> Call:
        return self._collective.bind(self._args, self._kwargs)

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until it is over; a passed deadline is an error like any other, and goes to the group."""
        try:
            self._inner.wait(deadline)
        except Exception as error:  # noqa: BLE001 - see SwallowingGroup
            self._fail(error)

    def is_over(self) -> bool:
        """Whether it is; then the outputs are filled in."""
        if not self._inner.is_over():
            return False
        if not self._has_failed:
            self.wait()
        return True

    def error(self) -> None:
        """None: the group has it."""

    def result(self) -> list[Any]:
        """The output tensors."""
        return self._call.result

    def future(self) -> Future[Any]:
        """Completes with the output tensors.

        Raises:
            RuntimeError: the backend has no futures for this operation (Gloo for send and recv).
        """

        def settle(done: Future[Any]) -> list[Any]:
            self._settle(done.value)
            return self._call.result

        return self._inner.future().then(settle)

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self._settle(self._inner.synchronize)

    def block_current_stream(self) -> None:
        """Make the current stream wait, without the thread.

        Raises:
            RuntimeError: the backend has no streams.
        """
        self._inner.block_current_stream()

    def source_rank(self) -> int:
        """The sender; after an error, some other member."""
        return _place_in(self._group.parent).peer if self._has_failed else self._inner.source_rank()

    def _settle(self, outcome: Callable[[], object]) -> None:
        try:
            outcome()
        except Exception as error:  # noqa: BLE001 - see SwallowingGroup
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """What is only an output gets a value; what the call also read from is left as it came to be."""
        self._group._report_of(self._configuration, error)
        with self._filling_in:
            if self._has_failed:
                return
            self._has_failed = True
            is_in_place = self._collective.input == self._collective.output
            if not is_in_place and self._inner.is_over():
                _fill_in(self._call, _place_in(self._group.parent))
