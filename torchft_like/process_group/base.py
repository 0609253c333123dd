"""The interface of a process group that can be configured again and again.

A torch process group is made once for a fixed set of processes. A group of this package outlives its members:
`configure` gives it a new set, `abort` ends its operations, and DDP, FSDP or a device mesh keeps using the
same object.

This module knows how torch addresses a group, and nothing about backends or quorums.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
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
from torchft_like.process_group.handles import Reconfigurable
from torchft_like.process_group.store import StoreAddress
from torchft_like.process_group.torch_interface import TorchInterface
from torchft_like.process_group.uncompiled import uncompiled
from torchft_like.process_group.work import JointOperation


class About(TypedDict, total=False):
    """What a caller may say when it configures a group, mostly about itself."""

    replica_id: str | None  # the replica that the caller belongs to
    quorum_id: int | None  # the quorum because of which it configures
    group_rank: int | None  # the caller's rank in its replica group
    group_world_size: int | None  # the size of its replica group
    # The members' ranks in the job, in the order of their ranks in this group.
    global_ranks: Sequence[int] | None
    timeout: timedelta | float | None  # the limit of this `configure`; the group's own if it is left out
    # The caller's signal: when it is set, before, during or after, this configuration ends.
    ends_with: AbortSignal | None


@uncompiled
@install_collectives
class ProcessGroup(TorchInterface, Reconfigurable, dist.ProcessGroup):  # type: ignore[misc] # the stub types names more narrowly
    """A `torch.distributed.ProcessGroup` whose members can change.

    Every collective of torch is a method here; all of them lead to `_run`, which a subclass
    defines. Any function of `torch.distributed` takes the group as `group=`.
    """

    # Whether the backend itself divides for an average. If not, the average takes a pass over the result.
    divides = False
    # Whether the group hides errors from its works, so that only `hidden_error` reports them.
    hides_errors = False
    # Whether an average is over the replicas that take part in a step, as a manager counts them.
    counts_participants = False

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg] # the stub lacks it
        self._configuration = Configuration()
        self._global_ranks: Sequence[int] | None = None
        self._checks_nan = os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1"  # as torch from 2.14 on
        self._batches: dict[int, list[tuple[Work, list[Any]]]] = {}  # operations being coalesced, by thread

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "configure" in vars(cls):
            cls.configure = _in_either_order(cls.configure)  # type: ignore[method-assign]
        if "abort" in vars(cls):
            cls.abort = _with_either_argument(cls.abort)  # type: ignore[method-assign]
        uncompiled(cls)

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """Leave the present members and meet new ones; block until the group is usable.

        torchft 0.2.0's order is taken too: store_addr, replica_id, rank, world_size, and the rest of `about`.

        Args:
            store_addr: `host:port/prefix` of a store, behind `tls://` if it speaks TLS; every call
                needs a prefix never used before.
            rank: the caller's rank among the new members, `0 <= rank < world_size`.
            world_size: how many members meet.
            about: the caller's identity and reason, as `About` lists them; all of it may be left out.

        Raises:
            ValueError: an argument is out of range, or the address is malformed (AddressError).
            ProcessGroupAbortedError: `abort` came before the members had met.
            ProcessGroupError: they did not meet; the group is unusable until the next `configure`.
        """
        raise NotImplementedError

    def prepare(self, timeout: timedelta) -> None:
        """Do the slow part of the first `configure` now, so that other ranks need not wait for it there.

        Most groups have nothing to do. This blocks for at most `timeout`, and never fails: `configure`
        reports what is wrong.
        """

    def abort(self, reason: str = "abort() was called", *, errored: bool = True) -> None:
        """End every operation, present and future, until the next `configure`.

        Any thread may call this at any time; it returns at once. It ends a `configure` that is under way,
        too; one that another thread is about to call ends with the signal that it is given as `ends_with`.

        Args:
            reason: the text of the errors that follow.
            errored: torchft's argument, which changes nothing: every abort is an error.
        """
        raise NotImplementedError

    def shutdown(self) -> None:
        """Abort, and wait until the resources are released."""
        raise NotImplementedError

    def errored(self) -> Exception | None:
        """Return the error that made the group unusable; None while it is usable."""
        raise NotImplementedError

    def hidden_error(self) -> Exception | None:
        """Return the error that the group has hidden, if its collectives never fail; else None."""
        return None

    @property
    def configuration(self) -> Configuration:
        """The present configuration, which is set when it is over."""
        return self._configuration

    @property
    def epoch(self) -> int:
        """How often the group was configured."""
        return self.configuration.number

    @property
    def store_address(self) -> StoreAddress | None:
        """The store in which the present members have met; None if it is not known."""
        return None

    def _begin_configuration(self, ends_with: AbortSignal | None = None) -> None:
        """Begin another configuration; for groups that have nothing to end when one is over."""
        before, self._configuration = self._configuration, Configuration(self._configuration.number + 1)
        before.set(ANEW)
        if ends_with is not None:
            self._configuration.end_with(ends_with, self._configuration.set)

    def innermost(self) -> ProcessGroup:
        """Return the group inside of all wrappers, or the group itself if it is no wrapper."""
        return self

    def make_alike(self) -> ProcessGroup | None:
        """Make another group like this one, not configured; return None if that is impossible."""
        return None

    def size(self) -> int:
        """Return the number of members."""
        raise NotImplementedError

    def rank(self) -> int:
        """Return the caller's rank among the members."""
        raise NotImplementedError

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        """Run one collective; return None only if it blocks."""
        raise NotImplementedError

    def _get_backend(self, device: torch.device) -> Any:
        """Return the group itself, for any device: no other object outlives a configuration."""
        return self

    # torch reads these before it uses one of the features of its own accord.
    supports_coalescing = supports_shrinking = supports_splitting = False
    supports_time_estimate = _supports_time_estimate = False  # the second name from torch 2.15 on

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: memory that a backend registers has to come from that backend."""
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a batch: the operations that the calling thread begins until `_end_coalescing` are one."""
        self._batches[threading.get_ident()] = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """Return the operations since `_start_coalescing`, which have begun already, as one work.

        Raises:
            ProcessGroupError: there was no `_start_coalescing`.
        """
        batch = self._batches.pop(threading.get_ident(), None)
        if batch is None:
            raise ProcessGroupError("_end_coalescing without _start_coalescing in this thread")
        works = [work for work, _ in batch]
        return JointOperation(works, lambda: [tensor for _, result in batch for tensor in result], waits=True)

    def _coalesce(self, row: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any], work: Any) -> None:
        if work is not None and (batch := self._batches.get(threading.get_ident())) is not None:
            batch.append((work, row.bind(args, kwargs).result))

    def gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        opts: GatherOptions | None = None,
    ) -> Work:
        """Gather into one tensor: the concatenation of all ranks' tensors, or the stack of them.

        Args:
            output: the result at the root: the concatenation or the stack of the inputs. Other ranks may pass
              anything.
            input: a tensor of the same shape and dtype on every rank.
            opts: the options that name the root; rank 0 if they are left out.

        Raises:
            ProcessGroupError: the output at the root has another shape or dtype.
        """
        options = GatherOptions() if opts is None else opts
        places = [parts_of(output, input, self.size())] if self.rank() == options.rootRank else []
        return self.gather(places, [input], options)

    gather_into_tensor = gather_single

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        """Send one tensor from rank `root` to all ranks."""
        options = BroadcastOptions()
        options.rootRank = root
        return self.broadcast([tensor], options)

    def _member_ranks(self) -> Sequence[int]:
        try:
            return self._global_ranks or range(self.size())
        except ProcessGroupError:
            return ()

    # C++ callers, such as DDP's reducer, use these names.

    def getSize(self) -> int:  # noqa: N802
        return self.size()

    def getRank(self) -> int:  # noqa: N802
        return self.rank()

    def name(self) -> str:
        return self.getBackendName()

    _get_backend_name = name


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
    """Let a class's `configure` take torchft 0.2.0's order of arguments, too: the replica's id before the
    rank.

    torchft's own signature has no `ends_with`: a group with that signature is aborted if the signal is set
    meanwhile. Such a class does not record that a configuration has begun, either, so this does.
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


def _with_either_argument(abort: Callable[..., None]) -> Callable[..., None]:
    """Let an `abort` that takes at most one of `reason` and torchft's `errored` be called with both."""
    takes = list(inspect.signature(abort).parameters)[1:]
    if takes not in ([], ["errored"], ["reason"]):
        return abort

    @functools.wraps(abort)
    def take(self: ProcessGroup, *place: str | bool, **named: str | bool) -> None:
        named |= {"errored" if isinstance(given, bool) else "reason": given for given in place}
        abort(self, **{name: given for name, given in named.items() if name in takes})

    return take
