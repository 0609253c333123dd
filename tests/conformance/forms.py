"""Every form that the tensors of one call can have, where torch's signatures take a list of them.

Several tensors, the same memory twice, views that overlap, outputs that are inputs, dtypes and shapes that do
not fit each other, no tensors, sparse ones. What torch makes of them is not always sensible; our groups have
to do the same: return the same numbers, or raise an error where torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions, BroadcastOptions
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

from torchft_like.writing import writing_to

from .scene import Case, Scene, finish

Tensors = list[Tensor]
Take = Callable[[Scene], Tensors]
Arguments = Callable[[Scene], tuple[Any, ...]]

REDUCTIONS = {"SUM": ReduceOp.SUM, "AVG": ReduceOp.AVG, "MAX": ReduceOp.MAX}


def two(s: Scene) -> Tensors:
    return [s.tensor(), s.tensor(1)]


def three(s: Scene) -> Tensors:
    return [s.tensor(), s.tensor(1), s.tensor(2)]


def same_twice(s: Scene) -> Tensors:
    tensor = s.tensor()
    return [tensor, tensor]


def same_thrice_among_others(s: Scene) -> Tensors:
    tensor = s.tensor()
    return [tensor, s.tensor(1), tensor, tensor]


def two_views_of_one(s: Scene) -> Tensors:
    tensor = s.tensor()
    return [tensor, tensor[...]]


def overlapping(s: Scene) -> Tensors:
    whole = s.tensor(shape=(9,))
    return [whole[:6], whole[3:]]


def side_by_side(s: Scene) -> Tensors:
    """Return two views of one memory that share no element."""
    whole = s.tensor(shape=(8,))
    return [whole[:4], whole[4:]]


def two_shapes(s: Scene) -> Tensors:
    return [s.tensor(), s.tensor(1, (5,))]


def two_dtypes(s: Scene) -> Tensors:
    return [s.tensor(), s.tensor(1).to(torch.int64)]


def none(s: Scene) -> Tensors:
    return []


def sparse(s: Scene) -> Tensors:
    return [s.tensor().to_sparse()]


def two_sparse(s: Scene) -> Tensors:
    return [s.tensor().to_sparse(), s.tensor(1).to_sparse()]


def same_sparse_twice(s: Scene) -> Tensors:
    tensor = s.tensor().to_sparse()
    return [tensor, tensor]


def sparse_of_few(s: Scene) -> Tensors:
    """Return a sparse tensor whose places differ between the ranks, as many as the rank's number."""
    places = torch.arange(s.rank).reshape(1, -1)
    return [torch.sparse_coo_tensor(places, torch.ones(s.rank), (4,), check_invariants=False)]


def in_rows(s: Scene) -> Tensors:
    return [torch.eye(3).mul_(s.rank + 1).to_sparse_csr()]


LISTS: dict[str, Take] = {
    take.__name__.replace("_", " "): take
    for take in (
        two,
        three,
        same_twice,
        same_thrice_among_others,
        two_views_of_one,
        overlapping,
        side_by_side,
        two_shapes,
        two_dtypes,
        none,
        sparse,
        two_sparse,
        same_sparse_twice,
        sparse_of_few,
        in_rows,
    )
}


def reducing(name: str, take: Take, operation: Any) -> Case:
    """Return a case of `allreduce` or `allreduce_coalesced` of a list."""
    kind = AllreduceOptions if name == "allreduce" else AllreduceCoalescedOptions

    def case(s: Scene) -> Any:
        tensors, options = take(s), kind()
        options.reduceOp = operation
        return finish(getattr(s.group, name)(tensors, options), s.mode), tensors

    return case


def averaging(take: Take) -> Case:
    """Return a case that averages by hand, as a sum that is divided.

    torch's own AVG divides the first of several tensors only, and no sparse one.
    """

    def case(s: Scene) -> Any:
        seen, tensors = reducing("allreduce", take, ReduceOp.SUM)(s)
        quotients = [tensor / s.world for tensor in tensors]
        for tensor, quotient in zip(tensors, quotients, strict=True):
            with writing_to(tensor):
                tensor.copy_(quotient)
        return seen, tensors

    return case


def broadcasting(take: Take, root_tensor: int = 0) -> Case:
    def case(s: Scene) -> Any:
        tensors, options = take(s), BroadcastOptions()
        options.rootRank, options.rootTensor = s.root, root_tensor
        return waited(s.group.broadcast(tensors, options), tensors)

    return case


def calling(name: str, arguments: Arguments) -> Case:
    """Return a case that calls a method, and afterwards looks at its first argument."""

    def case(s: Scene) -> Any:
        given = arguments(s)
        return waited(getattr(s.group, name)(*given), given[0])

    return case


