"""What each collective gives when nobody but the caller takes part: for dummies, and for what is skipped.

The functions of the table's rows. Each writes to the outputs of a call; an output may be an input, too.
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
    """Nothing moves: the outputs are the inputs."""


def join(call: Call, rank: int, world_size: int) -> None:
    """Several tensors are reduced as if each were another rank's, into the first one, as Gloo does it."""
    combine = _COMBINE.get(hash(call.reduce_op), torch.add) if len(call.outputs) > 1 else torch.add
    for other in call.outputs[1:]:
        call.outputs[0].copy_(combine(call.outputs[0], other))
    for output in call.outputs[1:]:
        output.copy_(call.outputs[0])


# By hash, which is the number of the operation. An average counts ranks, not tensors.
_COMBINE: Mapping[int, Callable[[Tensor, Tensor], Tensor]] = {
    hash(ReduceOp.PRODUCT): torch.mul,
    hash(ReduceOp.MIN): torch.minimum,
    hash(ReduceOp.MAX): torch.maximum,
    hash(ReduceOp.BAND): torch.bitwise_and,
    hash(ReduceOp.BOR): torch.bitwise_or,
    hash(ReduceOp.BXOR): torch.bitwise_xor,
}


def repeat_root(call: Call, rank: int, world_size: int) -> None:
    """Of several tensors, all become the one that the options name."""
    root = next((option.rootTensor for option in call.options if hasattr(option, "rootTensor")), 0)
    for output in call.outputs if root < len(call.outputs) else ():
        if output is not call.outputs[root]:
            output.copy_(call.outputs[root])


def clear(call: Call, rank: int, world_size: int) -> None:
    for output in tensors_of(call.outputs):
        output.zero_()


def spread(call: Call, rank: int, world_size: int) -> None:
    """Every place of an output list takes the caller's tensor; of several tensors, one after the other."""
    for outputs in call.outputs:
        for output, source in zip(outputs, itertools.cycle(call.inputs), strict=False):
            output.copy_(source)


def spread_coalesced(call: Call, rank: int, world_size: int) -> None:
    """Outputs are per rank, then per input."""
    for outputs in call.outputs:
        for output, source in zip(outputs, call.inputs, strict=False):
            output.copy_(source)


def fill(call: Call, rank: int, world_size: int) -> None:
    """An output that joins all ranks' tensors repeats the caller's."""
    for output, source in zip(_flat(call.outputs), _flat(call.inputs), strict=False):
        if source.numel():
            copies = output.numel() // source.numel()
            output.copy_(source.reshape(1, -1).expand(copies, -1).reshape(output.shape))


def own_item(call: Call, rank: int, world_size: int) -> None:
    """Each output takes the caller's place in the list that stands for it; zero without a list."""
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
    """What the caller sends to itself arrives; nothing else does."""
    own = min(rank, len(call.outputs) - 1)
    for place, output in enumerate(call.outputs):
        if place == own:
            output.copy_(call.inputs[place])  # which may be the same tensor
        else:
            output.zero_()


def own_split(call: Call, rank: int, world_size: int) -> None:
    output_sizes, input_sizes = call.split_sizes
    own = _split(call.inputs, input_sizes, rank, world_size).clone()  # the output may be the same tensor
    clear(call, rank, world_size)
    _split(call.outputs, output_sizes, rank, world_size).copy_(own)


def _split(tensor: Tensor, sizes: Sequence[int], rank: int, world_size: int) -> Tensor:
    if not sizes:
        return tensor.chunk(world_size)[rank]
    return tensor.narrow(0, sum(sizes[:rank]), sizes[rank])


def _flat(nested: Tensors) -> list[Tensor]:
    return list(tensors_of(nested))


def tensors_of(nested: Tensors) -> Iterator[Tensor]:
    """Every tensor in an argument, however deep the lists."""
    if isinstance(nested, Tensor):
        yield nested
    elif nested is not None:
        for item in nested:
            yield from tensors_of(item)
