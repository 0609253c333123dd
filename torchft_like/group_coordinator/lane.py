"""One process group, as one of the ways that a coordinator's bytes may take.

It may be torch's own or any of ours, registered with torch or not.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, GatherOptions, Work

from torchft_like.errors import GroupCoordinatorError
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.store import StoreAddress
from torchft_like.process_group.swallowing import SwallowingGroup
from torchft_like.process_group.wrapper import ProcessGroupWrapper, ReconfigurableProcessGroup

# Any object that has torch's collectives as methods.
Group = Any


class Lane:
    """One process group, as it is configured now."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._epoch = self._present_epoch()
        self._hides_errors = _hides_errors(group)

    def start(self, method: str, *args: Any) -> Flight:
        """Begin one collective."""
        return Flight(getattr(self.group, method)(*args), self)

    def broadcast(self, tensor: Tensor, src: int) -> Flight:
        """From `src` to all, in place."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        return self.start("broadcast", [tensor], options)

    def gather(self, outputs: list[Tensor], tensor: Tensor, dst: int) -> Flight:
        """The tensors of all, in the outputs that `dst` has, and nobody else."""
        options = GatherOptions()
        options.rootRank = dst
        return self.start("gather", [outputs] if outputs else [], [tensor], options)

    def check(self) -> None:
        """Raise what a group hides.

        Raises:
            GroupCoordinatorError: the group has failed, or its members are others by now.
        """
        if self._hides_errors and (error := self.group.errored()) is not None:
            raise GroupCoordinatorError(f"its process group has failed: {error}") from error
        if self._present_epoch() != self._epoch:
            raise GroupCoordinatorError("its process group was configured anew: make a new coordinator")

    def break_off(self, reason: str) -> None:
        """Let no peer wait for what this rank will not do any more. Torch's own groups cannot be ended."""
        if isinstance(self.group, ProcessGroup) and self._present_epoch() == self._epoch:
            self.group.abort(reason)

    def store_address(self) -> StoreAddress | None:
        """Where the members met, if the group is one of ours."""
        group = self.group
        while isinstance(group, ProcessGroupWrapper) and not isinstance(group, ReconfigurableProcessGroup):
            group = group.parent
        return group.store_address if isinstance(group, ReconfigurableProcessGroup) else None

    def _present_epoch(self) -> int | None:
        return self.group.epoch if isinstance(self.group, ProcessGroup) else None


class Flight(NamedTuple):
    """A collective that is under way."""

    work: Work
    lane: Lane

    def land(self, timeout: timedelta | None = None) -> None:
        """Wait for its end.

        Args:
            timeout: None takes that of the group.

        Raises:
            GroupCoordinatorError: the group hid that it failed.
            RuntimeError: it failed.
        """
        self.work.wait() if timeout is None else self.work.wait(timeout)
        self.lane.check()


def _hides_errors(group: Group) -> bool:
    """Whether one of the groups around the innermost one does. To ask others would wait for the device."""
    while isinstance(group, ProcessGroupWrapper) and not isinstance(group, ReconfigurableProcessGroup):
        if isinstance(group, SwallowingGroup):
            return True
        group = group.parent
    return False
