"""The process groups of the same members: which one moves which tensors, and the handling of their errors.

A `Channel` is one process group, torch's own or one of this package, registered with torch or not. A
communicator has one for memory of the CPU and one for that of its device, which on a CPU are the same. This
module does not know the meaning of its calls.

INVARIANTS
* Every wait ends: in the group's timeout, its abort, or the death of a peer.
* A rank that leaves a call half-way, for any reason, takes its groups down, and its ends of queues, so that
  no peer waits for the other half. A call that is refused before data moves takes nothing down.
* A group that hides its errors (ErrorSwallowing, Managed) does not hide them here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, GatherOptions, Work

from torchft_like.communicator.handle import LASTING, Epoch
from torchft_like.communicator.tensors import device_terms, specifications
from torchft_like.core.agreement.referee import disagreement
from torchft_like.core.agreement.statements import (
    RECORD_BYTES,
    Record,
    RecordError,
    Statement,
    decode,
    pack_statement,
    unpack_all,
)
from torchft_like.errors import (
    CollectiveMismatchError,
    CollectiveRefusedError,
    FaultToleranceError,
    GroupCoordinatorError,
    ProcessGroupNotConfiguredError,
    QueueDescriptorsError,
    QueueMemoryError,
)
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.checking import check_wanted
from torchft_like.process_group.configuration import Configuration
from torchft_like.process_group.store import DEFAULT_TIMEOUT, StoreAddress
from torchft_like.runtime.durations import as_timedelta
from torchft_like.runtime.long_waits import calls, watch_calls

if TYPE_CHECKING:  # queues know communicators
    from torchft_like.message_queue import MessageQueue

# Any object that has torch's collectives as methods.
Group = Any


class Channel:
    """One process group, in its present configuration, which is None for a group that has none."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._own = group if isinstance(group, ProcessGroup) else None
        self.configuration: Configuration | None = None if self._own is None else _configuration_of(self._own)
        self.hides_errors: bool = self._own is not None and self._own.hides_errors

    @property
    def is_lasting(self) -> bool:
        """Whether the group still has the members that it had, and would report it if it had others."""
        return not self.hides_errors and self.configuration is not None and self.configuration.reason is None

    def check(self) -> None:
        """Raise an error if the group cannot be used, even if the group hides that."""
        if (error := self.hidden_error()) is not None:
            raise GroupCoordinatorError(f"its process group has failed: {error}") from error
        if self._own is not None and _configuration_of(self._own) is not self.configuration:
            raise GroupCoordinatorError("its process group was configured anew: make a new coordinator")

    def hidden_error(self) -> Exception | None:
        return None if self._own is None else self._own.hidden_error()

    def break_off(self, reason: str) -> None:
        """End the group, so that no peer waits for this rank; torch's own groups cannot be ended."""
        if self._own is not None and _configuration_of(self._own) is self.configuration:
            self._own.abort(reason)

    def store_address(self) -> StoreAddress | None:
        """Return the store in which the members met, if the group is of this package."""
        return None if self._own is None else self._own.store_address

    def carry_out(self, method: str, *args: Any) -> None:
        """Begin a collective, and wait for it, also for a failure that the group hides."""
        getattr(self.group, method)(*args).wait()
        if self.hides_errors:
            self.check()

    def start(self, method: str, *args: Any) -> Started:
        return Started(getattr(self.group, method)(*args), self)


class Started(NamedTuple):
    """A collective that is under way."""

    work: Work
    channel: Channel

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the end of the collective; a failure that the group hid is a GroupCoordinatorError."""
        self.work.wait() if timeout is None else self.work.wait(timeout)
        self.channel.check()


def _configuration_of(group: ProcessGroup) -> Configuration | None:
    try:
        return group.configuration
    except ProcessGroupNotConfiguredError:  # a wrapper may have no group yet
        return None


def ranks_in_job(group: Group) -> list[int]:
    """Return the members' ranks in the whole job, if they are known, in the order of the group."""
    known: list[int] = []
    with contextlib.suppress(FaultToleranceError):
        if isinstance(group, ProcessGroup):
            known = list(group._member_ranks())
        elif group in dist.distributed_c10d._world.pg_group_ranks:
            known = dist.get_process_group_ranks(group)
    return known if len(known) == group.size() else list(range(group.size()))


T = TypeVar("T")
P = ParamSpec("P")
# Tags from here on are the communicator's messages; a caller that uses the group beside it takes smaller
# ones.
FIRST_TAG = 1 << 20
_EPOCH_MARKS, _EPOCH_TAGS = 1 << 10, 1 << 20


