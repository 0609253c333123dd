"""The interface of a process group that can be configured again and again.

A torch process group is made once for a fixed set of processes. One of ours outlives its members:
`configure` gives it a new set, `abort` ends whatever it is doing, and between the two the same
object stays in the hands of DDP, FSDP or a device mesh.

It knows how torch addresses a group, and nothing about backends or quorums.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, GatherOptions, Work

from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.collectives import Collective, install_collectives, parts_of
from torchft_like.process_group.configuration import ANEW, AbortSignal, Configuration
from torchft_like.process_group.controls import Controls, is_nan_check_wanted
from torchft_like.process_group.handles import Reconfigurable
from torchft_like.process_group.joint_work import joint_work
from torchft_like.process_group.naming import Named
from torchft_like.process_group.store import StoreAddress
from torchft_like.process_group.work import Operation, operation_of


class About(TypedDict, total=False):
    """What a caller may say when it configures a group, mostly about itself."""

    replica_id: str | None  # whose rank this is
    quorum_id: int | None  # why it configures
    group_rank: int | None  # which rank of its replica group this is
    group_world_size: int | None  # out of how many
    global_ranks: Sequence[int] | None  # of the members in the job, in the order of their ranks here
    timeout: timedelta | None  # of this `configure`; the group's own if it is left out
    ends_with: AbortSignal | None  # the caller's: when it is set, before, during or after, this ends, too


@install_collectives
class ProcessGroup(Named, Controls, Reconfigurable, dist.ProcessGroup):  # type: ignore[misc] # the stub types names more narrowly
    """A `torch.distributed.ProcessGroup` whose members can change.

    Every collective of torch is a method here; all of them lead to `_run`, which a subclass
    defines. Any function of `torch.distributed` takes the group as `group=`.
    """

    # Whether the backend divides for an average as it adds; else that takes a pass over the result.
    divides = False
    # Whether errors are kept to itself, where `hidden_error` tells them.
    hides_errors = False
    # Whether an average is of those that take part in a step, whom a manager counts.
    counts_participants = False

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg] # the stub lacks it
        self._configuration = Configuration()
        self._global_ranks: Sequence[int] | None = None
        self._checks_nan = is_nan_check_wanted()
        self._batches: dict[int, list[tuple[Work, list[Any]]]] = {}  # being coalesced, by thread

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "configure" in vars(cls):
            cls.configure = _in_either_order(cls.configure)  # type: ignore[method-assign]

    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        **about: Unpack[About],
    ) -> None:
        """Leave the present members and meet new ones; blocks until the group is usable.

        torchft 0.2.0's order is taken too: store_addr, replica_id, rank, world_size, and the rest of `about`.

        Args:
            store_addr: `host:port/prefix` of a TCPStore; every call needs a prefix never used before.
            rank: of the caller among the new members, `0 <= rank < world_size`.
            world_size: how many members meet.
            about: who configures, and why; all of it may be left out.

        Raises:
            ValueError: an argument is out of range, or the address is malformed (AddressError).
            ProcessGroupAbortedError: `abort` came before the members had met.
            ProcessGroupError: they did not meet; the group is unusable until the next `configure`.
        """
        raise NotImplementedError

    def prepare(self, timeout: timedelta) -> None:
        """Do now what would make the first `configure` slow, while others wait in it: nothing, mostly.

        Blocks, for `timeout` at the longest, and never fails: `configure` tells what is wrong.
        """

    def abort(self, reason: str = "abort() was called") -> None:
        """End every operation, present and future, until the next `configure`.

        From any thread, at any time; returns at once. It ends a `configure` that is under way, too; one that
        another thread is about to call ends with the signal that it is given as `ends_with`.

        Args:
            reason: for the messages of the errors that follow.
        """
        raise NotImplementedError

    def shutdown(self) -> None:
        """Abort, and wait until the resources are given back."""
        raise NotImplementedError

    def errored(self) -> Exception | None:
        """The error that made the group unusable, None while it is fine."""
        raise NotImplementedError

    def hidden_error(self) -> Exception | None:
        """The error that the group has kept to itself, as those do whose collectives never fail."""
        return None

    @property
    def configuration(self) -> Configuration:
        """The present one: an error of an earlier one is no news. It is set when it is over."""
        return self._configuration

    @property
    def epoch(self) -> int:
        """How often the group was configured."""
        return self.configuration.number

    @property
    def store_address(self) -> StoreAddress | None:
        """Where the present members have met, if that is known."""
        return None

    def _begin_configuration(self, ends_with: AbortSignal | None = None) -> None:
        """From now on there is another one; for groups that have nothing to end when it is over."""
        before, self._configuration = self._configuration, Configuration(self._configuration.number + 1)
        before.set(ANEW)
        if ends_with is not None:
            self._configuration.end_with(ends_with, self._configuration.set)

    def innermost(self) -> ProcessGroup:
        """The group that the wrappers around it hand their calls to; itself if it is no wrapper."""
        return self

    def make_alike(self) -> ProcessGroup | None:
        """Another group like this one, not configured; None if it cannot be made."""
        return None

    def size(self) -> int:
        """The number of members."""
        raise NotImplementedError

    def rank(self) -> int:
        """The caller's place among the members."""
        raise NotImplementedError

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """What the group is called in messages and registrations."""
        raise NotImplementedError

    def issue(self, collective: Collective, *args: Any) -> Operation:
        """Begin a collective that does not block, for a caller who makes the handle around its operation."""
        return operation_of(getattr(self, collective.name)(*args))

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        """Carry out one collective; None only for those that block."""
        raise NotImplementedError

    def _get_backend(self, device: torch.device) -> Any:
        """The group itself, whatever the device: there is no other object that stays."""
        return self

    # What torch asks a backend before it uses one of these of its own accord.
    supports_coalescing = supports_shrinking = supports_splitting = False
    supports_time_estimate = _supports_time_estimate = False  # the second name from torch 2.15 on

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """No: whoever wants memory that a backend registers must ask that backend."""
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        """Until `_end_coalescing`, the operations that the calling thread begins are one."""
        self._batches[threading.get_ident()] = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """The operations since `_start_coalescing`, which have begun already, as one work.

        Raises:
            ProcessGroupError: there was no `_start_coalescing`.
        """
        batch = self._batches.pop(threading.get_ident(), None)
        if batch is None:
            raise ProcessGroupError("_end_coalescing without _start_coalescing in this thread")
        works = [work for work, _ in batch]
        return joint_work(works, lambda: [tensor for _, result in batch for tensor in result], waits=True)

    def _coalesce(self, row: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any], work: Any) -> None:
        if work is not None and (batch := self._batches.get(threading.get_ident())) is not None:
            batch.append((work, row.bind(args, kwargs).result))

    def gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        opts: GatherOptions | None = None,
    ) -> Work:
        """As `gather`, into one tensor: the concatenation of all ranks' tensors, or the stack of them.

        Args:
            output: at the root; elsewhere it is not looked at.
            input: of the same shape and dtype on every rank.
            opts: name the root, rank 0 if they are left out.

        Raises:
            ProcessGroupError: the output at the root has another shape or dtype.
        """
        options = GatherOptions() if opts is None else opts
        places = [parts_of(output, input, self.size())] if self.rank() == options.rootRank else []
        return self.gather(places, [input], options)

    gather_into_tensor = gather_single

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        """Send one tensor from `root` to all."""
        options = BroadcastOptions()
        options.rootRank = root
        return self.broadcast([tensor], options)

    def _member_ranks(self) -> Sequence[int]:
        try:
            return self._global_ranks or range(self.size())
        except ProcessGroupError:
            return ()

    # C++ callers (DDP's reducer among them) ask under these names.

    def getSize(self) -> int:  # noqa: N802
        """`size`, for C++."""
        return self.size()

    def getRank(self) -> int:  # noqa: N802
        """`rank`, for C++."""
        return self.rank()

    def _get_backend_name(self) -> str:
        return self.getBackendName()

    def name(self) -> str:
        """`getBackendName`."""
        return self.getBackendName()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]


