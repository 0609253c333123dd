"""Statements of calls, in the terms of the rules of agreement.

This is the only part of the check that looks at tensors and at torch's options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchft_like.core.agreement.statements import EXCHANGED, PAIRED, Statement
from torchft_like.process_group.alone import tensors_of
from torchft_like.process_group.collectives import Call

# torch takes rank 0 if one of these calls names no root.
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


def describe(call: Call, world_size: int) -> Statement:
    """Describe a call that was made in a group of `world_size` ranks."""
    row = call.collective
    if row.agreement == PAIRED:
        return _describe_pair(call)
    inputs = tuple(map(_specification, tensors_of(call.inputs)))
    outputs = () if row.output == row.input else tuple(map(_specification, tensors_of(call.outputs)))
    if row.agreement == EXCHANGED and row.output is not None and row.output.depth == 0:
        output_sizes, input_sizes = call.split_sizes
        inputs = _parts(call.inputs, input_sizes, world_size)
        outputs = _parts(call.outputs, output_sizes, world_size)
    return Statement(row.name, row.agreement, inputs, outputs, _root(call), _reduce_op(call))


def _describe_pair(call: Call) -> Statement:
    row = call.collective
    takes_any = row.name == "recv_anysource"
    tag = _number(call, 1 if takes_any else 2, "tag")
    peer = None if takes_any else _number(call, 1, "dst_rank", "dstRank", "src_rank", "srcRank")
    return Statement(
        row.name,
        row.agreement,
        tuple(map(_specification, tensors_of(call.inputs))),
        tuple(map(_specification, tensors_of(call.outputs))),
        peer=peer,
        tag=0 if tag is None else tag,
    )


def _specification(tensor: torch.Tensor) -> str:
    """Describe a tensor as `float32[4, 2]`, with its layout and device where they are not the usual ones."""
    layout = "" if tensor.layout == torch.strided else f"{str(tensor.layout).removeprefix('torch.')} "
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{layout}{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{device}"


def _parts(tensor: torch.Tensor, sizes: Sequence[int], world_size: int) -> tuple[str, ...]:
    """Describe each rank's part of a tensor that is split along its first dimension; all of it if it cannot
    be.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    rest = list(tensor.shape[1:])
    whole = _specification(tensor)
    shape = str(list(tensor.shape))
    lengths = sizes or [rows // world_size] * world_size
    if sum(lengths) != rows:
        return (whole,)
    return tuple(whole.replace(shape, str([length, *rest]), 1) for length in lengths)


def _root(call: Call) -> int | None:
    """Return the root, from whichever place the overload has for it: the options, a name, or the only
    number.
    """
    for value in _values(call):
        if hasattr(value, "rootRank"):
            return int(value.rootRank)
    if "root" in call.kwargs:
        return int(call.kwargs["root"])
    numbers = [value for value in call.args[1:] if isinstance(value, int) and not isinstance(value, bool)]
    if numbers:
        return numbers[0]
    return 0 if call.collective.name in ROOTED else None


def _reduce_op(call: Call) -> str | None:
    if "reduce" not in call.collective.name:
        return None
    operation = call.reduce_op
    return str(getattr(operation, "op", operation)).rpartition(".")[2]


def _number(call: Call, index: int, *names: str) -> int | None:
    if len(call.args) > index:
        return int(call.args[index])
    return next((int(call.kwargs[name]) for name in names if name in call.kwargs), None)


def _values(call: Call) -> Iterator[Any]:
    yield from call.args
    yield from call.kwargs.values()