def waited(work: Any, outputs: Any) -> Any:
    if work is not None:
        work.wait()
    return outputs


def parts(tensor: Tensor, count: int) -> Tensors:
    return list(tensor.chunk(count))


def own_place(s: Scene, places: Tensors) -> Tensors:
    """Write the caller's tensor into its own place, and return the places of all ranks."""
    with writing_to(places[s.rank]):
        places[s.rank].copy_(s.tensor(shape=tuple(places[s.rank].shape)))
    return places


def gathered_in_place(s: Scene) -> tuple[Any, ...]:
    places = own_place(s, parts(s.blank((s.world * 2,)), s.world))
    return [places], [places[s.rank]]


def joined_in_place(s: Scene) -> tuple[Any, ...]:
    whole = s.blank((s.world * 2,))
    return whole, own_place(s, parts(whole, s.world))[s.rank]


def scattered_in_place(s: Scene) -> tuple[Any, ...]:
    whole = s.tensor(shape=(s.world * 2,))
    return parts(whole, s.world)[s.rank], whole


def scattered_parts_in_place(s: Scene) -> tuple[Any, ...]:
    """Return arguments in which the caller's own part is its output."""
    places = parts(s.tensor(shape=(s.world * 2,)), s.world)
    return [places[s.rank]], [places]


def exchanged_in_place(s: Scene) -> tuple[Any, ...]:
    tensors = [s.tensor(rank) for rank in s.ranks]
    return tensors, tensors


def all_exchanged_in_place(s: Scene) -> tuple[Any, ...]:
    tensor = s.tensor(shape=s.joined())
    return tensor, tensor.clone() if s.is_reference else tensor, [], []


def same_output_everywhere(s: Scene) -> tuple[Any, ...]:
    return [s.blank()] * s.world, [s.tensor(rank) for rank in s.ranks]


def with_first_repeated(s: Scene, which: str) -> tuple[Any, ...]:
    """Return outputs and inputs of a coalesced call, in one of which a tensor comes twice."""
    outputs, inputs = (
        [s.blank((s.world * 2,)), s.blank((s.world * 2,))],
        [s.tensor(0, (2,)), s.tensor(1, (2,))],
    )
    twice = outputs if which == "output" else inputs
    twice[1] = twice[0]
    return outputs, inputs


def sparse_parts(s: Scene) -> Tensors:
    return [s.tensor(rank).to_sparse() for rank in s.ranks]


# The first word is the method. With each of them torch's Gloo raises an error, on every rank.
SPARSE: dict[str, Arguments] = {
    "reduce of sparse": lambda s: (sparse(s),),
    "allgather_coalesced of sparse": lambda s: ([[s.blank()] for _ in s.ranks], sparse(s)),
    "allgather_into_tensor_coalesced of sparse": lambda s: ([s.blank(s.joined())], sparse(s)),
    "gather of sparse": lambda s: ([sparse_parts(s)] if s.rank == 0 else [], sparse(s)),
    "scatter of sparse": lambda s: (sparse(s), [sparse_parts(s)] if s.rank == 0 else []),
    "reduce_scatter of sparse": lambda s: (sparse(s), [sparse_parts(s)]),
    "_reduce_scatter_base of sparse": lambda s: (s.blank(), s.tensor(shape=s.joined()).to_sparse()),
    "reduce_scatter_tensor_coalesced of sparse": lambda s: (
        [s.blank()],
        [s.tensor(shape=s.joined()).to_sparse()],
    ),
    "alltoall of sparse": lambda s: (sparse_parts(s), sparse_parts(s)),
    "alltoall_base of sparse": lambda s: (
        s.blank(s.joined()),
        s.tensor(shape=s.joined()).to_sparse(),
        [],
        [],
    ),
}