_TORCHFT_ORDER = (
    "replica_id",
    "rank",
    "world_size",
    "quorum_id",
    "group_rank",
    "group_world_size",
    "global_ranks",
)


def _in_either_order(configure: Callable[..., None]) -> Callable[..., None]:
    """Take the arguments in torchft 0.2.0's order too: the replica's id comes before the rank.

    torchft's own signature has no `ends_with`: a class that has it is aborted if the signal is set meanwhile.
    Nor do such classes say that a configuration has begun.
    """
    parameters = inspect.signature(configure).parameters.values()
    takes_signal = any(each.name == "ends_with" or each.kind is each.VAR_KEYWORD for each in parameters)

    @functools.wraps(configure)
    def take(self: ProcessGroup, store_addr: str, *place: Any, **about: Any) -> None:
        named: dict[str, Any] = {}
        if place and isinstance(place[0], str):
            named = dict(zip(_TORCHFT_ORDER, place, strict=False))
            place = place[len(_TORCHFT_ORDER) :]
        before = self._configuration
        signal = None if takes_signal else about.pop("ends_with", None)
        with contextlib.nullcontext() if signal is None else signal.ends(lambda: self.abort(signal.reason)):
            configure(self, store_addr, *place, **named, **about)
        if self._configuration is before and type(self).configuration is ProcessGroup.configuration:
            self._begin_configuration()

    return take
