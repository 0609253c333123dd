"""Dicts of tensors and plain data, to one rank or to all, and slices of tensors that several ranks hold.

An all-gather group spares bytes where each of its ranks sends the same tensor to a counterpart: each sends
a slice, and the receivers gather the slices among themselves. That is right only if the tensors are
replicated. So it is done for those that the sender declares to be, and a slice carries a digest of the
whole tensor that it was cut from: the receivers compare the digests before they gather.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchft_like.divergence.words import word_sum
from torchft_like.group_coordinator.arguments import Terms, checked_tensor
from torchft_like.group_coordinator.handle import Handle
from torchft_like.group_coordinator.messages import Begun, start_broadcast, start_receiving, start_sending
from torchft_like.group_coordinator.plans import checked_rank, even_sizes
from torchft_like.group_coordinator.statements import Statement
from torchft_like.group_coordinator.transport import HARMLESS, Transport, as_bytes
from torchft_like.group_coordinator.variable import Gathering

TENSOR_DICT = "tensor dict"
TensorDict = dict[str, Any]


class Slicing(NamedTuple):
    """Which tensors of a dict the ranks of a group send slices of, because each of them has the whole."""

    transport: Transport
    declared: frozenset[str]


# Of each slice in a dict, by name: part, parts, the whole's shape and digest.
Slices = dict[str, tuple[int, int, list[int], int]]
# Gives what has come, or raises why that is nothing: the counterparts must hear of it, and not wait.
Received = Callable[[], tuple[TensorDict, Slices]]


def slicing(transport: Transport | None, all_gather_tensors: Mapping[str, bool] | None) -> Slicing | None:
    """What the arguments of a call ask for; None where that is nothing."""
    if not isinstance(all_gather_tensors, Mapping | None):
        raise TypeError(f"all_gather_tensors is a dict of bools, not a {type(all_gather_tensors).__name__}")
    declared = frozenset(name for name, is_replicated in (all_gather_tensors or {}).items() if is_replicated)
    if transport is None or transport.world_size == 1 or not declared:
        return None
    return Slicing(transport, declared)


def checked_dict(value: object) -> TensorDict:
    """The value, if it is a dict with names as keys.

    Raises:
        TypeError: it is not.
    """
    if type(value) is not dict or any(type(key) is not str for key in value):
        raise TypeError(f"a dict whose keys are str was expected, not {type(value).__name__}")
    return value


def start_broadcasting(transport: Transport, tensor_dict: TensorDict | None, src: int) -> Begun:
    """Begin to bring the dict of rank `src` to all; returns when all ranks know what will come."""

    def terms() -> Terms:
        checked_rank(src, transport.world_size, "src")
        if transport.rank == src:
            checked_dict(tensor_dict)
        return (("src", str(src)),)

    return start_broadcast(transport, "broadcast_tensor_dict", lambda: tensor_dict, src, terms)


def start_sending_dict(
    transport: Transport, tensor_dict: TensorDict, dst: int, choose_slicing: Callable[[], Slicing | None]
) -> Begun:
    """Begin to send; the tensors must stay as they are until it has landed.

    Args:
        choose_slicing: gives what is sent in slices; may refuse.
    """

    def prepare() -> tuple[Terms, object]:
        checked_dict(tensor_dict)
        sliced = choose_slicing()
        return (), (tensor_dict, {}) if sliced is None else _cut(tensor_dict, sliced)

    return start_sending(transport, dst, TENSOR_DICT, prepare)


def receiving(transport: Transport, src: int, gathered_by: Transport | None) -> Handle[TensorDict | None]:
    """Begin to receive. On a CPU nothing is waited for: the sender may begin when it likes."""
    tag = transport.tag("from", src)

    def settle(received: Any) -> TensorDict | None:
        return joined(received, gathered_by)

    text = f"recv_tensor_dict over {transport}"
    if not transport.waits_on_streams:
        return transport.bound(Handle(text, lambda: _received(transport, src, tag), settle))

    with _missed_by(gathered_by), transport.guard("recv_tensor_dict"):
        begun = start_receiving(transport, src, tag, TENSOR_DICT)
    finish = _landing(transport, "recv_tensor_dict", begun)
    return transport.bound(Handle(text, lambda: _outcome(finish), settle, begun.is_over))


def received(transport: Transport, src: int, gathered_by: Transport | None) -> TensorDict:
    """What `src` sends next."""
    return joined(_received(transport, src, transport.tag("from", src)), gathered_by)


def handle(transport: Transport, operation: str, begun: Begun) -> Handle[Any]:
    """A handle of a message that is under way to all, or from here to one."""
    watched = begun.is_over if transport.waits_on_streams else None
    finish = _landing(transport, operation, begun)
    return transport.bound(Handle(f"{operation} over {transport}", finish, lambda landed: landed, watched))


def _landing(transport: Transport, operation: str, begun: Begun) -> Callable[[], Any]:
    def land() -> object:
        with transport.guard(operation):
            return begun.land()

    return land


def _received(transport: Transport, src: int, tag: int) -> Received:
    def receive() -> Any:
        with transport.guard("recv_tensor_dict"):
            return start_receiving(transport, src, tag, TENSOR_DICT).land()

    return _outcome(receive)


def _outcome(receive: Callable[[], tuple[TensorDict, Slices]]) -> Received:
    outcome: Future[tuple[TensorDict, Slices]] = Future()
    try:
        outcome.set_result(receive())
    except BaseException as error:  # noqa: BLE001 - it is raised where the counterparts can hear of it
        outcome.set_exception(error)
    return outcome.result


@contextlib.contextmanager
def _missed_by(gathered_by: Transport | None) -> Iterator[None]:
    """Around what a dict should come from: if none comes, the counterparts do not wait for its slices."""
    try:
        yield
    except HARMLESS:  # the counterparts hear of it where slices are joined
        raise
    except BaseException as error:
        if gathered_by is not None:
            gathered_by.break_off(f"a dict with slices to gather here did not come: {error!r}")
        raise


def joined(received: Received, transport: Transport | None) -> TensorDict:
    """A dict as it came, with whole tensors for the slices that the ranks of an all-gather group hold.

    Raises:
        ValueError: there are slices, and the group is not the one they were made for.
        CollectiveMismatchError: the slices are not of the same tensors: they were not replicated. Or a
            sender has refused to send, on all ranks of the group.
    """
    if transport is None:
        return _unsliced(*received())
    with _missed_by(transport), contextlib.suppress(*HARMLESS):
        received()

    def prepare() -> tuple[Statement, tuple[TensorDict, Slices]]:
        tensor_dict, slices = received()
        for name, (part, parts, _, _) in slices.items():
            if (part, parts) != (transport.rank, transport.world_size):
                raise ValueError(
                    f"slice {part} of {parts} of {name!r} came to rank {transport.rank} of "
                    f"{transport.world_size} of the all_gather_group"
                )
        wholes = tuple((name, _whole_text(tensor_dict[name], slices[name])) for name in sorted(slices))
        return Statement("recv_tensor_dict", wholes), (tensor_dict, slices)

    with transport.guard("recv_tensor_dict"):
        _, (tensor_dict, slices) = transport.agree(prepare, "recv_tensor_dict")
        gathered = {
            name: _start_joining(transport, tensor_dict[name], slices[name][2]) for name in sorted(slices)
        }
        for name, gathering in gathered.items():
            tensor_dict[name] = gathering.land().view(slices[name][2])
    return tensor_dict


def _unsliced(tensor_dict: TensorDict, slices: Slices) -> TensorDict:
    if slices:
        raise ValueError(f"slices of {sorted(slices)} came: pass the all_gather_group to the receiver, too")
    return tensor_dict


def _cut(tensor_dict: TensorDict, sliced: Slicing) -> tuple[TensorDict, Slices]:
    """The dict with slices for the tensors that are declared, and what the receiver must know of them."""
    part, parts = sliced.transport.rank, sliced.transport.world_size
    cut, slices = dict(tensor_dict), Slices()
    for name in sorted(sliced.declared):
        if name not in tensor_dict:
            raise ValueError(f"all_gather_tensors names {name!r}, and the dict has no such tensor")
        whole = checked_tensor(tensor_dict[name]).detach().resolve_conj().resolve_neg().contiguous()
        cut[name] = torch.split(whole.view(-1), list(even_sizes(whole.numel(), parts)))[part]
        slices[name] = part, parts, list(whole.shape), int(word_sum(as_bytes(whole)))
    return cut, slices


def _whole_text(part: Tensor, known: tuple[int, int, list[int], int]) -> str:
    _, _, shape, digest = known
    return f"{part.dtype} {shape} with digest {digest & 0xFFFFFFFFFFFFFFFF:016x}"


def _start_joining(transport: Transport, part: Tensor, shape: list[int]) -> Gathering:
    return Gathering(transport, part, 0, even_sizes(math.prod(shape), transport.world_size))
