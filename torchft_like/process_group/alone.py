"""The result of each collective when only the caller takes part: for dummies, and for calls that are skipped.

These are the functions of the table's rows. Each writes to the outputs of a call; an output may be an input,
too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from torchft_like.process_group.collectives import Call

# Tensors as a call holds them: one tensor, a list, or a list of lists.
Tensors = Any


def keep(call: Call, rank: int, world_size: int) -> None:
    """Move nothing: the outputs are the inputs."""


def join(call: Call, rank: int, world_size: int) -> None:
    """Reduce several tensors into each of them, as if each were another rank's, as Gloo does."""
    combine = _COMBINE.get(hash(call.reduce_op), torch.add) if len(call.outputs) > 1 else torch.add
    for other in call.outputs[1:]:
        call.outputs[0].copy_(combine(call.outputs[0], other))
    for output in call.outputs[1:]:
        output.copy_(call.outputs[0])


# The keys are hashes, because an operation's hash is its number. An average counts ranks, not tensors.
_COMBINE: Mapping[int, Callable[[Tensor, Tensor], Tensor]] = {
    hash(ReduceOp.PRODUCT): torch.mul,
    hash(ReduceOp.MIN): torch.minimum,
    hash(ReduceOp.MAX): torch.maximum,
    hash(ReduceOp.BAND): torch.bitwise_and,
    hash(ReduceOp.BOR): torch.bitwise_or,
    hash(ReduceOp.BXOR): torch.bitwise_xor,
}


def repeat_root(call: Call, rank: int, world_size: int) -> None:
    """Copy the tensor that the options name to all others."""
    root = next((option.rootTensor for option in call.options if hasattr(option, "rootTensor")), 0)
    for output in call.outputs if root < len(call.outputs) else ():
        if output is not call.outputs[root]:
            output.copy_(call.outputs[root])


def clear(call: Call, rank: int, world_size: int) -> None:
    for output in tensors_of(call.outputs):
        output.zero_()


def spread(call: Call, rank: int, world_size: int) -> None:
    """Copy the caller's tensors, one after the other, to the places of each output list."""
    for outputs in call.outputs:
        for output, source in zip(outputs, itertools.cycle(call.inputs), strict=False):
            output.copy_(source)


def spread_coalesced(call: Call, rank: int, world_size: int) -> None:
    """Copy the caller's tensors to each rank's outputs: outputs are per rank, then per input."""
    for outputs in call.outputs:
        for output, source in zip(outputs, call.inputs, strict=False):
            output.copy_(source)


def fill(call: Call, rank: int, world_size: int) -> None:
    """Repeat the caller's tensor in an output that joins all ranks' tensors."""
    for output, source in zip(_flat(call.outputs), _flat(call.inputs), strict=False):
        if source.numel():
            copies = output.numel() // source.numel()
            output.copy_(source.reshape(1, -1).expand(copies, -1).reshape(output.shape))


def own_item(call: Call, rank: int, world_size: int) -> None:
    """Copy the caller's place of each input list to its output; zero an output without a list."""
    for output, sources in itertools.zip_longest(call.outputs, call.inputs or ()):
        if sources:
            output.copy_(sources[min(rank, len(sources) - 1)])
        else:
            output.zero_()


def own_chunk(call: Call, rank: int, world_size: int) -> None:
    for output, source in zip(_flat(call.outputs), _flat(call.inputs), strict=False):
        chunks = torch.split(source.reshape(-1), max(output.numel(), 1))
        output.copy_(chunks[min(rank, len(chunks) - 1)].view(output.shape))


def own_to_own(call: Call, rank: int, world_size: int) -> None:
    """Copy what the caller sends to itself, and zero what others would have sent."""
    own = min(rank, len(call.outputs) - 1)
    for place, output in enumerate(call.outputs):
        if place == own:
            output.copy_(call.inputs[place])  # copying a tensor to itself is harmless
        else:
            output.zero_()


def own_split(call: Call, rank: int, world_size: int) -> None:
    output_sizes, input_sizes = call.split_sizes
    own = _split(call.inputs, input_sizes, rank, world_size).clone()  # the output may be the input
    clear(call, rank, world_size)
    _split(call.outputs, output_sizes, rank, world_size).copy_(own)


def _split(tensor: Tensor, sizes: Sequence[int], rank: int, world_size: int) -> Tensor:
    if not sizes:
        return tensor.chunk(world_size)[rank]
    return tensor.narrow(0, sum(sizes[:rank]), sizes[rank])


def _flat(nested: Tensors) -> list[Tensor]:
    return list(tensors_of(nested))


def tensors_of(nested: Tensors) -> Iterator[Tensor]:
    """Yield every tensor in an argument, however deep its lists."""
    if isinstance(nested, Tensor):
        yield nested
    elif nested is not None:
        for item in nested:
            yield from tensors_of(item)