@dataclass(frozen=True)
class CoordinatorOptions:
    """The options of a coordinator, the same on every rank.

    Attributes:
        timeout: the limit of each operation of the groups that the coordinator makes, seconds or timedelta;
            given groups keep theirs. A barrier without a timeout of its own ends after it, too.
        check_collectives: whether to compare what the ranks pass to all_reduce, all_gather, reduce_scatter,
            gather and broadcast before data moves, so that a mistake of one rank is an error on all of them;
            the other calls always compare. The environment variable TORCHFT_CHECK_COLLECTIVES=1 or =0
            overrides it.
        message_bytes_max: the limit of the bytes of one message's tensors; a larger message is refused before
            it is allocated.
        max_chunk_bytes, max_chunks: the size of the message queues that the coordinator makes: the bytes of a
            slot, and how many slots there are.
    """

    timeout: timedelta | float = DEFAULT_TIMEOUT
    check_collectives: bool | None = None
    message_bytes_max: int = 2**36
    max_chunk_bytes: int = 1024 * 1024
    max_chunks: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", as_timedelta(self.timeout))
        if self.message_bytes_max <= 0:
            raise ValueError(f"message_bytes_max is {self.message_bytes_max}: it must be positive")


class ToldToAllError(Exception):
    """An error kept this rank from a call: the other ranks know, and none has begun the call."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


# Errors that are found before data moves, or after all of it has: no peer waits for the other half of the
# call.
HARMLESS = (
    CollectiveRefusedError,
    NotImplementedError,
    QueueDescriptorsError,
    QueueMemoryError,
    ToldToAllError,
    ValueError,
    TypeError,
)


class Communicator:
    """The groups of one set of members, for as long as the members are the same.

    Args:
        place: the caller's rank among the members of all groups, and the number of members.
        channels: the group for tensors on each type of device; other tensors go through memory of the CPU, or
          of `device` if there is no group for the CPU.
        epoch: that of the members.
        control: the group for records of calls, if it is none of `channels`.

    Attributes:
        asks_first_rank: whether records are gathered on rank 0 and broadcast, which is faster than an
          all-gather.
        endings: the groups' configurations, which are set once a group is aborted or has other members, and
          those with which these end.
        is_watched: whether more than `endings` has to be checked before a call.
    """

    asks_first_rank = True

    def __init__(
        self,
        name: str,
        place: tuple[int, int],
        device: torch.device,
        channels: Mapping[str, Channel],
        options: CoordinatorOptions,
        epoch: Epoch = LASTING,
        control: Channel | None = None,
    ) -> None:
        self.name = name
        self.rank: int = place[0]
        self.world_size: int = place[1]
        self.device = device
        self.options = options
        self.epoch = epoch
        self.is_checking: bool = check_wanted(options.check_collectives) is True
        self.channels = channels
        is_on_cpu = "cpu" in channels or control is not None
        self.control_device: torch.device = torch.device("cpu") if is_on_cpu else device
        self.control: Channel = channels[self.control_device.type] if control is None else control
        self._each = tuple({id(each): each for each in (self.control, *channels.values())}.values())
        self.endings: list[Configuration] = [
            each.configuration for each in self._each if each.configuration is not None
        ]
        self.is_watched: bool = epoch is not LASTING or any(each.hides_errors for each in self._each)
        self._counting = threading.Lock()
        self._messages: Counter[tuple[str, int]] = Counter()
        self._queues: list[MessageQueue] = []
        watch_calls()

    @classmethod
    def over(
        cls,
        name: str,
        device: torch.device,
        groups: tuple[Group, Group | None],
        options: CoordinatorOptions,
        epoch: Epoch = LASTING,
    ) -> Communicator:
        """Make a communicator over a group for CPU memory and records, and one for `device`."""
        cpu_group, device_group = groups
        control = Channel(cpu_group)
        channels = {"cpu": control}
        if device_group is not None and device_group is not cpu_group:
            channels[device.type] = Channel(device_group)
        return cls(name, (cpu_group.rank(), cpu_group.size()), device, channels, options, epoch, control)

    def among(self, cpu_group: Group, device_group: Group | None) -> Communicator:
        """Make a communicator of the same members over other groups."""
        for group in filter(None, (cpu_group, device_group)):
            if (found := (group.rank(), group.size())) != (self.rank, self.world_size):
                raise ValueError(
                    f"the caller is rank {found[0]} of {found[1]} in the given group, and rank {self.rank} "
                    f"of {self.world_size} in {self}"
                )
        return Communicator.over(self.name, self.device, (cpu_group, device_group), self.options, self.epoch)

    @property
    def waits_on_streams(self) -> bool:
        """Whether a stream, not the thread, waits for tensors of `device`."""
        return self.device.type != "cpu" and self.device.type in self.channels

    # ------------------------------------------------------------------------- errors

    def begin(self, operation: str) -> None:
        """Raise a StaleEpochError if the members have changed, a GroupCoordinatorError if a group failed."""
        self.end(operation)
        try:
            for channel in self._each:
                channel.check()
        except GroupCoordinatorError as error:
            raise self.explained(operation, error)  # noqa: B904 - it has its cause

    def end(self, operation: str) -> None:
        """Raise an error if the members have changed during a call, for its result does not count then."""
        if self.epoch is not LASTING:
            self.epoch.require_present(f"{operation} over {self}")

    def explained(self, operation: str, error: BaseException) -> BaseException:
        """Return the error to raise for a call that failed with `error`.

        This takes the groups down, unless no peer can be waiting for this rank.
        """
        what = f"{operation} over {self}"
        told: BaseException = error
        if isinstance(error, ToldToAllError):
            told = GroupCoordinatorError(f"{what} failed: {error}")
            told.__cause__ = error.error
        elif not isinstance(error, HARMLESS):
            self.break_off(f"{what} failed: {error!r}")
            if isinstance(error, Exception):
                told = GroupCoordinatorError(f"{what} failed: {error}")
                told.__cause__ = error.__cause__ if isinstance(error, GroupCoordinatorError) else error
        return self.epoch.explained(what, told)

    @contextlib.contextmanager
    def guard(self, operation: str) -> Iterator[None]:
        """Run one call between `begin` and `end`, with the errors of `explained`.

        A call that takes minutes says so in the log.
        """
        self.begin(operation)
        key = object()
        calls[key] = time.monotonic(), operation, self
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - after Ctrl-C, too, the peers must not wait
            raise self.explained(operation, error)  # noqa: B904 - it has its cause
        finally:
            calls.pop(key, None)
        self.end(operation)

    def break_off(self, reason: str) -> None:
        """End operations under way, on this rank and on the peers."""
        for channel in self._each:
            channel.break_off(reason)
        self.end_queues(0.0)

    def keep(self, queue: MessageQueue) -> None:
        """End the queue when the groups are taken down, or at `end_queues`."""
        self._queues = [*(known for known in self._queues if not known.is_closed), queue]

    def end_queues(self, *timeout: timedelta | float) -> None:
        """End the queues between the members, even if an exception interrupts the end of one."""
        with contextlib.ExitStack() as all_of_them:
            for queue in self._queues:
                all_of_them.callback(queue.shutdown, *timeout)

    # ---------------------------------------------------------------------- agreement

    def agree(
        self, operation: str, prepare: Callable[[], tuple[Statement, int, bytes, T]]
    ) -> tuple[list[Record], T]:
        """Exchange what all ranks state about a call before data moves; all of them get the same verdict.

        Args:
            prepare: returns this rank's statement, its number and payload, and a value for the caller, or
              raises an error that refuses the call.

        Returns:
            The records in the order of ranks, and the last value of `prepare`.

        Raises:
            CollectiveMismatchError: the statements do not belong together.
            Exception: `prepare` raised it; the other ranks get a CollectiveMismatchError.
        """
        try:
            statement, number, payload, prepared = prepare()
            record = pack_statement(statement, number, payload)
        except Exception as error:  # noqa: BLE001 - any error is told to the other ranks
            self.refuse(operation, error)
        return self.exchange(record), prepared

    def agree_if_checking(
        self, operation: str, tensor: Tensor, more: Mapping[str, int], check: Callable[[], T]
    ) -> T:
        """Do as `agree` if the options ask for it; else only check the caller's own arguments.

        The ranks must agree on the dtype, shape and type of device of the tensor, and on `more`.
        """
        if not self.is_checking:
            return check()

        def state() -> tuple[Statement, int, bytes, T]:
            found = check()
            numbers = tuple((name, str(number)) for name, number in more.items())
            terms = *device_terms([tensor], self.channels), *numbers
            return Statement(operation, inputs=specifications([tensor]), terms=terms), 0, b"", found

        return self.agree(operation, state)[1]

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        """Tell the others that this rank takes no part; raise the error: in another if not HARMLESS."""
        if self.world_size > 1:
            self._gather(pack_statement(Statement(operation).refused(error)))
        if isinstance(error, HARMLESS):
            raise error
        raise ToldToAllError(error) from error

    def exchange(self, record: bytes) -> list[Record]:
        """Return the records of all ranks; all raise one CollectiveMismatchError if they do not fit."""
        try:
            records = unpack_all(record) if self.world_size == 1 else self._gather(record)
            call = records[0].call
            for other in records:
                if other.refuses or other.call != call:
                    check({rank: decode(each.call) for rank, each in enumerate(records)})
        except RecordError as error:
            raise GroupCoordinatorError(
                f"a rank said something that is no statement ({error}): do all run the same version, and are "
                "there calls on this group beside the coordinator's?"
            ) from error
        return records

    def _gather(self, record: bytes) -> list[Record]:
        """Return the records of all ranks.

        They go through rank 0, because an all-gather wakes all ranks one after the other. But in an
        all-gather more ranks notice one that dies.
        """
        channel, ranks = self.control, self.world_size
        everyone = torch.empty((ranks, RECORD_BYTES), dtype=torch.uint8, device=self.control_device)
        if not self.asks_first_rank:
            channel.start("_allgather_base", everyone.view(-1), self.control_bytes(record)).wait()
            return unpack_all(everyone.cpu().numpy().tobytes())
        gathering, spreading = GatherOptions(), BroadcastOptions()
        gathering.rootRank = spreading.rootRank = spreading.rootTensor = 0
        own = self.control_bytes(record)
        outputs = [list(everyone.unbind(0))] if self.rank == 0 else []
        channel.carry_out("gather", outputs, [own], gathering)
        if self.rank == 0:  # rank 0 needs no other rank any more to find a record that differs
            records = unpack_all(everyone.cpu().numpy().tobytes())
        channel.carry_out("broadcast", [everyone], spreading)
        return records if self.rank == 0 else unpack_all(everyone.cpu().numpy().tobytes())

    # -------------------------------------------------------------------------- bytes

    def tag(self, direction: str, peer: int) -> int:
        """Return the tag of the next message to or from a peer: no other message matches it.

        If members change, tags tell the messages of an epoch from those of the thousand before it.
        """
        with self._counting:
            number = self._messages[direction, peer]
            self._messages[direction, peer] += 1
        return FIRST_TAG + self.epoch.mark % _EPOCH_MARKS * _EPOCH_TAGS + number % _EPOCH_TAGS

    # The operations below move tensors that are contiguous and `movable`.

    def movable(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy, without gaps on a device for which there is a group."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        return (plain if plain.device.type in self.channels else plain.to(self.control_device)).contiguous()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device_type: str) -> Tensor:
        """Make memory in which a peer's tensor can arrive, for a tensor of this type of device."""
        device = self.device if device_type == self.device.type else torch.device(device_type)
        return torch.empty(
            shape, dtype=dtype, device=device if device_type in self.channels else self.control_device
        )

    def control_bytes(self, data: bytes) -> Tensor:
        """Make a tensor of bytes for the group that carries records of calls."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.control_device)

    def broadcast(self, tensor: Tensor, src: int) -> Started:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        return self.channels[tensor.device.type].start("broadcast", [tensor], options)

    def send(self, tensor: Tensor, dst: int, tag: int) -> Started:
        return self.channels[tensor.device.type].start("send", [tensor], dst, tag)

    def recv(self, tensor: Tensor, src: int, tag: int) -> Started:
        return self.channels[tensor.device.type].start("recv", [tensor], src, tag)

    def __str__(self) -> str:
        return f"group {self.name} (rank {self.rank} of {self.world_size})"


Call = Callable[Concatenate[Communicator, P], T]


def call(operation: str) -> Callable[[Call[P, T]], Call[P, T]]:
    """Return a decorator that makes a function over a communicator one call, with the errors of `guard`."""

    def decorate(function: Call[P, T]) -> Call[P, T]:
        @functools.wraps(function)
        def carry_out(communicator: Communicator, /, *args: P.args, **kwargs: P.kwargs) -> T:
            if communicator.is_watched:
                communicator.begin(operation)
            for ending in communicator.endings:
                if ending.reason is not None:
                    communicator.begin(operation)
            key = object()
            calls[key] = time.monotonic(), operation, communicator
            try:
                result = function(communicator, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - after any error the peers must not wait
                raise communicator.explained(operation, error)  # noqa: B904 - it has its cause
            finally:
                calls.pop(key, None)
            if communicator.epoch is not LASTING:
                communicator.end(operation)
            return result

        return carry_out

    return decorate


def check(statements: Mapping[int, Statement]) -> None:
    """Check that the calls of some ranks belong together."""
    problem = disagreement(list(statements.values()))
    if problem is not None:
        calls = dict(zip(statements, problem.calls.values(), strict=True))
        raise CollectiveMismatchError(problem.aspect, calls)
