"""Errors that do not reach the training script.

A failed collective must not end a training loop that is able to drop the step and try again. Here
the call succeeds, whoever is responsible hears of the error, and until the next `configure` no
further collective is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Unpack

from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.process_group.base import About, ProcessGroup
from torchft_like.process_group.collectives import Call, Collective
from torchft_like.process_group.work import DoneWork
from torchft_like.process_group.wrapper import ProcessGroupWrapper

Report = Callable[[Exception], None]


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """A group whose collectives always succeed; `error()` tells whether they really did.

    After the first error, collectives are skipped until `configure`. A skipped one leaves what a
    group of one would: the caller's own share in its place, zeros where only a peer could have
    filled. The outputs of the collective that failed are undefined.

    Args:
        pg: the group that does the work.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._error: Exception | None = None

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """See ProcessGroup.configure; forgets the error. What it raises itself is not swallowed."""
        self._error = None
        super().configure(store_addr, rank, world_size, **about)

    def error(self) -> Exception | None:
        """The first error since `configure`."""
        return self._error

    def errored(self) -> Exception | None:
        """See ProcessGroup.errored."""
        return self._error or super().errored()

    def report_error(self, e: Exception) -> None:
        """Skip collectives from now on because of `e`; the first one counts."""
        self._error = self._error or e

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        call = collective.bind(args, kwargs)
        if self._error is not None:
            return skipped(call, self.rank(), self.size())
        return swallowed(self.parent, call, self.report_error)


def swallowed(pg: ProcessGroup, call: Call, report: Report) -> Work | None:
    """Run a call on `pg`; an error goes to `report` unless the group has been configured since."""
    epoch = pg.epoch

    def report_if_news(error: Exception) -> None:
        if pg.epoch == epoch:
            report(error)

    try:
        work = pg._run(call.collective, call.args, call.kwargs)
    except (TypeError, ValueError):
        raise  # the caller's mistake, not the group's state
    except Exception as error:  # noqa: BLE001 - whatever a backend raises: that is the point
        report_if_news(error)
        return None if call.collective.blocking else DoneWork(call.result)
    return None if work is None else SwallowingWork(work, call.result, report_if_news)


def skipped(call: Call, rank: int, world_size: int) -> Work | None:
    """Do not run a call, and leave its outputs in a defined state."""
    call.apply_locally(rank, world_size)
    return None if call.collective.blocking else DoneWork(call.result)


class SwallowingWork(Work):
    """A work that always succeeds, with `result`; an error goes to `report`."""

    def __init__(self, work: Work, result: list[Any], report: Report) -> None:
        super().__init__()
        self._work = work
        self._result = result
        self._report = report

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True, once the operation is over."""
        try:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timeout)
        except Exception as error:  # noqa: BLE001 - see `swallowed`
            self._report(error)
        return True

    def get_future(self) -> Future[Any]:
        """Completes with the output tensors, once the operation is over."""

        def settle(done: Future[Any]) -> list[Any]:
            try:
                done.value()
            except Exception as error:  # noqa: BLE001 - see `swallowed`
                self._report(error)
            return self._result

        return self._work.get_future().then(settle)

    def is_completed(self) -> bool:
        """Whether the operation is over."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it is over, for it cannot fail."""
        return self._work.is_completed()

    def exception(self) -> None:
        """None: see the group's `error()`."""

    def result(self) -> list[Any]:
        """The output tensors."""
        return self._result

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self._work.synchronize()

    def source_rank(self) -> int:
        """Who sent what a receive from any source got."""
        return self._work._source_rank()

    _source_rank = source_rank
