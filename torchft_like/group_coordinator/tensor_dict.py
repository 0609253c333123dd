"""Dicts of tensors and plain data, to one rank or to all, and slices of tensors that several ranks hold.

An all-gather group saves bytes if each of its ranks sends the same tensor to a counterpart: each sends a
slice, and the receivers gather the slices among themselves. That is right only if the tensors are replicated.
So it is done for those that the sender declares to be replicated, and a slice carries a digest of the whole
tensor that it was cut from: the receivers compare the digests before they gather.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchft_like.communicator.collectives import start_joining
from torchft_like.communicator.communicator import HARMLESS, Communicator
from torchft_like.communicator.handle import Handle
from torchft_like.communicator.messages import Begun, start_broadcast, start_receiving, start_sending
from torchft_like.communicator.sizes import even_sizes
from torchft_like.communicator.tensors import as_bytes, checked_tensor
from torchft_like.core.agreement.statements import Statement, Terms
from torchft_like.divergence.words import word_sum

TENSOR_DICT = "tensor dict"
TensorDict = dict[str, Any]


class Slicing(NamedTuple):
    """The tensors of a dict of which the ranks of a group send slices, because each of them has the whole."""

    group: Communicator
    declared: frozenset[str]


# The slices in a dict, by name: part, parts, the whole's shape and digest.
Slices = dict[str, tuple[int, int, list[int], int]]
# A function that returns the message, or raises the error for which there is none: the counterparts must hear
# of it, and not wait.
Received = Callable[[], tuple[TensorDict, Slices]]


def slicing(group: Communicator | None, all_gather_tensors: Mapping[str, bool] | None) -> Slicing | None:
    """Return the slicing that the arguments of a call ask for; None if they ask for none."""
    if not isinstance(all_gather_tensors, Mapping | None):
        raise TypeError(f"all_gather_tensors is a dict of bools, not a {type(all_gather_tensors).__name__}")
    declared = frozenset(name for name, is_replicated in (all_gather_tensors or {}).items() if is_replicated)
    if group is None or group.world_size == 1 or not declared:
        return None
    return Slicing(group, declared)


def checked_dict(value: object) -> TensorDict:
    """Return the value, if it is a dict."""
    if type(value) is not dict:
        raise TypeError(f"a dict of tensors and plain data was expected, not a {type(value).__name__}")
    return value


def start_broadcasting(group: Communicator, tensor_dict: TensorDict | None, src: int) -> Begun:
    """Begin to send the dict of rank `src` to all; return when all ranks know what will come."""

    def check() -> Terms:
        if group.rank == src:
            checked_dict(tensor_dict)
        return ()

    return start_broadcast(group, "broadcast_tensor_dict", tensor_dict, src, check)


def start_sending_dict(
    group: Communicator,
    tensor_dict: TensorDict,
    dst: int,
    choose_slicing: Callable[[], Slicing | None],
) -> Begun:
    """Begin to send a dict; the tensors must stay as they are until it is sent.

    Args:
        choose_slicing: returns what is sent in slices; may raise an error.
    """

    def prepare() -> tuple[Statement, object]:
        checked_dict(tensor_dict)
        sliced = choose_slicing()
        return Statement(TENSOR_DICT), (tensor_dict, {}) if sliced is None else _cut(tensor_dict, sliced)

    return start_sending(group, dst, TENSOR_DICT, prepare)


def receiving(
    group: Communicator, src: int, gathered_by: Communicator | None, arriving: TensorDict
) -> Handle[TensorDict]:
    """Begin to receive into a dict. On a CPU this waits for nothing: the sender may begin at any time."""
    tag = group.tag("from", src)

    def settle(received: Any) -> TensorDict:
        arriving.update(joined(received, gathered_by))
        return arriving

    text = f"recv_tensor_dict over {group}"
    if not group.waits_on_streams:
        return Handle(text, lambda: _received(group, src, tag), settle, None, group.epoch)

    with _missed_by(gathered_by), group.guard("recv_tensor_dict"):
        begun = start_receiving(group, src, tag, TENSOR_DICT)
    finish = _waiting(group, "recv_tensor_dict", begun)
    return Handle(text, lambda: _outcome(finish), settle, begun.is_over, group.epoch)


def received(group: Communicator, src: int, gathered_by: Communicator | None) -> TensorDict:
    """Return what `src` sends next."""
    return joined(_received(group, src, group.tag("from", src)), gathered_by)


def handle(group: Communicator, operation: str, begun: Begun) -> Handle[Any]:
    """Return a handle of a message that is under way to all, or from here to one."""
    watched = begun.is_over if group.waits_on_streams else None
    finish = _waiting(group, operation, begun)
    return Handle(f"{operation} over {group}", finish, lambda value: value, watched, group.epoch)


def _waiting(group: Communicator, operation: str, begun: Begun) -> Callable[[], Any]:
    def wait() -> object:
        with group.guard(operation):
            return begun.wait()

    return wait


def _received(group: Communicator, src: int, tag: int) -> Received:
    def receive() -> Any:
        with group.guard("recv_tensor_dict"):
            return start_receiving(group, src, tag, TENSOR_DICT).wait()

    return _outcome(receive)


def _outcome(receive: Callable[[], tuple[TensorDict, Slices]]) -> Received:
    outcome: Future[tuple[TensorDict, Slices]] = Future()
    try:
        outcome.set_result(receive())
    except BaseException as error:  # noqa: BLE001 - it is raised where the counterparts can hear of it
        outcome.set_exception(error)
    return outcome.result


@contextlib.contextmanager
def _missed_by(gathered_by: Communicator | None) -> Iterator[None]:
    """Tell the counterparts if the block, which receives a dict, fails: they wait for its slices."""
    try:
        yield
    except HARMLESS:  # the counterparts hear of it where slices are joined
        raise
    except BaseException as error:
        if gathered_by is not None:
            gathered_by.break_off(f"a dict with slices to gather here did not come: {error!r}")
        raise


def joined(received: Received, group: Communicator | None) -> TensorDict:
    """Return a received dict, with whole tensors for the slices that the ranks of an all-gather group hold.

    Raises:
        ValueError: there are slices, and the group is not the one they were made for.
        CollectiveMismatchError: the slices are not of the same tensors: they were not replicated. Or a
            sender has refused to send, on all ranks of the group.
    """
    if group is None:
        whole, cut = received()
        if cut:
            raise ValueError(f"slices of {sorted(cut)} came: pass the all_gather_group to the receiver, too")
        return whole
    with _missed_by(group), contextlib.suppress(*HARMLESS):
        received()

    def prepare() -> tuple[Statement, int, bytes, tuple[TensorDict, Slices]]:
        tensor_dict, slices = received()
        for name, (part, parts, _, _) in slices.items():
            if (part, parts) != (group.rank, group.world_size):
                raise ValueError(
                    f"slice {part} of {parts} of {name!r} came to rank {group.rank} of "
                    f"{group.world_size} of the all_gather_group"
                )
        wholes = tuple((str(name), _whole_text(tensor_dict[name], slices[name])) for name in _ordered(slices))
        return Statement("recv_tensor_dict", terms=wholes), 0, b"", (tensor_dict, slices)

    with group.guard("recv_tensor_dict"):
        _, (tensor_dict, slices) = group.agree("recv_tensor_dict", prepare)
        joining = {
            name: start_joining(
                group, tensor_dict[name], 0, even_sizes(math.prod(slices[name][2]), group.world_size)
            )
            for name in _ordered(slices)
        }
        for name, finish in joining.items():
            tensor_dict[name] = finish().view(slices[name][2])
    return tensor_dict


def _cut(tensor_dict: TensorDict, sliced: Slicing) -> tuple[TensorDict, Slices]:
    """Return the dict with slices for the declared tensors, and what the receiver needs to know of them."""
    part, parts = sliced.group.rank, sliced.group.world_size
    cut, slices = dict(tensor_dict), Slices()
    for name in _ordered(sliced.declared):
        if name not in tensor_dict:
            raise ValueError(f"all_gather_tensors names {name!r}, and the dict has no such tensor")
        whole = checked_tensor(tensor_dict[name]).detach().resolve_conj().resolve_neg().contiguous()
        cut[name] = torch.split(whole.view(-1), list(even_sizes(whole.numel(), parts)))[part]
        slices[name] = part, parts, list(whole.shape), int(word_sum(as_bytes(whole)))
    return cut, slices


def _ordered(names: Iterable[str]) -> list[str]:
    """Return the names in the same order on all ranks; a dict may have numbers beside names as keys."""
    return sorted(names, key=lambda name: (type(name).__name__, name))


def _whole_text(part: Tensor, known: tuple[int, int, list[int], int]) -> str:
    _, _, shape, digest = known
    return f"{part.dtype} {shape} with digest {digest & 0xFFFFFFFFFFFFFFFF:016x}"
