"""How a coordinator's bytes move: which process group takes them, and what becomes of its errors.

A lane is one process group. A coordinator has one for memory of the CPU and one for that of its device,
which on a CPU are the same. What the calls of a coordinator mean is not known here; a lane moves tensors
without gaps.

INVARIANTS
* Every wait ends: in the group's timeout, its abort, or the death of a peer.
* A rank that leaves a call half-way, for whatever reason, takes its groups down, and its ends of queues, so
  that no peer waits for the other half. What is refused before data moves takes nothing down.
* A group that hides its errors (ErrorSwallowing, Managed) does not hide them here.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BarrierOptions

from torchft_like.errors import (
    CollectiveRefusedError,
    GroupCoordinatorError,
    QueueDescriptorsError,
    QueueMemoryError,
)
from torchft_like.group_coordinator.arguments import Terms, lane_terms
from torchft_like.group_coordinator.handle import Handle
from torchft_like.group_coordinator.lane import Flight, Group, Lane
from torchft_like.group_coordinator.options import CoordinatorOptions
from torchft_like.group_coordinator.statements import STATEMENT_BYTES, Statement, check, decode, encode
from torchft_like.process_group.checking.backend import is_wanted

__all__ = ["FIRST_TAG", "Flight", "Group", "Transport", "as_bytes", "from_bytes"]

T = TypeVar("T")
# Of the messages of a coordinator; whoever uses the group beside it takes smaller ones.
FIRST_TAG = 1 << 20
TAGS = 1 << 30


class Ending(Protocol):
    """What ends with the groups."""

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""

    def shutdown(self, timeout: float) -> None:
        """End it; from any thread, and as often as may be."""


class ToldToAllError(Exception):
    """Around what kept this rank from a call, of which the others know, and none has begun it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


# Found before data moves, or after all of it has: nobody waits for the other half of the call.
HARMLESS = (
    CollectiveRefusedError,
    NotImplementedError,
    QueueDescriptorsError,
    QueueMemoryError,
    ToldToAllError,
    ValueError,
    TypeError,
)


