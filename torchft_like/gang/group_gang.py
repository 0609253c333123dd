"""Gangs over any process group that torch's functions take: torch's own, or one of this package.

Here is what a process group leaves to its caller: arguments are checked, tensors with gaps and unusual dtypes
are made movable, errors are put into a gang's words. A group may keep an error to itself, as the swallowing
groups do; the gang asks for it after every call, so it never returns without a result.

A gang over a group of this package follows it: when the group is configured anew the gang has the new size.
Its sub-gangs do not: each is of the configuration in which it was made, and ends with it. Only the members
that talk to a dead member notice its death; without this rule, the members of a part to which it did not
belong would wait for partners that are already meeting anew.

All members of the whole group take part in a split, and state over that group how they have to split up; the
first member of each part serves a store in which its members meet, and publishes its address. So different
arguments are an error on every member, no store of the whole has to be alive, and no names in it can clash.

INVARIANT: a store is served until every member of its part has met the others, and no longer. That they
have is known from a barrier of the new group, and a member that dies meanwhile breaks the barrier.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple, Self, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import ReduceOp

from lighthouse.address import Address
from torchft_like.communicator.communicator import (
    HARMLESS,
    Channel,
    Communicator,
    CoordinatorOptions,
    ToldToAllError,
    ranks_in_job,
)
from torchft_like.communicator.messages import start_broadcast
from torchft_like.communicator.tensors import is_addable_as_is
from torchft_like.core.agreement.statements import Statement, Terms
from torchft_like.devices import beside_captures
from torchft_like.errors import (
    CollectiveMismatchError,
    GangError,
    GroupCoordinatorError,
    InvalidOperationError,
    NotSupportedError,
    ProcessGroupNotConfiguredError,
    StaleGangError,
)
from torchft_like.gang.base import (
    Gang,
    ReduceOperation,
    as_moved,
    check_gather,
    check_partition,
    check_reduction,
    check_source,
    dense,
    effective,
    reducible,
    with_index,
)
from torchft_like.plain_data import LEAF_BYTES_MAX
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL
from torchft_like.process_group.configuration import Configuration
from torchft_like.process_group.store import DEFAULT_TIMEOUT, server_of
from torchft_like.process_group.store_server import serving_store
from torchft_like.runtime.durations import as_timedelta
from torchft_like.runtime.hosts import own_host
from torchft_like.runtime.long_waits import calls

# Constants, because an enum looks its members up in Python.
_SUM, _MEAN = ReduceOperation.SUM, ReduceOperation.MEAN
_REDUCE_OPS = {
    ReduceOperation.SUM: ReduceOp.SUM,
    ReduceOperation.MEAN: ReduceOp.AVG,
    ReduceOperation.PRODUCT: ReduceOp.PRODUCT,
    ReduceOperation.MIN: ReduceOp.MIN,
    ReduceOperation.MAX: ReduceOp.MAX,
}
_OPTIONS = CoordinatorOptions(check_collectives=False, message_bytes_max=LEAF_BYTES_MAX)
_NO_LIST = "of no list"
_TIMEOUT = timedelta(minutes=15)
_BACKENDS = {"cpu": "torchft-gloo", "cuda": "torchft-nccl"}

_registrations = itertools.count()


class GroupGang(Gang):
    """The functions of a gang over a process group; a subclass says which members carry them out."""

    _quick: Communicator | None = None  # the members, if nothing has to be asked of them before a call

    def __init__(self, pg: dist.ProcessGroup, device: torch.device) -> None:
        self._pg = pg
        self._device = with_index(torch.device(device))
        # Called with each error of the gang, and of the gangs that are made of it.
        self._tell: Callable[[Exception], object] = lambda _: None
        # Raises an error if the members of parts cannot communicate now.
        self._check_parts: Callable[[], object] | None = None

    @property
    def device(self) -> torch.device:
        return self._device

    @abstractmethod
    def _present(self) -> Communicator:
        """Return the members of the present configuration; a GangError says why they cannot communicate."""

    def _over(self, group: dist.ProcessGroup) -> Communicator:
        """Return the members of a group in its present configuration."""
        channel = Channel(group)
        channels = {device.type: channel for device in group._device_types}
        channels.setdefault(self._device.type, channel)
        members = Communicator("gang", (self.rank, self.size), self._device, channels, _OPTIONS)
        members.asks_first_rank = False  # each member hears of a member's death
        return members

    def as_process_group(self) -> dist.ProcessGroup:
        return self._pg

    def _has_average(self, tensor: Tensor) -> bool:
        """Return whether the group has MEAN for tensors like this one; otherwise a SUM is divided."""
        return tensor.is_cuda or (isinstance(self._pg, ProcessGroup) and self._pg.counts_participants)

    def _explained(self, what: str, error: Exception) -> GangError:
        explained = GangError(f"{what} of {self!r} failed: {error}")
        self._tell(explained)
        return explained

    def create_gang(self, ranks: Sequence[int]) -> ProcessGroupGang | None:
        """Make a gang over a group of the same class, with its timeout and options.

        If this gang's group is torch's, the new one is over a group of ours. It ends with the configuration
        of this gang's group, or the quorum, in which it was made.
        """
        return self.split([ranks])

    def split(self, partition: Sequence[Sequence[int]]) -> ProcessGroupGang | None:
        parts = check_partition(partition, self.size)
        with self._communicating("create_gang") as members:
            try:
                part = split(self._whole(members), "create_gang", parts)
            except CollectiveMismatchError as error:
                if error.aspect == "arguments":  # one of them could not serve a store
                    raise
                raise ValueError(
                    f"the members were given different ranks for the new gangs: {error}"
                ) from error
        if part is None:
            return None
        gang = ProcessGroupGang(part.group, self._device)
        gang._part, gang._tell, gang._check_parts = part, self._tell, self._check_parts
        return gang

    def _whole(self, members: Communicator) -> Communicator:
        """Return the members over the group of which the groups of parts are made."""
        return members

    def barrier(self) -> None:
        with self._communicating("barrier") as members:
            group = members.control.group
            if self._device.type != "cuda":
                dist.barrier(group=group)
                return
            dist.barrier(group=group, device_ids=[self._device.index])
            torch.cuda.current_stream(self._device).synchronize()
            if isinstance(group, ProcessGroup) and (error := group.errored()) is not None:
                raise error  # an error of earlier work, too: NCCL reports it once the stream is there

    def all_reduce(self, tensor: Tensor, op: ReduceOperation) -> None:
        members, channel = self._quick, None
        is_simple = op is _SUM and is_addable_as_is(tensor) and tensor.is_contiguous()
        if members is not None and is_simple and not (tensor.requires_grad or tensor.is_inference()):
            channel = members.channels.get(tensor.device.type)
        if channel is None or channel.configuration is None or channel.configuration.reason is not None:
            self._all_reduce(tensor, op)
            return
        try:
            channel.group.allreduce([tensor], AllreduceOptions()).wait()
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            raise self._told("all_reduce", error)  # noqa: B904 - it has its cause

    @torch.no_grad()
    def _all_reduce(self, tensor: Tensor, op: ReduceOperation) -> None:
        check_reduction(tensor, op)
        self._check_place(tensor)
        divides = op is _MEAN and not self._has_average(tensor)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM if divides else _REDUCE_OPS[effective(op, tensor)])
        with dense(tensor, writes=True) as without_gaps, reducible(without_gaps, op) as numbers:
            with self._communicating("all_reduce") as members:
                channel = members.channels[numbers.device.type]
                channel.start("allreduce", [numbers], options).wait()
            if divides:
                numbers.div_(members.world_size)

    @torch.no_grad()
    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        check_gather(output_tensor, input_tensor, self.size)
        self._check_place(input_tensor)
        with (
            dense(input_tensor, writes=False) as source,
            dense(output_tensor, writes=True) as output,
            self._communicating("all_gather") as members,
        ):
            flat = source.view(1) if source.dim() == 0 else source
            # This is the concatenated shape, which every backend takes.
            joined = output.view(members.world_size * flat.shape[0], *flat.shape[1:])
            members.channels[flat.device.type].start(
                "_allgather_base", as_moved(joined), as_moved(flat)
            ).wait()

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, source_rank: int = 0) -> None:
        source = check_source(source_rank, self.size)
        self._check_place(tensor)
        is_target = self.rank != source
        with dense(tensor, writes=is_target) as without_gaps, self._communicating("broadcast") as members:
            members.broadcast(as_moved(without_gaps), source).wait()

    @torch.no_grad()
    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        source = check_source(source_rank, self.size)
        is_list = isinstance(objects, list)

        def length() -> Terms:
            return (("length", str(len(objects)) if is_list else _NO_LIST),)

        with self._communicating("broadcast_objects") as members:
            given = list(objects) if is_list else []
            try:
                received = start_broadcast(members, "broadcast_objects", given, source, length).wait()
                if members.rank != source and is_list:
                    if not isinstance(received, list) or len(received) != len(objects):
                        raise GangError(f"rank {source} sent something else than {len(objects)} objects")
                    objects[:] = received
            except CollectiveMismatchError as error:
                if is_list and error.aspect == "arguments":
                    raise GangError(f"rank {source} cannot send its objects: {error}") from error
                if is_list:
                    raise ValueError(str(error)) from error
            except HARMLESS:
                raise
            except BaseException as error:
                # Otherwise the others would wait for this member, and take its next call for the rest of this
                # one.
                members.break_off(f"a member left broadcast_objects half-way: {error!r}")
                raise
            if not is_list:
                raise ValueError(f"objects are given in a list, not in a {type(objects).__name__}")

    @contextlib.contextmanager
    def _communicating(self, what: str) -> Iterator[Communicator]:
        """Yield the members, which may communicate in the block; put every error into a gang's words.

        A call that takes minutes says so in the log.
        """
        call = object()
        try:
            members = self._present()
            calls[call] = time.monotonic(), what, members
            yield members
            if (error := members.control.hidden_error()) is not None:
                raise error
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            raise self._told(what, error)  # noqa: B904 - it has its cause
        finally:
            calls.pop(call, None)

    def _told(self, what: str, error: Exception) -> Exception:
        """Return the error to raise for an error of the group."""
        if isinstance(error, ToldToAllError):
            return error.error if isinstance(error.error, GangError) else self._told(what, error.error)
        if isinstance(error, GroupCoordinatorError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # the error that a channel found
        if isinstance(error, GangError | NotSupportedError | ValueError | TypeError):
            return error
        if isinstance(error, NotImplementedError):
            told: Exception = NotSupportedError(f"{self!r} has no {what}: {error}")
        else:
            told = self._explained(what, error)
        told.__cause__ = error
        return told

    def _check_place(self, tensor: Tensor) -> None:
        kind = tensor.device.type
        if kind == self._device.type:
            return
        known = list(self._present().channels)
        if kind not in known:
            raise ValueError(
                f"the tensor is on {tensor.device}, and {self!r} moves {', '.join(known)} tensors"
            )


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
        super().__init__(pg, device)
        if not isinstance(pg, dist.ProcessGroup):
            raise ValueError(f"{pg!r} is no process group that the caller is a member of")
        self._members: Communicator | None = None
        self._part: Part | None = None
        self._owns_default_group = False
        self._is_closed = False

    @classmethod
    def create_default_process_group(
        cls,
        device: torch.device,
        *,
        timeout: timedelta | float | None = None,
        high_priority: bool = False,
        backend: str | None = None,
    ) -> Self:
        """Start torch's default process group, as torchrun or the environment describes it, as a gang.

        Args:
            device: cpu or cuda.
            timeout: the limit of each operation, seconds or timedelta; None for 15 minutes.
            high_priority: whether to run on streams of high priority, if the backend has such: torch's own
                nccl.
            backend: torch's name of the backend; None for torchft-gloo or torchft-nccl, which can be aborted.

        Raises:
            ValueError: the device is neither cpu nor cuda, or the timeout is no positive duration.
            NotSupportedError: there is no such device.
            InvalidOperationError: there is a default process group already.
            GangError: the members did not meet.
        """
        device = torch.device(device)
        if device.type not in _BACKENDS:
            raise ValueError(f"a gang is of cpu or cuda devices, not {device.type}")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise NotSupportedError("there is no CUDA device here, or this torch was built without CUDA")
        timeout = _TIMEOUT if timeout is None else as_timedelta(timeout)
        if dist.is_initialized():
            raise InvalidOperationError(
                "there is a default group already: wrap it, ProcessGroupGang(dist.group.WORLD, device)"
            )
        name = backend or _BACKENDS[device.type]
        try:
            if device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)
            options: dict[str, Any] = {}
            if high_priority and name == "nccl":
                options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            dist.init_process_group(name, timeout=timeout, **options)
        except Exception as error:
            raise GangError(f"the default process group could not be started over {name}: {error}") from error
        gang = cls(dist.distributed_c10d._get_default_group(), device)
        gang._owns_default_group = True
        return gang

    @property
    def rank(self) -> int:
        return _known(self._pg.rank)

    @property
    def size(self) -> int:
        return _known(self._pg.size)

    def as_process_group(self) -> dist.ProcessGroup:
        """Return the group, registered under a name, by which functions of torch look it up."""
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

    def _present(self) -> Communicator:
        if self._part is not None and (reason := self._part.ending.reason) is not None:
            stale = StaleGangError(f"{self!r} is over, derive it again from its parent: {reason}")
            self._tell(stale)
            raise stale
        if self._is_closed:
            raise GangError(f"{self!r} was closed")
        if self._check_parts is not None:
            self._check_parts()
        members = self._members
        if members is None or not members.control.is_lasting:
            self._members = members = self._over(self._pg)
            if self._part is not None:
                members.endings.append(self._part.ending)
            is_quick = self._check_parts is None and members.control.is_lasting
            self._quick = members if is_quick else None
        return members

    def _explained(self, what: str, error: Exception) -> GangError:
        if self._part is not None and (reason := self._part.ending.reason) is not None:
            stale = StaleGangError(f"{what} of {self!r} was ended, derive it again from its parent: {reason}")
            whole = self._part.whole
            is_present = not isinstance(whole, ProcessGroup) or whole.configuration is self._part.ending
            if is_present:  # otherwise the error says nothing about the present configuration
                self._tell(stale)
            return stale
        return super()._explained(what, error)

    def __repr__(self) -> str:
        try:
            place = f"rank {self.rank} of {self.size}"
        except RuntimeError:
            place = "not configured"
        return f"<{type(self).__name__}: {place} on {self._device}>"


def _known(place: Callable[[], int]) -> int:
    """Return the rank or the size of a group, which has none before it is configured."""
    try:
        return place()
    except ProcessGroupNotConfiguredError as error:
        raise GangError(f"the gang has no members yet: {error}") from error


class Part(NamedTuple):
    """A configured group of some members of `whole`, and the configuration of `whole` with which it ends."""

    group: ProcessGroup
    whole: dist.ProcessGroup
    ending: Configuration


def split(communicator: Communicator, operation: str, partition: Sequence[tuple[int, ...]]) -> Part | None:
    """Make the groups of several parts, each of some of the members; return None if the caller is in no part.

    Every member calls this, with the same partition.

    Raises:
        CollectiveMismatchError: the members passed different partitions; all of them raise the same.
        ProcessGroupError: the members of the caller's part could not meet.
    """
    group, rank = communicator.control.group, communicator.rank
    # This is read before the exchange: from now on an end of the whole ends the part, too. torch's own groups
    # never end.
    ending = group.configuration if isinstance(group, ProcessGroup) else Configuration()
    own = next((ranks for ranks in partition if rank in ranks), ())
    with ExitStack() as until_met:

        def prepare() -> tuple[Statement, int, bytes, None]:
            text = ""
            if len(own) > 1 and own[0] == rank:
                met_at = group.store_address if isinstance(group, ProcessGroup) else None
                store = met_at.server if met_at is not None else None
                if store is None and dist.is_initialized():
                    store = server_of(dist.distributed_c10d._get_default_store())
                text = str(until_met.enter_context(serving_store(own_host(store))))
            terms = (("ranks", str([list(ranks) for ranks in partition])),)
            return Statement(operation, terms=terms), 0, text.encode(), None

        records, _ = communicator.agree(operation, prepare)
        if not own:
            return None
        made = make_like(group, communicator.device)
        try:
            address = records[own[0]].payload.decode(errors="replace")
            met_at = f"{address or Address('127.0.0.1', 1)}/gang"  # a group of one member uses no store
            ranks = ranks_in_job(group)
            in_job = [ranks[each] for each in own]
            with beside_captures(communicator.device):
                made.configure(met_at, own.index(rank), len(own), global_ranks=in_job, ends_with=ending)
                made.barrier().wait()
            ending.check()
        except BaseException:
            made.abort("its members could not meet")  # not shutdown, which waits for operations under way
            raise
        return Part(made, group, ending)


def make_like(group: dist.ProcessGroup, device: torch.device) -> ProcessGroup:
    """Make a group of the class, timeout and options of `group`, not configured.

    It is always a group of this package, also for torch's own groups, with their timeout: torch sorts the
    ranks of a new group, wants every process of the job to take part in making one, and cannot end one whose
    member has died.
    """
    if isinstance(group, ProcessGroup):
        if (alike := group.make_alike()) is not None:
            return alike
        timeout = group.timeout
    else:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", DEFAULT_TIMEOUT)
    return ProcessGroupNCCL(timeout) if device.type == "cuda" else ProcessGroupGloo(timeout)
