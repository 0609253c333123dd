"""The public `GroupCoordinator`: all collective work of a group of processes, in one object.

It has vLLM's names and arguments. `torchft_like.communicator` decides how tensors, objects and dicts are
sent.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar, overload

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import BarrierOptions, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from torchft_like.communicator import collectives, messages
from torchft_like.communicator.collectives import Sizes
from torchft_like.communicator.communicator import Communicator, CoordinatorOptions, Group, ranks_in_job
from torchft_like.communicator.handle import LASTING, Epoch, Handle
from torchft_like.communicator.messages import TensorDict
from torchft_like.communicator.tensors import (
    checked_dim,
    checked_rank,
    checked_tensor,
    specifications,
    with_rows,
)
from torchft_like.core.agreement.statements import Statement, Terms, specification
from torchft_like.errors import (
    CollectiveTimeoutError,
    GroupCoordinatorError,
    StaleEpochError,
    StillUnderWayError,
)
from torchft_like.group_coordinator.creation import (
    ANONYMOUS,
    Place,
    destroy_group,
    make_groups,
    unique_name,
)
from torchft_like.message_queue import MessageQueue, members
from torchft_like.process_group.store import SharedStore, without_secret
from torchft_like.runtime.durations import as_timedelta

Tensors = TypeVar("Tensors", Tensor, list[Tensor])
DispatchedTensors = tuple[Any, ...]
TENSOR = "tensor"
ANSWER = timedelta(seconds=5)  # for which a barrier waits for the store that knows the missing ranks
_by_name: weakref.WeakValueDictionary[str, GroupCoordinator] = weakref.WeakValueDictionary()


def coordinator_named(unique_name: str) -> GroupCoordinator:
    """Return the coordinator of this process with that `unique_name`; it may have been given up."""
    if (found := _by_name.get(unique_name)) is None:
        raise GroupCoordinatorError(f"there is no coordinator named {unique_name!r} any more")
    return found


@dataclass(frozen=True)
class Dispatched:
    """What `combine` needs of a dispatch, and the epoch of the members that have the tokens."""

    sizes: Sizes
    is_sequence_parallel: bool
    epoch: Epoch


@dataclass(frozen=True)
class GraphCaptureContext:
    """The place where a CUDA graph is captured.

    Attributes:
        stream: a stream of the coordinator's device, other than the default one, on which CUDA does not
            capture; None on a CPU.
    """

    stream: torch.cuda.Stream | None


class GroupCoordinator:
    """The communication of a group of processes, on the CPU and on their devices.

    All ranks of torch's default group make it together, each with the ranks of all groups, and get the
    one that they are in. `from_groups` makes one over process groups that exist.

    Every rank that is passed is a rank *in the group*. The errors are a ValueError or TypeError for wrong
    arguments, a CollectiveMismatchError where the ranks' arguments do not fit each other, and a
    GroupCoordinatorError with its cause for the rest: no call waits for a dead member.

    Args:
        group_ranks: the ranks of each group; every rank of the default group occurs once.
        local_rank: the number of the caller's device on its host.
        torch_distributed_backend: the backend of the device group: gloo, nccl or any other that torch knows.
        use_device_communicator: whether there is a device group; if not, tensors go through CPU memory.
        use_message_queue_broadcaster: whether rank 0 broadcasts objects through a MessageQueue.
        group_name: the name in messages; it need not be unique.
        options: the same on every rank.

    Attributes:
        group_name: as it was given; the same on all members.
        unique_name: the name of the coordinator in this process.
        ranks: the members' ranks in the whole job, in the order of their ranks in the group.
        rank: the caller's rank in the whole job.
        rank_in_group: the caller's place among `ranks`.
        world_size: the number of members.
        device: the device of received tensors.
        cpu_group: the process group for tensors on the CPU.
        device_group: the process group for tensors on `device`.
        mq_broadcaster: the queue through which rank 0 broadcasts objects, if there is one.

    Raises:
        ValueError: the groups are not those of the default group's ranks, or there is no such device.
        CollectiveMismatchError: the ranks pass different arguments.
        CollectiveTimeoutError: some ranks did not come; the text names them.
        GroupCoordinatorError: a group could not be made.
    """

    group_name: str
    unique_name: str
    ranks: list[int]
    rank: int
    rank_in_group: int
    world_size: int
    local_rank: int
    device: torch.device
    cpu_group: Group
    device_group: Group
    options: CoordinatorOptions

    mq_broadcaster: MessageQueue | None = None
    _communicator: Communicator | None = None
    _barriers: Barriers | None = None
    _store: Store | None = None
    _owns_groups = False
    _has_device_communicator = True
    _all_ranks: list[list[int]] | None = None
    _dispatched: Dispatched | None = None

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        *,
        options: CoordinatorOptions | None = None,
    ) -> None:
        self.options = options or CoordinatorOptions()
        self.group_name = group_name or ANONYMOUS
        self.local_rank = local_rank
        place = make_groups(
            group_ranks,
            local_rank,
            torch_distributed_backend,
            use_device_communicator,
            use_message_queue_broadcaster,
            self.group_name,
            self.options,
        )
        self._owns_groups = True
        self._has_device_communicator = bool(use_device_communicator)
        self._adopt(place)
        self._all_ranks = [list(ranks) for ranks in group_ranks]
        if use_message_queue_broadcaster and self.world_size > 1:
            try:
                self.mq_broadcaster = self.create_mq_broadcaster()
            except BaseException:
                self.destroy()
                raise

    @classmethod
    def from_groups(
        cls,
        cpu_group: Group,
        device_group: Group | None = None,
        *,
        device: torch.device | str = "cpu",
        group_name: str | None = None,
        ranks: Sequence[int] | None = None,
        store: Store | None = None,
        options: CoordinatorOptions | None = None,
    ) -> Self:
        """Make a coordinator over process groups that exist: torch's own or any of ours, registered or not.

        The groups stay their owner's: `destroy` leaves them alone. If they are configured anew, they have
        other members, and the coordinator refuses to go on.

        Args:
            cpu_group: takes CPU tensors.
            device_group: takes tensors on `device`; the CPU group does, if that is a CPU.
            ranks: the members' ranks in the whole job; None for those that the group, or torch, knows, or
                else 0, 1, 2...
            store: a store that all members reach, so that barriers can name missing ranks; several
                coordinators in one store need names that differ. Groups of ours that were configured, and
                groups that torch made, bring one.

        Raises:
            ValueError: the groups do not fit each other, or `ranks`.
        """
        if device_group is not None and (cpu_group.rank(), cpu_group.size()) != (
            device_group.rank(),
            device_group.size(),
        ):
            raise ValueError(f"the caller's place differs in the two groups: {cpu_group} and {device_group}")
        known = ranks_in_job(cpu_group) if ranks is None else list(ranks)
        if len(known) != cpu_group.size():
            raise ValueError(f"{len(known)} ranks for a group of {cpu_group.size()}")
        made = cls.__new__(cls)
        made._store = store
        made.options, made.group_name = options or CoordinatorOptions(), group_name or ANONYMOUS
        place = torch.device(device)
        made.local_rank = place.index or 0
        name = unique_name(made.group_name)
        made._adopt(Place(name, cpu_group.rank(), known, place, cpu_group, device_group))
        return made

    @property
    def group_ranks(self) -> list[list[int]]:
        """The ranks in the whole job of each group that was made with this one."""
        return self._all_ranks or [self.ranks]

    @property
    def device_communicator(self) -> Self | None:
        """The object that moves tensors, which is the coordinator itself; None where vLLM has none."""
        return self if self._has_device_communicator and self.world_size > 1 else None

    @property
    def first_rank(self) -> int:
        """The rank in the whole job of the first member."""
        return self._member(0)

    @property
    def last_rank(self) -> int:
        """The rank in the whole job of the last member."""
        return self._member(-1)

    @property
    def is_first_rank(self) -> bool:
        """Whether the caller is the first member."""
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        """Whether the caller is the last member."""
        return 0 <= self.rank_in_group == self.world_size - 1

    @property
    def next_rank(self) -> int:
        """The rank in the whole job of the member after the caller; of the first, after the last."""
        return self._member(self.rank_in_group + 1)

    @property
    def prev_rank(self) -> int:
        """The rank in the whole job of the member before the caller; of the last, before the first."""
        return self._member(self.rank_in_group - 1)

    def _member(self, place: int) -> int:
        """Return the rank in the whole job of the member at a place, counted round."""
        if not self.ranks:
            raise GroupCoordinatorError(f"{self!r} has no members now")
        return self.ranks[place % len(self.ranks)]

    # ------------------------------------------------------------------------- tensors

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum over all ranks in a new tensor; `input_` stays as it is."""
        if torch.compiler.is_compiling():
            return _compiled_all_reduce(input_, self.unique_name)  # type: ignore[no-any-return]
        return collectives.all_reduce(self._current(), input_)

    _all_reduce_out_place = all_reduce

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Join the tensors of all ranks, which have one shape, along `dim`."""
        if torch.compiler.is_compiling():
            return _compiled_all_gather(input_, dim, self.unique_name, self.world_size)  # type: ignore[no-any-return]
        return collectives.all_gather(self._current(), input_, dim)

    _all_gather_out_place = all_gather

    def all_gatherv(self, input_: Tensors, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensors:
        """Join the tensors of all ranks along `dim`, in which their sizes may differ.

        Args:
            input_: a tensor, or a list of tensors with the same number of rows.
            sizes: the rows of each rank; None lets the ranks tell each other.
        """
        joined, _ = collectives.all_gatherv(self._current(), lambda: _listed(input_), dim, sizes)
        return joined if isinstance(input_, list) else joined[0]

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's part of the sum over all ranks, which is split evenly along `dim`."""
        if torch.compiler.is_compiling():
            return _compiled_reduce_scatter(input_, dim, self.unique_name, self.world_size)  # type: ignore[no-any-return]
        return collectives.reduce_scatter(self._current(), input_, dim)

    _reduce_scatter_out_place = reduce_scatter

    def reduce_scatterv(self, input_: Tensors, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensors:
        """Return this rank's rows along `dim` of the sum over all ranks.

        Args:
            input_: a tensor, or a list of tensors with the same number of rows; the same shapes everywhere.
            sizes: the rows that each rank gets; None shares them out as evenly as possible; the first ranks
              get one more.
        """
        parts = collectives.reduce_scatterv(self._current(), _listed(input_), dim, lambda: sizes)
        return parts if isinstance(input_, list) else parts[0]

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Join the tensors of all ranks, of one shape, along `dim` on rank `dst`; others get None."""
        return collectives.gather(self._current(), input_, dst, dim)

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor:
        """Overwrite `input_` with that of rank `src`, and return it."""
        return collectives.broadcast(self._current(), input_, src)

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Send a tensor to one rank, by default the next; return when the caller may change it.

        In a group of one the tensor goes nowhere.
        """
        communicator, to = self._with_peer(dst, +1, "dst")

        def prepare() -> tuple[Statement, object]:
            return Statement(TENSOR, inputs=specifications([checked_tensor(tensor)])), tensor

        with communicator.guard("send"):
            messages.start_sending(communicator, to, TENSOR, prepare).wait()

    def recv(self, size: Sequence[int] | int, dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Receive a tensor of that shape from one rank, by default the previous; it is on `device`.

        In a group of one the result is zeros.

        Args:
            size: the shape; a number is the shape of a tensor with one dimension.

        Raises:
            CollectiveMismatchError: another shape or dtype came, or no tensor.
        """
        communicator, source = self._with_peer(src, -1, "src")
        shape = torch.Size([size] if isinstance(size, int) else size)
        if source is None:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        expected = Statement(TENSOR, inputs=(specification(dtype, shape),))
        with communicator.guard("recv"):
            tag = communicator.tag("from", source)
            tensor: Tensor = messages.start_receiving(communicator, source, tag, TENSOR, expected).wait()
            return tensor.to(communicator.device)

    # ------------------------------------------------------------------------- objects

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Return on every rank the object of rank `src`; the other ranks need not pass one.

        Raises:
            PlainDataError: it holds a value that cannot be sent; every rank gets an error.
        """
        communicator = self._current()  # first, because this call ends the epoch of an earlier queue
        if self.mq_broadcaster is not None and src == 0:
            return members.broadcast_object(communicator, self.mq_broadcaster, obj)
        return messages.broadcast_object(communicator, obj, src)

    def broadcast_object_list(
        self, obj_list: list[Any], src: int = 0, group: Group | None = None
    ) -> list[Any]:
        """Overwrite the objects in the list with those of rank `src`, and return it.

        Args:
            obj_list: of the same length on every rank.
            group: another process group of the same members.
        """
        return messages.broadcast_object_list(self._over(group, None), obj_list, src)

    def send_object(self, obj: Any, dst: int) -> None:
        """Send an object to one rank."""
        communicator, to = self._with_peer(dst, +1, "dst")
        messages.send_object(communicator, obj, to)

    def recv_object(self, src: int) -> Any:
        """Receive an object from one rank; in a group of one the result is None."""
        communicator, source = self._with_peer(src, -1, "src")
        return None if source is None else messages.recv_object(communicator, source)

    # -------------------------------------------------------------------------- queues

    def create_mq_broadcaster(
        self, writer_rank: int = 0, external_writer_handle: object = None, blocking: bool = True
    ) -> MessageQueue:
        """Open the caller's end of a queue that one member writes and all others read; it ends with the
        groups.

        Args:
            external_writer_handle: on that member, the handle of a queue whose writer is outside the group:
                then all members read it, each as the reader of its rank in the group.
            blocking: wait until all have joined; otherwise call `wait_until_ready` before it is used.
        """
        return members.create_broadcaster(self._current(), writer_rank, external_writer_handle, blocking)

    def create_single_reader_mq_broadcasters(
        self, reader_rank_in_group: int = 0, blocking: bool = False
    ) -> tuple[MessageQueue, list[object]]:
        """Make a queue that the caller writes, which ends with the groups; one member gets the handles of
        all.

        That member, or another process for it, opens each handle as reader 0.

        Args:
            blocking: must be False: no reader can have opened the queues before the call returns.

        Returns:
            The queue; and on the reader the handles in the order of ranks, its own among them.
        """
        return members.create_single_reader(self._current(), lambda: reader_rank_in_group, blocking)

    # -------------------------------------------------------------------- tensor dicts

    def broadcast_tensor_dict(
        self,
        tensor_dict: TensorDict | None = None,
        src: int = 0,
        group: Group | None = None,
        metadata_group: Group | None = None,
    ) -> TensorDict:
        """Return on every rank the dict of rank `src`, with tensors, arrays and plain data; the other ranks
        need not pass one.

        Args:
            group: another process group of the same members, for the tensors.
            metadata_group: another process group of the same members, for the description of the tensors.

        Raises:
            PlainDataError: it holds a value that cannot be sent; every rank gets an error.
        """
        communicator = self._over(group, metadata_group)
        with communicator.guard("broadcast_tensor_dict"):
            return messages.start_broadcasting_dict(communicator, tensor_dict, src).wait()  # type: ignore[no-any-return]

    def ibroadcast_tensor_dict(
        self,
        tensor_dict: TensorDict | None = None,
        src: int = 0,
        group: Group | None = None,
        metadata_group: Group | None = None,
    ) -> Handle[TensorDict]:
        """Broadcast a dict as `broadcast_tensor_dict` does; return once all ranks know what will come."""
        communicator = self._over(group, metadata_group)
        with communicator.guard("broadcast_tensor_dict"):
            begun = messages.start_broadcasting_dict(communicator, tensor_dict, src)
        return messages.handle_of(communicator, "broadcast_tensor_dict", begun)

    def send_tensor_dict(
        self,
        tensor_dict: TensorDict,
        dst: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> None:
        """Send a dict to one rank, by default the next; return when the caller may change the tensors.

        Args:
            all_gather_group: ranks that all hold the tensors named below: each sends a slice of them to a
                counterpart, and the counterparts gather the slices in a group of their own.
            all_gather_tensors: True under the names of these tensors. If one of them is not the same on all
                those ranks, the receivers get an error. Tensors that are not named are sent whole.
        """
        communicator, to = self._with_peer(dst, +1, "dst")
        find_group = _finding(all_gather_group)
        with communicator.guard("send_tensor_dict"):
            messages.start_sending_dict(communicator, tensor_dict, to, find_group, all_gather_tensors).wait()

    def isend_tensor_dict(
        self,
        tensor_dict: TensorDict,
        dst: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> list[Handle[None]]:
        """Send a dict as `send_tensor_dict` does, but return at once; the tensors must stay as they are until
        it is sent.

        Returns:
            One handle; none in a group of one.
        """
        communicator, to = self._with_peer(dst, +1, "dst")
        find_group = _finding(all_gather_group)
        with communicator.guard("send_tensor_dict"):
            begun = messages.start_sending_dict(communicator, tensor_dict, to, find_group, all_gather_tensors)
        return [] if to is None else [messages.handle_of(communicator, "send_tensor_dict", begun)]

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> TensorDict | None:
        """Receive a dict from one rank, by default the previous; in a group of one the result is None.

        Args:
            all_gather_group: the counterparts of the sender's; the same on all of them.
            all_gather_tensors: not needed: the message says which tensors are slices.

        Raises:
            CollectiveMismatchError: something else came, or slices of tensors that differ.
        """
        communicator, source = self._with_peer(src, -1, "src")
        if source is None:
            return None
        return messages.receive_dict(communicator, source, _communicator_of(all_gather_group))

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> tuple[TensorDict | None, list[Handle[TensorDict]], list[Callable[[], None]]]:
        """Receive a dict as `recv_tensor_dict` does, but return at once; with a device group, when the sender
        has begun.

        Slices are joined in the handle's `wait`: all ranks of the `all_gather_group` must come to it, and a
        rank that has its slices waits there for the others until the timeout of that group, not that of the
        `wait`.

        Returns:
            A dict, which is empty until the handle's `wait` has put everything into it; the handle; and an
            empty list of functions to call afterwards. In a group of one: None, and no handle.
        """
        communicator, source = self._with_peer(src, -1, "src")
        gathering = _communicator_of(all_gather_group)
        if source is None:
            return None, [], []
        arriving: TensorDict = {}
        return arriving, [messages.start_receiving_dict(communicator, source, gathering, arriving)], []

    # ------------------------------------------------------------------------ the rest

    def barrier(self, timeout: timedelta | float | None = None) -> None:
        """Wait until all members have come.

        Args:
            timeout: seconds or a timedelta; None takes that of the options.

        Raises:
            CollectiveTimeoutError: some members did not come in time; the text names them. The group stays
                usable, and the next call waits for the same barrier again.
            CollectiveMismatchError: some members made another call, over a group that compares calls.
            GroupCoordinatorError: a member died; the text names those that had not come.
            ValueError: the timeout is not positive.
        """
        communicator = self._current()
        if self._barriers is None:
            self._barriers = Barriers(communicator, self._store, self.group_name)
        self._barriers.wait(timeout)

    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> DispatchedTensors:
        """Bring the tokens of all ranks to all ranks, in the order of ranks; a rank may have no tokens.

        Args:
            hidden_states, router_logits: a row for each token of this rank.
            is_sequence_parallel: whether the ranks hold chunks of the same sequences. Tokens are
                gathered from all ranks of the group either way: see docs/group-coordinator.md.
            extra_tensors: more tensors with a row for each token.

        Returns:
            Both tensors with the rows of all ranks, and the extra ones, if there are any, as a list.
        """
        return self._dispatch([hidden_states, router_logits], is_sequence_parallel, extra_tensors)

    @overload
    def dispatch(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> DispatchedTensors: ...
    @overload
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> DispatchedTensors: ...
    def dispatch(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> DispatchedTensors:
        """Dispatch as `dispatch_router_logits` does; or with the experts that a router has chosen for each
        token.

        Args:
            topk_weights, topk_ids: a row for each token of this rank: the weights of its experts, and their
            numbers.

        Returns:
            The tensors with the rows of all ranks, two or three, and the extra ones as a list.
        """
        if "topk_ids" in kwargs or (len(args) > 1 and isinstance(args[1], Tensor)):
            return self._dispatch_chosen(hidden_states, *args, **kwargs)
        return self.dispatch_router_logits(hidden_states, *args, **kwargs)

    def _dispatch_chosen(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> DispatchedTensors:
        return self._dispatch([hidden_states, topk_weights, topk_ids], is_sequence_parallel, extra_tensors)

    def _dispatch(
        self, named: list[Tensor], is_sequence_parallel: bool, extra_tensors: list[Tensor] | None
    ) -> DispatchedTensors:
        communicator = self._current()

        def tensors() -> Sequence[Tensor]:
            if not (extra_tensors is None or isinstance(extra_tensors, list | tuple)):
                raise TypeError(f"extra_tensors is a list of tensors, not a {type(extra_tensors).__name__}")
            return [*named, *(extra_tensors or ())]

        gathered, sizes = collectives.all_gatherv(
            communicator, tensors, 0, None, "dispatch", lambda: _experts_terms(is_sequence_parallel)
        )
        self._dispatched = Dispatched(sizes, bool(is_sequence_parallel), communicator.epoch)
        own, extra = gathered[: len(named)], gathered[len(named) :]
        return tuple(own) if extra_tensors is None else (*own, extra)

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        """Add up what the ranks made of the tokens of the last `dispatch`; return the rows of this rank's
        own.

        Experts that return their input give `world_size` times the input: each rank adds what its own
        experts make of a token, and zero where the token is none of theirs.
        """
        communicator = self._current()  # first, because this call ends the epoch of an earlier quorum
        dispatched = self._dispatched
        if dispatched is not None:
            dispatched.epoch.require_present("dispatch")

        def sizes() -> Sizes:
            if dispatched is None:
                raise ValueError("combine comes after dispatch: there was none")
            if dispatched.is_sequence_parallel != bool(is_sequence_parallel):
                raise ValueError(
                    f"is_sequence_parallel is {is_sequence_parallel}: it was "
                    f"{dispatched.is_sequence_parallel} in dispatch"
                )
            return dispatched.sizes

        (combined,) = collectives.reduce_scatterv(
            communicator, [hidden_states], 0, sizes, "combine", lambda: _experts_terms(is_sequence_parallel)
        )
        return combined

    @contextlib.contextmanager
    def graph_capture(
        self, graph_capture_context: GraphCaptureContext | None = None
    ) -> Iterator[GraphCaptureContext]:
        """Run the block, which captures CUDA graphs, on a stream on which CUDA captures.

        The block comes after all work of the present stream, and before its later work.

        Args:
            graph_capture_context: the context of a capture around this one, to share its stream; None for a
              new one.
        """
        self._current()
        context = graph_capture_context or GraphCaptureContext(None)
        if self.device.type != "cuda":
            yield context
            return
        if context.stream is None:
            context = GraphCaptureContext(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        outer, stream = torch.cuda.current_stream(self.device), context.stream
        if stream is None or stream == outer:
            yield context
            return
        stream.wait_stream(outer)
        try:
            with torch.cuda.stream(stream):
                yield context
        finally:
            outer.wait_stream(stream)

    def prepare_communication_buffer_for_model(self, model: nn.Module) -> None:
        """Check the model, and prepare nothing: the backends register no memory in advance.

        Raises:
            TypeError: it is no module.
        """
        self._current()
        if not isinstance(model, nn.Module):
            raise TypeError(f"a torch.nn.Module was expected, not {type(model).__name__}")

    def destroy(self) -> None:
        """Release the groups and queues that the coordinator made. Further calls do nothing."""
        communicator, self._communicator, self._barriers = self._communicator, None, None
        if communicator is None:
            return
        with contextlib.ExitStack() as undo:  # all of it, the last first, even if an exception interrupts one
            if self._owns_groups:
                for group in {id(group): group for group in (self.cpu_group, self.device_group)}.values():
                    undo.callback(destroy_group, group)
            undo.callback(communicator.end_queues)

    # ------------------------------------------------------------------ which ranks a call is between

    def _over(self, group: Group | None, metadata_group: Group | None) -> Communicator:
        """Return the communicator of a call that may name other groups of the same members."""
        if group is None and metadata_group is None:
            return self._current()
        return self._current().among(metadata_group or group, group)

    def _with_peer(self, rank: int | None, step: int, name: str) -> tuple[Communicator, int | None]:
        """Return the communicator of a call to one other rank, and that rank; None in a group of one."""
        communicator = self._current()  # it may have other members than at the last call
        size = communicator.world_size
        found = checked_rank((communicator.rank + step) % size if rank is None else rank, size, name)
        if size == 1:
            return communicator, None
        if found == communicator.rank:
            raise ValueError(f"{name} {found} is the caller itself: a rank does not send to itself")
        return communicator, found

    def _adopt(self, place: Place, epoch: Epoch = LASTING) -> Communicator:
        """Have the members that the groups of this place join."""
        self.unique_name, self.rank_in_group, self.ranks, self.device, self.cpu_group, device_group = place
        self.device_group = self.cpu_group if device_group is None else device_group
        self.world_size, self.rank = len(self.ranks), self.ranks[self.rank_in_group]
        communicator = self._communicator = Communicator.over(
            self.unique_name, self.device, (self.cpu_group, device_group), self.options, epoch
        )
        _by_name[self.unique_name] = self
        return communicator

    def _current(self) -> Communicator:
        """Return the communicator of the next call; a GroupCoordinatorError says why there is none."""
        if self._communicator is None:
            raise GroupCoordinatorError(f"the coordinator {self.unique_name} was destroyed")
        return self._communicator

    def __repr__(self) -> str:
        state = "destroyed" if self._communicator is None else f"on {self.device}"
        return (
            f"<{type(self).__name__} {self.unique_name}: rank {self.rank_in_group} of {self.ranks}, {state}>"
        )


def _finding(all_gather_group: GroupCoordinator | None) -> Callable[[], Communicator | None]:
    """Return a function that finds the ranks of a group, called where a receiver can be told of a wrong one.

    This raises an error if the group is not usable.
    """
    if isinstance(all_gather_group, GroupCoordinator):
        all_gather_group._current()
    return lambda: _communicator_of(all_gather_group)


def _communicator_of(coordinator: GroupCoordinator | None) -> Communicator | None:
    if coordinator is None:
        return None
    if not isinstance(coordinator, GroupCoordinator):
        raise TypeError(f"all_gather_group is a GroupCoordinator, not {type(coordinator).__name__}")
    return coordinator._current()


def _experts_terms(is_sequence_parallel: bool) -> Terms:
    return (("is_sequence_parallel", str(bool(is_sequence_parallel))),)


def _listed(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    return tensors if isinstance(tensors, list) else [tensors]


# ------------------------------------------------------------------------- torch.compile
#
# A graph cannot hold a coordinator. It holds the coordinator's name, by which an operator finds it when it
# runs, and, if the shape of a result depends on it, the number of members: torch compiles anew if that has
# changed. An operator returns new tensors and changes none, as torch demands.


@torch.library.custom_op("torchft_like::all_reduce", mutates_args=())
def _compiled_all_reduce(tensor: Tensor, coordinator: str) -> Tensor:
    return collectives.all_reduce(coordinator_named(coordinator)._current(), tensor)


@torch.library.custom_op("torchft_like::all_gather", mutates_args=())
def _compiled_all_gather(tensor: Tensor, dim: int, coordinator: str, world_size: int) -> Tensor:
    return collectives.all_gather(_with_members(coordinator, world_size), tensor, dim)


@torch.library.custom_op("torchft_like::reduce_scatter", mutates_args=())
def _compiled_reduce_scatter(tensor: Tensor, dim: int, coordinator: str, world_size: int) -> Tensor:
    return collectives.reduce_scatter(_with_members(coordinator, world_size), tensor, dim)


@_compiled_all_reduce.register_fake
def _(tensor: Tensor, coordinator: str) -> Tensor:
    return tensor.new_empty(tensor.shape)


@_compiled_all_gather.register_fake
def _(tensor: Tensor, dim: int, coordinator: str, world_size: int) -> Tensor:
    at = checked_dim(dim, tensor.dim())
    return tensor.new_empty(with_rows(tensor.shape, at, tensor.shape[at] * world_size))


@_compiled_reduce_scatter.register_fake
def _(tensor: Tensor, dim: int, coordinator: str, world_size: int) -> Tensor:
    at = checked_dim(dim, tensor.dim())
    return tensor.new_empty(with_rows(tensor.shape, at, tensor.shape[at] // world_size))


def _with_members(coordinator: str, world_size: int) -> Communicator:
    """Return the members of a coordinator, if they are as many as the graph was compiled for."""
    communicator = coordinator_named(coordinator)._current()
    if communicator.world_size != world_size:  # a Manager's quorum may have changed them
        # Other members may have entered theirs with the new members.
        with communicator.guard("a compiled graph"):
            raise GroupCoordinatorError(f"it was entered with {world_size} members: enter it again")
    return communicator


T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Barriers:
    """The barriers of the members of one communicator, which name the missing ranks.

    The ranks meet in a barrier of the process group, which notices at once when one of them dies. Beside it
    each rank notes in a store, by default the one in which the members of the group met, that it has come,
    and a rank that waits in vain reads there which ranks have not. A barrier whose time is up stays open: a
    rank that comes late finds it complete, and the group stays usable. A rank that calls again, after a
    timeout or an interrupt, waits for the same barrier again: otherwise the ranks would be one off.
    """

    def __init__(self, communicator: Communicator, store: Store | None, name: str) -> None:
        self._communicator = communicator
        self._pending: Handle[None] | None = None
        self._number = 0  # of the caller's last barrier; each member has its own in the store, under its rank
        if communicator.world_size > 1 and store is None:
            control = communicator.control
            if (address := control.store_address()) is None:
                store = c10d._world.pg_map.get(control.group, (None, None))[1]
            else:
                try:
                    # torch's client would wait for the answer of a host that is silent, whatever its limit.
                    ours = SharedStore(address, min(ANSWER, as_timedelta(communicator.options.timeout)))
                    ours.connect(insists=False)
                    store = ours
                except (RuntimeError, ValueError) as error:
                    reason = without_secret(str(error))
                    _logger.warning("the barriers of %s cannot name who is missing: %s", communicator, reason)
        self._shared = store  # one in Python ends with its last reference, and torch's part holds none
        self._store = store and PrefixStore(f"coordinator/{name}/barrier", store)

    def wait(self, timeout: timedelta | float | None) -> None:
        """Wait as `GroupCoordinator.barrier` does; after a CollectiveTimeoutError, for the same barrier."""
        members = self._communicator
        limit = as_timedelta(members.options.timeout if timeout is None else timeout)
        if members.world_size == 1:
            return
        try:
            if self._pending is None:
                self._note(self._number + 1)
                with members.guard("barrier"):
                    options = BarrierOptions()
                    options.timeout = limit + as_timedelta(members.options.timeout)
                    started = members.control.start("barrier", options)
                self._pending = Handle("barrier", members.guard("barrier")(started.wait))
            self._pending.wait(limit.total_seconds())
        except StillUnderWayError:
            missing = self._missing()
            waiting = {rank: ("barrier",) for rank in range(members.world_size) if rank not in missing}
            raise CollectiveTimeoutError(limit.total_seconds(), missing, waiting) from None
        except StaleEpochError:
            raise
        except GroupCoordinatorError as error:
            self._pending = None
            absent = ", ".join(f"rank {rank}" for rank in self._missing())
            who = f"not there yet: {absent}" if absent else "all had come"
            raise GroupCoordinatorError(f"{error}; {who}") from error.__cause__
        except Exception:  # all ranks refused it: there was no such barrier
            self._pending = None
            self._note(self._number - 1)
            raise
        self._pending = None

    def _note(self, number: int) -> None:
        self._number = number
        self._ask(lambda store: store.set(str(self._communicator.rank), str(number)))

    def _missing(self) -> list[int]:
        """Return the ranks that have not come to the caller's barrier; none, if there is no store to ask."""

        def is_missing(store: Store, rank: int) -> bool:
            key = str(rank)
            return not (store.check([key]) and int(store.get(key)) >= self._number)

        others = [rank for rank in range(self._communicator.world_size) if rank != self._communicator.rank]
        return self._ask(lambda store: [rank for rank in others if is_missing(store, rank)]) or []

    def _ask(self, question: Callable[[Store], T]) -> T | None:
        if self._store is None:
            return None
        try:
            return question(self._store)
        except (RuntimeError, ValueError) as error:  # the store went with the process that served it
            _logger.warning("the store of the barriers does not answer: %s", without_secret(str(error)))
            return None