class Transport:
    """The lanes of one coordinator, for as long as its members are the same.

    Args:
        name: of the coordinator, for messages.
        device: where the coordinator's tensors are.
        place: the caller's rank among the members of both groups, and how many there are.
        cpu_group: takes what the ranks say to each other, and tensors on the CPU unless that is `device`.
        device_group: takes tensors on `device`; without one they go through memory of the CPU.
    """

    def __init__(
        self,
        name: str,
        place: tuple[int, int],
        device: torch.device,
        cpu_group: Group,
        device_group: Group | None,
        options: CoordinatorOptions,
    ) -> None:
        self.name = name
        self.rank, self.world_size = place
        self.device = device
        self.options = options
        self.is_checking = is_wanted(options.check_collectives)
        self.cpu = Lane(cpu_group)
        self._lanes = {"cpu": self.cpu}
        if device_group is not None and device_group is not cpu_group:
            self._lanes[device.type] = Lane(device_group)
        self._counting = threading.Lock()
        self._messages: Counter[tuple[str, int]] = Counter()
        self._ending: list[Ending] = []

    @property
    def waits_on_streams(self) -> bool:
        """Whether a wait for tensors of `device` is a stream's, and not the thread's."""
        return self.device.type != "cpu" and self.device.type in self._lanes

    def over(self, cpu_group: Group, device_group: Group | None) -> Transport:
        """The same members over other groups.

        Raises:
            ValueError: they have another size, or the caller another rank.
        """
        for group in filter(None, (cpu_group, device_group)):
            if (found := (group.rank(), group.size())) != (self.rank, self.world_size):
                raise ValueError(
                    f"the caller is rank {found[0]} of {found[1]} in the given group, and rank {self.rank} "
                    f"of {self.world_size} in {self}"
                )
        place = self.rank, self.world_size
        return Transport(self.name, place, self.device, cpu_group, device_group, self.options)

    @contextlib.contextmanager
    def guard(self, operation: str) -> Iterator[None]:
        """Around one call: errors are told in the coordinator's words.

        Raises:
            GroupCoordinatorError: the members could not communicate; the cause says why.
        """
        try:
            for lane in (self.cpu, *self._lanes.values()):
                lane.check()
            yield
        except ToldToAllError as told:
            raise GroupCoordinatorError(f"{operation} over {self} failed: {told}") from told.error
        except HARMLESS:
            raise
        except BaseException as error:
            self.break_off(f"{operation} over {self} failed: {error!r}")
            if not isinstance(error, Exception):
                raise
            cause = error.__cause__ if isinstance(error, GroupCoordinatorError) else error
            raise GroupCoordinatorError(f"{operation} over {self} failed: {error}") from cause

    def bound(self, handle: Handle[T]) -> Handle[T]:
        """A handle that is good for as long as the members are these: the handle, as they never change."""
        return handle

    def require_present(self, what: str) -> None:
        """Raise if `what`, of these members, is of the past: never, as they never change."""

    def break_off(self, reason: str) -> None:
        """End what is under way, here and at the peers."""
        for lane in (self.cpu, *self._lanes.values()):
            lane.break_off(reason)
        for end in self._ending:
            end.shutdown(timeout=0)

    def when_broken_off(self, end: Ending) -> None:
        """Have something ended when the groups are taken down."""
        self._ending = [*(known for known in self._ending if not known.is_closed), end]

    def agree(self, prepare: Callable[[], tuple[Statement, T]], operation: str) -> tuple[list[Statement], T]:
        """Hear what all ranks say about a call before data moves; all of them get the same verdict.

        Within a `guard`, which takes nothing down for what `prepare` raises.

        Args:
            prepare: gives this rank's statement, and what it makes of its arguments; may refuse them.

        Returns:
            The statements in the order of ranks, and the second value of `prepare`.

        Raises:
            CollectiveMismatchError: they do not belong together.
            Exception: what `prepare` raised, which the guard turns into a GroupCoordinatorError unless it is
                about the arguments; the others get a CollectiveMismatchError.
        """
        try:
            statement, prepared = prepare()
        except Exception as error:
            self._exchange(Statement(operation).refused(error))
            if isinstance(error, HARMLESS):
                raise
            raise ToldToAllError(error) from error
        said = self._exchange(statement)
        check(dict(enumerate(said)))
        return said, prepared

    def agree_if_checking(self, prepare: Callable[[], T], operation: str, terms: Callable[[T], Terms]) -> T:
        """As `agree` where the options ask for it; else the caller's own arguments only are looked at.

        Args:
            terms: what the ranks must agree on, from what `prepare` gives.
        """
        if not self.is_checking:
            return prepare()

        def state() -> tuple[Statement, T]:
            prepared = prepare()
            return Statement(operation, terms(prepared)), prepared

        return self.agree(state, operation)[1]

    def _exchange(self, statement: Statement) -> list[Statement]:
        """By way of rank 0: an all-gather would go round all ranks, and wake one after the other."""
        if self.world_size == 1:
            return [statement]
        everyone = torch.empty(self.world_size * STATEMENT_BYTES, dtype=torch.uint8, device="cpu")
        parts = [everyone[at : at + STATEMENT_BYTES] for at in range(0, len(everyone), STATEMENT_BYTES)]
        is_first = self.rank == 0
        self.cpu.gather(parts if is_first else [], from_bytes(encode(statement)), 0).land()
        said = [decode(part.numpy().tobytes()) for part in parts] if is_first else []
        self.cpu.broadcast(everyone, 0).land()
        return said or [decode(part.numpy().tobytes()) for part in parts]

    def tag(self, direction: str, peer: int) -> int:
        """Of the next message to or from a peer: whoever waits for one cannot get another."""
        with self._counting:
            number = self._messages[direction, peer]
            self._messages[direction, peer] += 1
        return FIRST_TAG + number % TAGS

    # What follows moves tensors that are contiguous and `carried`.

    def carried(self, tensor: Tensor) -> Tensor:
        """The tensor without gaps, where a lane takes it: itself, if it is so already."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        return (plain if plain.device.type in self._lanes else plain.cpu()).contiguous()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device_type: str) -> Tensor:
        """Memory in which a peer's tensor can arrive, for tensors that shall be on a kind of device."""
        return torch.empty(shape, dtype=dtype, device=self.device if device_type in self._lanes else "cpu")

    def delivered(self, tensor: Tensor, device_type: str) -> Tensor:
        """What has arrived for tensors of a kind of device, where they shall be."""
        return tensor.to(self.device) if device_type == self.device.type else tensor

    def lane_terms(self, tensors: Sequence[Tensor]) -> Terms:
        """What the ranks must agree on about where they move tensors."""
        return lane_terms(tensors, self._lanes)

    def allreduce(self, tensor: Tensor) -> Flight:
        """Sum, in place."""
        return self._lane(tensor).start("allreduce", [tensor], AllreduceOptions())

    def broadcast(self, tensor: Tensor, src: int) -> Flight:
        """From `src` to all, in place."""
        return self._lane(tensor).broadcast(tensor, src)

    def allgather(self, output: Tensor, tensor: Tensor) -> Flight:
        """The tensors of all, one after the other, in a flat output."""
        return self._lane(tensor).start("_allgather_base", output, tensor)

    def gather(self, outputs: list[Tensor], tensor: Tensor, dst: int) -> Flight:
        """The tensors of all, in the outputs that `dst` has, and nobody else."""
        return self._lane(tensor).gather(outputs, tensor, dst)

    def alltoall(
        self, output: Tensor, tensor: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Flight:
        """Flat tensors; part `d` of the input goes to rank `d`."""
        return self._lane(tensor).start("alltoall_base", output, tensor, list(out_sizes), list(in_sizes))

    def send(self, tensor: Tensor, dst: int, tag: int) -> Flight:
        """To one rank."""
        return self._lane(tensor).start("send", [tensor], dst, tag)

    def recv(self, tensor: Tensor, src: int, tag: int) -> Flight:
        """From one rank, in place."""
        return self._lane(tensor).start("recv", [tensor], src, tag)

    def barrier(self, timeout: timedelta | None) -> Flight:
        """Over once all have begun it."""
        options = BarrierOptions()
        if timeout is not None:
            options.timeout = timeout
        return self.cpu.start("barrier", options)

    def _lane(self, tensor: Tensor) -> Lane:
        return self._lanes[tensor.device.type]

    def __str__(self) -> str:
        return f"group {self.name} (rank {self.rank} of {self.world_size})"


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, flat: backends move bytes of any dtype, and numbers of few."""
    flat = tensor.reshape(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def from_bytes(data: bytes) -> Tensor:
    """A tensor of bytes of its own, on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
