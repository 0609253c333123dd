"""The public `GroupCoordinator`: all that the processes of a group do together, in one object.

It says which operation is which. How tensors, objects and dicts travel is said in the modules beside this
one, and over which process group in `transport`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

from torch import Tensor, nn

from torchft_like.group_coordinator import expert_parallel, point_to_point
from torchft_like.group_coordinator import tensor_dict as dicts
from torchft_like.group_coordinator.communicating import Communicating
from torchft_like.group_coordinator.creation import ANONYMOUS, Wish
from torchft_like.group_coordinator.graph import GraphCaptureContext, capturing
from torchft_like.group_coordinator.handle import Handle
from torchft_like.group_coordinator.options import CoordinatorOptions
from torchft_like.group_coordinator.tensor_dict import TensorDict
from torchft_like.group_coordinator.transport import Group, Transport


class GroupCoordinator(Communicating):
    """The communication of a group of processes, on the CPU and on their devices.

    All ranks of torch's default group make it together, each with the ranks of all groups, and get the
    one that they are in. `from_groups` makes one over process groups that exist.

    Wherever a rank is passed it is a rank *in the group*. Whatever goes wrong is a ValueError or TypeError
    for wrong arguments, a CollectiveMismatchError where the ranks' arguments do not fit each other, and a
    GroupCoordinatorError with its cause for the rest: nothing waits for a dead member.

    Args:
        group_ranks: the ranks of each group; every rank of the default group occurs once.
        local_rank: the number of the caller's device on its host.
        torch_distributed_backend: of the device group: gloo, nccl or any other that torch knows.
        use_device_communicator: whether there is a device group; if not, tensors go through CPU memory.
        use_message_queue_broadcaster: whether rank 0 broadcasts objects through a MessageQueue.
        group_name: for messages; need not be unique.
        options: the same on every rank.

    Raises:
        ValueError: the groups are not those of the default group's ranks, or there is no such device.
        CollectiveMismatchError: the ranks pass different arguments.
        CollectiveTimeoutError: some ranks did not come; names them.
        GroupCoordinatorError: a group could not be made.
    """

    _dispatched: expert_parallel.Dispatched | None = None

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
        wish = Wish(
            group_ranks,
            local_rank,
            torch_distributed_backend,
            use_device_communicator,
            use_message_queue_broadcaster,
            group_name or ANONYMOUS,
            options or CoordinatorOptions(),
        )
        self._make(wish)
        if use_message_queue_broadcaster and self.world_size > 1:
            try:
                self.mq_broadcaster = self.create_mq_broadcaster()
            except BaseException:
                self.destroy()
                raise

    # -------------------------------------------------------------------- tensor dicts

    def broadcast_tensor_dict(
        self,
        tensor_dict: TensorDict | None = None,
        src: int = 0,
        group: Group | None = None,
        metadata_group: Group | None = None,
    ) -> TensorDict:
        """The dict of rank `src`, which alone need pass it, on every rank: tensors, arrays and plain data.

        Args:
            group: another process group of the same members, for the tensors.
            metadata_group: another one, for what is said about them.

        Raises:
            PlainDataError: it holds something that does not travel; every rank gets an error.
        """
        transport = self._over(group, metadata_group)
        with transport.guard("broadcast_tensor_dict"):
            return dicts.start_broadcasting(transport, tensor_dict, src).land()  # type: ignore[no-any-return]

    def ibroadcast_tensor_dict(
        self,
        tensor_dict: TensorDict | None = None,
        src: int = 0,
        group: Group | None = None,
        metadata_group: Group | None = None,
    ) -> Handle[TensorDict]:
        """As `broadcast_tensor_dict`, but returns once every rank knows what will come."""
        transport = self._over(group, metadata_group)
        with transport.guard("broadcast_tensor_dict"):
            begun = dicts.start_broadcasting(transport, tensor_dict, src)
        return dicts.handle(transport, "broadcast_tensor_dict", begun)

    def send_tensor_dict(
        self,
        tensor_dict: TensorDict,
        dst: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> None:
        """To one rank, the next if left out; returns when the tensors may be changed.

        Args:
            all_gather_group: ranks that all hold the tensors named below: each sends a slice of them to a
                counterpart, and the counterparts gather the slices in a group of theirs.
            all_gather_tensors: True under the names of these tensors. If one of them is not the same on all
                those ranks, the receivers get an error. What is not named is sent whole.
        """
        transport, to = self._with_peer(dst, +1, "dst")
        if to is None:
            return point_to_point.check_alone(transport, dicts.checked_dict(tensor_dict))
        sliced = _slicing(all_gather_group, all_gather_tensors)
        with transport.guard("send_tensor_dict"):
            dicts.start_sending_dict(transport, tensor_dict, to, sliced).land()
        return None

    def isend_tensor_dict(
        self,
        tensor_dict: TensorDict,
        dst: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> Handle[None]:
        """As `send_tensor_dict`, but returns at once; the tensors must stay as they are until it is done."""
        transport, to = self._with_peer(dst, +1, "dst")
        if to is None:
            point_to_point.check_alone(transport, dicts.checked_dict(tensor_dict))
            return transport.bound(Handle("send_tensor_dict", lambda: None, lambda _: None))
        sliced = _slicing(all_gather_group, all_gather_tensors)
        with transport.guard("send_tensor_dict"):
            begun = dicts.start_sending_dict(transport, tensor_dict, to, sliced)
        return dicts.handle(transport, "send_tensor_dict", begun)

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> TensorDict | None:
        """From one rank, the previous if left out; None in a group of one.

        Args:
            all_gather_group: the counterparts of the sender's; the same on all of them.
            all_gather_tensors: not needed: what comes says which tensors are slices.

        Raises:
            CollectiveMismatchError: something else came, or slices of tensors that differ.
        """
        transport, source = self._with_peer(src, -1, "src")
        if source is None:
            return None
        return dicts.received(transport, source, _transport_of(all_gather_group))

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> Handle[TensorDict | None]:
        """As `recv_tensor_dict`, but returns at once; with a device group, when the sender has begun.

        Slices are joined in the handle's `wait`: all ranks of the `all_gather_group` must come to it, and who
        has its slices waits there for the others until the timeout of that group, not that of the `wait`.
        """
        transport, source = self._with_peer(src, -1, "src")
        gathering = _transport_of(all_gather_group)
        if source is None:
            return transport.bound(Handle("recv_tensor_dict", lambda: None, lambda _: None))
        return dicts.receiving(transport, source, gathering)

    # ------------------------------------------------------------------------ the rest

    def barrier(self, timeout: timedelta | float | None = None) -> None:
        """Wait until all members have come.

        Args:
            timeout: seconds or a timedelta; None takes that of the options.

        Raises:
            CollectiveTimeoutError: some did not come in time; names them. The group stays usable, and the
                next call waits for the same barrier again.
            GroupCoordinatorError: a member died; names those that had not come.
        """
        self._all_barriers().wait(timeout)

    def dispatch(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, list[Tensor]]:
        """Bring the tokens of all ranks to all ranks, in the order of ranks; no tokens are fine, too.

        Args:
            hidden_states, router_logits: a row for each token of this rank.
            is_sequence_parallel: whether the ranks hold chunks of the same sequences. Tokens are
                gathered from all ranks of the group either way: see docs/group-coordinator.md.
            extra_tensors: more tensors with a row for each token.

        Returns:
            Both tensors with the rows of all ranks, and the extra ones, if there are any, as a list.
        """
        given = (hidden_states, router_logits, extra_tensors)
        gathered, self._dispatched = expert_parallel.dispatch(self._current(), *given, is_sequence_parallel)
        hidden, logits, *extra = gathered
        return (hidden, logits) if extra_tensors is None else (hidden, logits, extra)

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        """Add up what the ranks made of the tokens of the last `dispatch`; gives the rows of this rank's own.

        Experts that return their input give `world_size` times the input: each rank adds what its own
        experts make of a token, and zero where the token is none of theirs.
        """
        transport = self._current()  # first: it is what ends the epoch of an earlier quorum
        if self._dispatched is not None:
            self._dispatched.among.require_present("dispatch")
        return expert_parallel.combine(transport, hidden_states, self._dispatched, is_sequence_parallel)

    @contextlib.contextmanager
    def graph_capture(
        self, graph_capture_context: GraphCaptureContext | None = None
    ) -> Iterator[GraphCaptureContext]:
        """Around the capture of CUDA graphs: the block runs on a stream on which CUDA captures.

        Args:
            graph_capture_context: of a capture around this one, to share its stream.
        """
        self._current()
        with capturing(self.device, graph_capture_context) as context:
            yield context

    def prepare_communication_buffer_for_model(self, model: nn.Module) -> None:
        """Nothing has to be prepared: the backends register no memory in advance.

        Raises:
            TypeError: it is no module.
        """
        self._current()
        if not isinstance(model, nn.Module):
            raise TypeError(f"a torch.nn.Module was expected, not {type(model).__name__}")


def _slicing(
    all_gather_group: GroupCoordinator | None, all_gather_tensors: Mapping[str, bool] | None
) -> Callable[[], dicts.Slicing | None]:
    """Chosen where the receiver can be told of wrong arguments; raises if the group is not usable."""
    if isinstance(all_gather_group, GroupCoordinator):
        all_gather_group._current()
    return lambda: dicts.slicing(_transport_of(all_gather_group), all_gather_tensors)


def _transport_of(coordinator: GroupCoordinator | None) -> Transport | None:
    if coordinator is None:
        return None
    if not isinstance(coordinator, GroupCoordinator):
        raise TypeError(f"all_gather_group is a GroupCoordinator, not {type(coordinator).__name__}")
    return coordinator._current()
