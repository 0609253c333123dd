"""A call of every function of `torch.distributed` that takes `async_op`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from .scene import Call, Scene, Size

Build = Callable[[Scene], Call]

# Functions of torch that do the same under names of different ages.
ALL_GATHER = ("all_gather_into_tensor", "all_gather_single", "_all_gather_base")
GATHER = ("gather_single",)  # from torch 2.14 on
REDUCE_SCATTER = ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base")


def all_reduce(s: Scene) -> Call:
    tensor = s.tensor()
    return Call(dist.all_reduce, (tensor,), tensor)


def all_reduce_coalesced(s: Scene) -> Call:
    tensors = [s.tensor(), s.tensor(1)]
    return Call(dist.all_reduce_coalesced, (tensors,), tensors)


def broadcast(s: Scene) -> Call:
    tensor = s.tensor()
    return Call(dist.broadcast, (tensor, s.root), tensor)


def broadcast_group_src(s: Scene) -> Call:
    tensor = s.tensor()
    return Call(dist.broadcast, (tensor,), tensor, {"group_src": s.root})


def reduce(s: Scene) -> Call:
    tensor = s.tensor()
    # On other ranks the content is whatever the algorithm left there.
    return Call(dist.reduce, (tensor, s.root), tensor if s.is_root else None)


def all_gather(s: Scene) -> Call:
    outputs = s.blanks()
    return Call(dist.all_gather, (outputs, s.tensor()), outputs)


def all_gather_coalesced(s: Scene) -> Call:
    outputs = [[s.blank(), s.blank()] for _ in s.ranks]
    return Call(dist.all_gather_coalesced, (outputs, [s.tensor(), s.tensor(1)]), outputs)


def all_gather_joined(function: Any) -> Build:
    def build(s: Scene) -> Call:
        s = s.easy()
        output = s.blank(s.joined())
        return Call(function, (output, s.tensor()), [output], contents_only=True)

    return build


def all_gather_stacked(s: Scene) -> Call:
    s = s.easy()
    output = s.blank((s.world, *s.kind.shape))
    target = output.view(s.joined()) if s.is_reference else output
    return Call(dist.all_gather_into_tensor, (target, s.tensor()), [output], contents_only=True)


def gather(s: Scene) -> Call:
    outputs = s.blanks() if s.is_root else None
    return Call(dist.gather, (s.tensor(), outputs, s.root), outputs)


def gather_joined(function: Any) -> Build:
    return lambda s: _gather_into_one(s, function, s.joined())


def gather_stacked(function: Any) -> Build:
    return lambda s: _gather_into_one(s, function, (s.world, *s.kind.shape))


def _gather_into_one(s: Scene, function: Any, shape: Size) -> Call:
    """Gather into one tensor; torch's own Gloo, which cannot, is given a list of its parts."""
    easy = s.easy()
    output = easy.blank(shape) if s.is_root else None
    if not s.is_reference:
        return Call(function, (s.tensor(), output, s.root), output, contents_only=True)
    parts = None if output is None else list(output.view(s.world, *easy.kind.shape).unbind(0))
    return Call(dist.gather, (easy.tensor(), parts, s.root), output, contents_only=True)


def scatter(s: Scene) -> Call:
    output = s.blank()
    inputs = [s.tensor(rank) for rank in s.ranks] if s.is_root else None
    return Call(dist.scatter, (output, inputs, s.root), output)


def reduce_scatter(s: Scene) -> Call:
    return _reduce_scatter(s.easy(), dist.reduce_scatter, lambda s: [s.tensor(rank) for rank in s.ranks])


def reduce_scatter_joined(function: Any) -> Build:
    def build(s: Scene) -> Call:
        return _reduce_scatter(s.easy(), function, lambda s: s.tensor(shape=s.joined()))

    return build


def reduce_scatter_stacked(s: Scene) -> Call:
    def source(s: Scene) -> Tensor:
        stacked = s.tensor(shape=(s.world, *s.kind.shape))
        return stacked.view(s.joined()) if s.is_reference else stacked

    return _reduce_scatter(s.easy(), dist.reduce_scatter_tensor, source)


def _reduce_scatter(s: Scene, function: Any, source: Callable[[Scene], Any]) -> Call:
    output = s.blank()
    return Call(function, (output, source(s)), [output], future=[output], contents_only=s.mode == "sync")


def all_to_all(s: Scene) -> Call:
    outputs = s.blanks()
    return Call(dist.all_to_all, (outputs, [s.tensor(rank) for rank in s.ranks]), outputs)


def all_to_all_uneven(s: Scene) -> Call:
    outputs = [s.blank((1 + rank, *s.kind.shape)) for rank in s.ranks]
    inputs = [s.tensor(rank, (1 + s.rank, *s.kind.shape)) for rank in s.ranks]
    return Call(dist.all_to_all, (outputs, inputs), outputs)


def all_to_all_single(s: Scene) -> Call:
    output = s.blank(s.joined())
    return Call(dist.all_to_all_single, (output, s.tensor(shape=s.joined())), output)


def all_to_all_single_uneven(s: Scene) -> Call:
    """Let rank a send a + b + 1 rows to rank b, but rank 0 none to rank 2."""
    inputs = [_rows(s.rank, other) for other in s.ranks]
    outputs = [_rows(other, s.rank) for other in s.ranks]
    rest: Size = s.kind.shape[1:]
    output = s.blank((sum(outputs), *rest))
    source = s.tensor(shape=(sum(inputs), *rest))
    return Call(dist.all_to_all_single, (output, source, outputs, inputs), output)


def _rows(sender: int, receiver: int) -> int:
    return 0 if (sender, receiver) == (0, 2) else sender + receiver + 1


def barrier(s: Scene) -> Call:
    return Call(dist.barrier, (), None)


def _named(names: tuple[str, ...], build: Callable[[Any], Build]) -> dict[str, Build]:
    return {name: build(function) for name in names if (function := getattr(dist, name, None)) is not None}


# What is called, in words; the first word is the function.
CALLS: dict[str, Build] = {
    "all_reduce": all_reduce,
    "all_reduce_coalesced": all_reduce_coalesced,
    "broadcast": broadcast,
    "broadcast by group_src": broadcast_group_src,
    "reduce": reduce,
    "all_gather": all_gather,
    "all_gather_coalesced": all_gather_coalesced,
    **_named(ALL_GATHER, all_gather_joined),
    "all_gather_into_tensor stacked": all_gather_stacked,
    "gather": gather,
    **_named(GATHER, gather_joined),
    **{f"{name} stacked": build for name, build in _named(GATHER, gather_stacked).items()},
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    **_named(REDUCE_SCATTER, reduce_scatter_joined),
    "reduce_scatter_tensor stacked": reduce_scatter_stacked,
    "all_to_all": all_to_all,
    "all_to_all of uneven tensors": all_to_all_uneven,
    "all_to_all_single": all_to_all_single,
    "all_to_all_single of uneven rows": all_to_all_single_uneven,
    "barrier": barrier,
}

REDUCTIONS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVG,
    "PRODUCT": ReduceOp.PRODUCT,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "BAND": ReduceOp.BAND,
    "BOR": ReduceOp.BOR,
    "BXOR": ReduceOp.BXOR,
}
REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")


def call(name: str, reduction: str | None = None) -> Callable[[Scene], Any]:
    """Return the case of one entry of `CALLS`."""

    def case(s: Scene) -> Any:
        built = CALLS[name](s)
        if reduction is not None:
            built.kwargs["op"] = REDUCTIONS[reduction]
        return built.run(s)

    return case
