"""A gang over a process group of torch, or of ours.

A gang over a group of ours follows it: when the group is configured anew the gang has the new size.
Its sub-gangs do not: each is of the configuration in which it was made, and ends with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor

from torchft_like.communicator.communicator import Communicator
from torchft_like.communicator.parts import Part
from torchft_like.errors import (
    GangError,
    InvalidOperationError,
    NotSupportedError,
    ProcessGroupNotConfiguredError,
    StaleGangError,
)
from torchft_like.gang.arguments import check_partition
from torchft_like.gang.group_gang import GroupGang
from torchft_like.process_group import ProcessGroup

DEFAULT_TIMEOUT = timedelta(minutes=15)
_BACKENDS = {"cpu": "torchft-gloo", "cuda": "torchft-nccl"}

_registrations = itertools.count()


@final
class ProcessGroupGang(GroupGang):
    """The members of a process group.

    Args:
        pg: any that `torch.distributed` takes: its own, ours, wrapped or not. It stays the caller's:
            `close` leaves it alone.
        device: the device of the group's tensors.

    Raises:
        ValueError: `pg` is torch's placeholder for a group that the caller is not in.
    """

    def __init__(self, pg: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(device)
        if not isinstance(pg, dist.ProcessGroup):
            raise ValueError(f"{pg!r} is no process group that the caller is a member of")
        self._pg = pg
        self._members: Communicator | None = None
        self._part: Part | None = None
        self._tell: Callable[[Exception], object] = lambda _: None
        self._check: Callable[[], object] | None = None
        self._owns_default_group = False
        self._is_closed = False

    @classmethod
    def create_default_process_group(
        cls,
        device: torch.device,
        *,
        timeout: timedelta | None = None,
        high_priority: bool = False,
        backend: str | None = None,
    ) -> Self:
        """Start torch's default process group, as torchrun or the environment describes it, as a gang.

        Args:
            device: cpu or cuda.
            timeout: the limit of each operation, positive; None for 15 minutes.
            high_priority: whether to run on streams of high priority, if the backend has such: torch's own
                nccl.
            backend: torch's name of the backend; None for torchft-gloo or torchft-nccl, which can be aborted.

        Raises:
            ValueError: the device is neither cpu nor cuda, or the timeout is no positive timedelta.
            NotSupportedError: this torch has no torch.distributed, or no such device.
            InvalidOperationError: there is a default process group already.
            GangError: the members did not meet.
        """
        device = torch.device(device)
        if device.type not in _BACKENDS:
            raise ValueError(f"a gang is of cpu or cuda devices, not {device.type}")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise NotSupportedError("there is no CUDA device here, or this torch was built without CUDA")
        timeout = DEFAULT_TIMEOUT if timeout is None else timeout
        if not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
            raise ValueError(f"timeout={timeout!r} must be a positive timedelta")
        if not dist.is_available():
            raise NotSupportedError("this torch was built without torch.distributed")
        if dist.is_initialized():
            raise InvalidOperationError(
                "there is a default group already: wrap it, ProcessGroupGang(dist.group.WORLD, device)"
            )
        name = backend or _BACKENDS[device.type]
        try:
            if device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)
            dist.init_process_group(name, timeout=timeout, **_options(name, high_priority))
        except Exception as error:
            raise GangError(f"the default process group could not be started over {name}: {error}") from error
        world = dist.group.WORLD
        if world is None:
            raise GangError("torch has no default process group after init_process_group")
        gang = cls(world, device)
        gang._owns_default_group = True
        return gang

    @property
    def rank(self) -> int:
        return _known(self._pg.rank)

    @property
    def size(self) -> int:
        return _known(self._pg.size)

    def as_process_group(self) -> dist.ProcessGroup:
        """Return the group; functions of torch that look groups up by name find those that a gang has
        made.
        """
        if self._part is not None and self._part.group._name is None:
            self._part.group.register(f"gang-{next(_registrations)}")
        return self._pg

    def close(self) -> None:
        """Release the group if the gang has made it, which ends its sub-gangs. Safe to call again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._quick = None
        if (part := self._part) is not None:
            part.group.unregister()
            if part.ending.reason is not None or part.group.errored() is not None:
                part.group.abort("the gang was closed")  # its operations have no waiter any more
            else:
                part.group.shutdown()
        if self._owns_default_group and dist.is_initialized():
            dist.destroy_process_group()

    def create_gang(self, ranks: Sequence[int]) -> ProcessGroupGang | None:
        """Make a gang over a group of the same class, with its timeout and options.

        If this gang's group is torch's, the new one is over a group of ours. It ends with the configuration
        of this gang's group in which it was made.
        """
        return self.split([ranks])

    def split(self, partition: Sequence[Sequence[int]]) -> ProcessGroupGang | None:
        parts = check_partition(partition, self.size)
        with self._communicating("create_gang") as members:
            part = self._split(members, parts)
        return None if part is None else ProcessGroupGang.over(part, self._device, self._tell, self._check)

    @classmethod
    def over(
        cls,
        part: Part,
        device: torch.device,
        tell: Callable[[Exception], object],
        check: Callable[[], object] | None,
    ) -> Self:
        """Return the gang of a part that has met.

        Args:
            part: the group and its members.
            device: the device of the tensors that the gang makes itself.
            tell: called with each error of the gang.
            check: raises an error if the members cannot communicate now; None for no check.
        """
        gang = cls(part.group, device)
        gang._part, gang._tell, gang._check = part, tell, check
        return gang

    def _present(self) -> Communicator:
        if self._part is not None and (reason := self._part.ending.reason) is not None:
            stale = StaleGangError(f"{self!r} is over, derive it again from its parent: {reason}")
            self._tell(stale)
            raise stale
        if self._is_closed:
            raise GangError(f"{self!r} was closed")
        if self._check is not None:
            self._check()
        members = self._members
        if members is None or not members.control.is_lasting:
            self._members = members = self._over(self._pg)
            is_quick = self._check is None and members.control.is_lasting
            self._quick = members if is_quick else None
        return members

    def _has_average(self, tensor: Tensor) -> bool:
        return tensor.is_cuda or (isinstance(self._pg, ProcessGroup) and self._pg.counts_participants)

    def _explained(self, what: str, error: Exception) -> GangError:
        if self._part is not None and (reason := self._part.ending.reason) is not None:
            stale = StaleGangError(f"{what} of {self!r} was ended, derive it again from its parent: {reason}")
            if self._part.is_latest:  # otherwise the error says nothing about the present configuration
                self._tell(stale)
            return stale
        explained = super()._explained(what, error)
        self._tell(explained)
        return explained

    def __repr__(self) -> str:
        try:
            place = f"rank {self.rank} of {self.size}"
        except RuntimeError:
            place = "not configured"
        return f"<{type(self).__name__}: {place} on {self._device}>"


def _known(place: Callable[[], int]) -> int:
    """Return the rank or the size of a group.

    Raises:
        GangError: it has none before it is configured.
    """
    try:
        return place()
    except ProcessGroupNotConfiguredError as error:
        raise GangError(f"the gang has no members yet: {error}") from error


def _options(backend: str, high_priority: bool) -> dict[str, Any]:
    if not high_priority or backend != "nccl":
        return {}
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return {"pg_options": options}
