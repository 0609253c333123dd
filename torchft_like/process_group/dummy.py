"""A group of one that moves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Unpack

from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.process_group.base import About, ProcessGroup
from torchft_like.process_group.collectives import Collective, refuse_overlap
from torchft_like.process_group.store import DEFAULT_TIMEOUT
from torchft_like.process_group.work import FOREVER, FinishedOperation, OperationWork


class ProcessGroupDummy(ProcessGroup):
    """A group whose collectives are over at once, with the result that a group of one has, and are counted.

    It is for code that needs a group where there is nothing to communicate, and for tests.

    Args:
        rank: 0.
        world: 1.

    Attributes:
        calls: how often each collective was called, by name.
        configure_count, wait_count, get_future_count: how often each of these was called.

    Raises:
        ValueError: another rank or world was given.
    """

    def __init__(self, rank: int, world: int) -> None:
        if (rank, world) != (0, 1):
            raise ValueError(f"a dummy group is rank 0 of a world of 1, not rank {rank} of {world}")
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._timeout = DEFAULT_TIMEOUT
        self.configure_count = 0
        self.wait_count = 0
        self.get_future_count = 0

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """Count the call: this group always has one member."""
        self.configure_count += 1
        self._begin_configuration(about.get("ends_with"))

    def abort(self, reason: str = "abort() was called") -> None:
        """End what belongs to this configuration; no operation is ever under way."""
        self._configuration.set(reason)

    def shutdown(self) -> None:
        self._configuration.set("the group was shut down")

    def errored(self) -> Exception | None:
        return None

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout, without effect: nothing takes time."""
        self._timeout = timeout

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def make_alike(self) -> ProcessGroupDummy:
        return ProcessGroupDummy(0, 1)

    def getBackendName(self) -> str:  # noqa: N802
        return "torchft-dummy"

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        self.calls[collective.name] += 1
        call = collective.bind(args, kwargs)
        refuse_overlap(call)
        call.apply_locally(rank=0, world_size=1)
        return None if collective.blocking else OperationWork(_CountedOperation(self, call.result))


class _CountedOperation(FinishedOperation):
    def __init__(self, group: ProcessGroupDummy, result: list[Any]) -> None:
        super().__init__(result)
        self._group = group

    def wait(self, deadline: float = FOREVER) -> None:
        self._group.wait_count += 1

    def future(self) -> Future[Any]:
        self._group.get_future_count += 1
        return super().future()