OTHERS: dict[str, Arguments] = {
    "reduce of two": lambda s: (two(s),),
    "reduce of the same twice": lambda s: (same_twice(s),),
    "allreduce_coalesced of one": lambda s: ([s.tensor()],),
    "gather of the same twice": lambda s: ([s.blanks(), s.blanks()] if s.rank == 0 else [], same_twice(s)),
    "gather into one tensor": lambda s: ([[s.blank()] * s.world] if s.rank == 0 else [], [s.tensor()]),
    "scatter in place": lambda s: scattered_parts_in_place(s) if s.rank == 0 else ([s.blank((2,))], []),
    "reduce_scatter in place": scattered_parts_in_place,
    "allgather_into_tensor_coalesced of one": lambda s: ([s.blank(s.joined())], [s.tensor()]),
    "reduce_scatter_tensor_coalesced of one": lambda s: ([s.blank()], [s.tensor(shape=s.joined())]),
    "allgather of two": lambda s: ([[s.blank() for _ in range(2 * s.world)] for _ in range(2)], two(s)),
    "allgather into one list of two": lambda s: ([s.blanks()], two(s)),
    "allgather in place": gathered_in_place,
    "allgather into one tensor": lambda s: ([[s.blank()] * s.world], [s.tensor()]),
    "allgather of sparse": lambda s: ([s.blanks()], sparse(s)),
    "allgather_coalesced of two dtypes": lambda s: (
        [[s.blank(), s.blank().long()] for _ in s.ranks],
        two_dtypes(s),
    ),
    "allgather_coalesced of the same twice": lambda s: (
        [[s.blank(), s.blank()] for _ in s.ranks],
        same_twice(s),
    ),
    "allgather_coalesced into the same twice": lambda s: ([[s.blank()] * 2 for _ in s.ranks], two(s)),
    "_allgather_base in place": joined_in_place,
    "_allgather_base of sparse": lambda s: (s.blank(s.joined()), sparse(s)[0]),
    "allgather_into_tensor_coalesced of the same twice": lambda s: with_first_repeated(s, "input"),
    "allgather_into_tensor_coalesced into the same twice": lambda s: with_first_repeated(s, "output"),
    "gather of two": lambda s: ([s.blanks(), s.blanks()] if s.rank == 0 else [], two(s)),
    "gather in place": lambda s: gathered_in_place(s) if s.rank == 0 else ([], [s.tensor(shape=(2,))]),
    "scatter to two": lambda s: (
        [s.blank(), s.blank()],
        [[s.tensor(rank) for rank in s.ranks]] * 2 if s.rank == 0 else [],
    ),
    "scatter of the same": lambda s: ([s.blank()], [[s.tensor()] * s.world] if s.rank == 0 else []),
    "reduce_scatter to two": lambda s: ([s.blank(), s.blank()], [[s.tensor(rank) for rank in s.ranks]] * 2),
    "reduce_scatter of the same": lambda s: ([s.blank()], [[s.tensor()] * s.world]),
    "_reduce_scatter_base in place": scattered_in_place,
    "reduce_scatter_tensor_coalesced of the same twice": lambda s: (
        [s.blank(), s.blank()],
        [s.tensor(shape=s.joined())] * 2,
    ),
    "reduce_scatter_tensor_coalesced into the same twice": lambda s: (
        [s.blank()] * 2,
        [s.tensor(shape=s.joined()), s.tensor(1, s.joined())],
    ),
    "alltoall in place": exchanged_in_place,
    "alltoall of the same": lambda s: (s.blanks(), [s.tensor()] * s.world),
    "alltoall into the same": same_output_everywhere,
    "alltoall_base in place": all_exchanged_in_place,
}


def _coalesced(calls: Sequence[Callable[[Scene], tuple[Any, ...]]]) -> Case:
    """Return a case of functions in `_coalescing_manager`, which makes one call of equal functions."""

    def case(s: Scene) -> Any:
        with c10d._coalescing_manager(s.group) as manager:
            seen = [call(s) for call in calls]
        for work in manager.works:
            work.wait()
        return seen

    return case


def _reduced(operation: Any = ReduceOp.SUM, change: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
    def call(s: Scene) -> Tensor:
        tensor = change(s.tensor())
        dist.all_reduce(tensor, operation, group=s.group)
        return tensor

    return call


def _same_twice_in_one(s: Scene) -> Any:
    tensor = s.tensor()
    with c10d._coalescing_manager(s.group):
        dist.all_reduce(tensor, group=s.group)
        dist.all_reduce(tensor, group=s.group)
    return tensor


COALESCING: dict[str, Case] = {
    "nothing": _coalesced([]),
    "one": _coalesced([_reduced()]),
    "averages": _coalesced([_reduced(ReduceOp.AVG), _reduced(ReduceOp.AVG)]),
    "different reductions": _coalesced([_reduced(), _reduced(ReduceOp.MAX)]),
    "two dtypes": _coalesced([_reduced(), _reduced(change=lambda t: t.long())]),
    "the same twice": _same_twice_in_one,
}


FORMS: dict[str, Case] = {
    **{
        f"{name} of {words}, {reduction}": reducing(name, take, operation)
        for name in ("allreduce", "allreduce_coalesced")
        for words, take in LISTS.items()
        for reduction, operation in REDUCTIONS.items()
    },
    **{f"broadcast of {words}": broadcasting(take) for words, take in LISTS.items()},
    "broadcast of the second of two": broadcasting(two, 1),
    "broadcast of no such tensor": broadcasting(two, 2),
    **{words: calling(words.split()[0], arguments) for words, arguments in {**OTHERS, **SPARSE}.items()},
    **{f"coalescing of {words}": case for words, case in COALESCING.items()},
}

AVERAGES = {f"average of {words}": averaging(take) for words, take in LISTS.items()}
