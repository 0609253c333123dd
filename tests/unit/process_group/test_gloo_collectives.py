"""What Gloo does beside what torch's own does, which is in tests/conformance: reduce-scatter, views, DDP."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOptions, ReduceScatterOptions
from torch.distributed import ReduceOp

from tests.managers import error_of
from torchft_like.errors import ProcessGroupError
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo

from .conftest import Party, allreduced

# torch 2.13 renames some functions; the old names are those of every version that is supported.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")


def own(rank: int, size: int = 2) -> Tensor:
    """Each rank's tensor: 1, 2, 3..."""
    return torch.full((size,), float(rank + 1))


def blank(*shape: int) -> Tensor:
    return torch.full(shape, -1.0)


@pytest.mark.parametrize("is_awaited_inside", [True, False])
def test_tensors_of_inference_mode_are_written_by_any_thread(party: Party, is_awaited_inside: bool) -> None:
    def act(rank: int, group: Any) -> list[Tensor]:
        with torch.inference_mode():
            outputs = [blank(4, 2).t(), blank(4, 2).t()]  # with gaps, so they are copied
            part = blank(2)
            gather = group.allgather([outputs], [torch.full((2, 4), float(rank))])
            reduce = group._reduce_scatter_base(part, torch.ones(4))
            futures = [work.get_future() for work in (gather, reduce)]
            if is_awaited_inside:
                assert gather.wait()
                assert reduce.wait()
        for work, future in zip((gather, reduce), futures, strict=True):
            future.wait()
            assert work.wait()
        assert group.errored() is None
        return [*outputs, part]

    for result in party.together(party.meet(2), act):
        wanted = [torch.zeros(2, 4), torch.ones(2, 4), torch.full((2,), 2.0)]
        assert all(map(torch.equal, result, wanted))


@pytest.mark.parametrize("name", ["allreduce", "reduce"])
@pytest.mark.parametrize("is_called_inside", [True, False])
def test_an_average_of_tensors_of_inference_mode_is_divided_by_any_thread(
    party: Party, name: str, is_called_inside: bool
) -> None:
    """Each call is the first of its group, so it is compared, and the thread that hears so begins it."""

    def act(rank: int, group: Any) -> Tensor:
        with torch.inference_mode():
            tensor = torch.full((2,), 1.0 + rank)
        options = AllreduceOptions() if name == "allreduce" else ReduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.AVG)
        with torch.inference_mode(is_called_inside):
            assert getattr(group, name)([tensor], options).wait()
        assert group.errored() is None
        return tensor

    assert party.together(party.meet(2), act)[0].tolist() == [1.5, 1.5]


def test_split_sizes_may_be_whatever_torch_takes_for_whole_numbers(party: Party) -> None:
    """And the two sides of a call need not have the same form."""
    forms: list[Callable[[list[int]], Any]] = [list, tuple, np.array, lambda sizes: list(torch.tensor(sizes))]

    def act(rank: int, group: Any) -> list[list[float]]:
        found = []
        for out, into in itertools.permutations(forms, 2):
            output, source = torch.zeros(1 + 2 * rank), torch.arange(2.0) + 10 * rank
            outputs, inputs = ([1, 0] if rank == 0 else [1, 2]), ([1, 1] if rank == 0 else [0, 2])
            dist.all_to_all_single(output, source, out(outputs), into(inputs), group=group)
            found.append(output.tolist())
        return found

    first, second = party.together(party.meet(2), act)
    assert (first, second) == ([[0.0]] * len(first), [[1.0, 10.0, 11.0]] * len(first))


def test_splits_by_name_are_told_apart_by_their_names(party: Party) -> None:
    def act(rank: int, group: Any) -> list[float]:
        output, source = torch.zeros(1 + 2 * rank), torch.arange(2.0) + 10 * rank
        sent, received = ([[1, 1], [1, 0]], [[0, 2], [1, 2]])[rank]
        group.alltoall_base(
            input=source, input_split_sizes=sent, output_split_sizes=received, output=output
        ).wait()
        return output.tolist()

    assert party.together(party.meet(2), act) == [[0.0], [1.0, 10.0, 11.0]]


def test_one_member_alone_needs_no_store(party: Party) -> None:
    group = party.own(party_of_one())
    tensor = own(0)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, own(0))
    assert (group.rank(), group.size()) == (0, 1)


def assert_refused(party: Party, check: Any, call: Any, errors: Any, match: str | None = None) -> None:
    """Fail unless both members refuse a call, and their group goes on."""

    def act(rank: int, group: Any) -> list[float]:
        with pytest.raises(errors, match=match):
            call(group).wait()
        assert group.errored() is None
        tensor = own(rank)
        group.allreduce([tensor]).wait()
        return tensor.tolist()

    members = party.meet(2, lambda: ProcessGroupGloo(30, check_collectives=check))
    assert party.together(members, act) == [[3.0, 3.0]] * 2


def party_of_one() -> ProcessGroup:
    group = ProcessGroupGloo(30)
    group.configure("127.0.0.1:1/nobody-listens-there", 0, 1)
    return group


@pytest.mark.usefixtures("no_operator")
@pytest.mark.parametrize("check", ["new", False])
@pytest.mark.parametrize(
    ("dtype", "call"),
    [
        (torch.int64, lambda group, x: group.allreduce(x, ReduceOp.AVG)),
        (torch.int32, lambda group, x: group.allreduce([x, x.clone()], average())),
        (torch.int16, lambda group, x: group.allreduce([x])),
        (torch.uint16, lambda group, x: group.reduce([x])),
        (torch.int64, lambda group, x: group._reduce_scatter_base(x[:1], x, average(ReduceScatterOptions()))),
        (torch.float8_e4m3fn, lambda group, x: group.broadcast([x])),
        (torch.int16, lambda group, x: group.allgather([[x.clone(), x.clone()]], [x])),
        (torch.complex64, lambda group, x: group.alltoall_base(x.clone(), x, [], [])),
    ],
)
def test_a_dtype_that_gloo_does_not_take_is_refused_and_the_group_goes_on(
    party: Party, check: Any, dtype: torch.dtype, call: Any
) -> None:
    def act(group: Any) -> Any:
        return call(group, torch.ones(2).to(dtype))

    assert_refused(party, check, act, ProcessGroupError, str(dtype))


@pytest.mark.usefixtures("no_operator")
@pytest.mark.parametrize("check", ["new", False])
@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.allreduce([own(0)], reducing(ReduceOp.BAND)),
        lambda group: group.reduce([own(0)], reducing(ReduceOp.BXOR, ReduceOptions())),
        lambda group: group._reduce_scatter_base(
            own(0, 1), own(0), reducing(ReduceOp.BOR, ReduceScatterOptions())
        ),
        lambda group: group.allreduce([own(0).to(torch.complex64)], reducing(ReduceOp.MAX)),
        lambda group: group.allreduce([own(0).to(torch.complex64).to_sparse()], reducing(ReduceOp.SUM)),
        lambda group: group.allreduce([own(0)], "sum"),
        lambda group: group.allgather([[blank(1).expand(2)] * 2], [own(0)]),
        lambda group: group.alltoall_base(own(0), own(0), [2], [2]),
        lambda group: group.alltoall_base(own(0), own(0), [3, -1], [3, -1]),
        lambda group: group.alltoall_base(own(0), own(0, 4), [], []),
        lambda group: group.alltoall_base(blank(2, 2), blank(2, 3), [1, 1], [1, 1]),
        lambda group: group.recv([own(0)], 2, 0),
        lambda group: group.send([own(0)], -1, 0),
        lambda group: group.send([own(0)], group.rank(), 0),
    ],
)
def test_arguments_that_are_wrong_on_all_ranks_are_refused_and_the_group_goes_on(
    party: Party, check: Any, call: Any
) -> None:
    assert_refused(party, check, call, (RuntimeError, TypeError))


class Uncopied(Tensor):
    """A tensor for whose copy there is no memory."""

    def contiguous(self, **_: Any) -> Tensor:  # type: ignore[override]
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes")


@pytest.mark.usefixtures("no_operator")
@pytest.mark.parametrize("check", [True, "new", False])
def test_no_later_call_meets_one_for_which_a_member_has_no_memory(party: Party, check: Any) -> None:
    """Its own sum of the second call was one with the peer's first."""
    groups = party.meet(2, lambda: ProcessGroupGloo(30, check_collectives=check))

    def reduce_twice(rank: int, group: Any) -> tuple[list[Any], Any]:
        errors, works = list[Any](), list[Any]()
        first = torch.ones(2, 2).t()
        for tensor in (first.as_subclass(Uncopied) if rank == 0 else first, torch.ones(2, 2)):
            errors.append(error_of(lambda: works.append(group.allreduce([tensor]))))  # noqa: B023
        return [error for error in errors if error] + [error_of(work.wait) for work in works], tensor

    (own, second), (peers, _) = party.together(groups, reduce_twice)
    assert "can't allocate memory" in str(own[0])
    assert None not in own + peers
    assert second.tolist() == torch.ones(2, 2).tolist()
    party.configure(groups)
    assert party.together(groups, lambda _, group: allreduced(group)) == [2.0] * 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.int64])
def test_a_dtype_whose_parts_gloo_takes_is_reduced_and_broadcast(party: Party, dtype: torch.dtype) -> None:
    def act(rank: int, group: Any) -> list[Any]:
        tensor = own(rank).to(dtype)
        group.allreduce([tensor]).wait()
        group.broadcast([tensor]).wait()
        return tensor.tolist()

    wanted = [True] * 2 if dtype is torch.bool else [3] * 2
    assert party.together(party.meet(2), act) == [wanted] * 2


def reducing(operation: Any, options: Any = None) -> Any:
    options = AllreduceOptions() if options is None else options
    options.reduceOp = ReduceOp(operation)
    return options


def average(options: Any = None) -> Any:
    return reducing(ReduceOp.AVG, options)


@pytest.mark.agreement
def test_results_are_bit_identical_on_all_ranks(party: Party) -> None:
    for world_size in (2, 3, 4, 5):
        members = party.meet(world_size)
        for dtype in (torch.float32, torch.bfloat16):
            for count in (1, 2, 7, 1000, 65_537):
                for operation in (ReduceOp.SUM, ReduceOp.AVG):

                    def act(
                        rank: int,
                        group: Any,
                        dtype: torch.dtype = dtype,
                        count: int = count,
                        operation: Any = operation,
                    ) -> bytes:
                        generator = torch.Generator().manual_seed(rank)
                        tensor = torch.randn(count, generator=generator).to(dtype)
                        group.allreduce(tensor, operation).wait()
                        return bytes(tensor.view(torch.uint8).numpy())

                    assert len(set(party.together(members, act))) == 1, (world_size, dtype, count)


@pytest.mark.parametrize("sizes", [[4, 4, 4], [0, 5, 1], [1, 0, 9]], ids=str)
@pytest.mark.parametrize("operation", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_reduce_scatter_gives_each_rank_its_part_of_an_allreduce(
    party: Party, dtype: torch.dtype, operation: Any, sizes: list[int]
) -> None:
    """Whatever moves less: an exchange of the parts, or the allreduce, where one rank wants nearly all."""
    if operation == ReduceOp.AVG and dtype is torch.int8:
        pytest.skip("an average of whole numbers is none")

    def act(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        whole = (torch.arange(sum(sizes)) % 7 + 3 * rank).to(dtype)
        parts, output = list(torch.split(whole.clone(), sizes)), torch.empty(sizes[rank], dtype=dtype)
        options = ReduceScatterOptions()
        options.reduceOp = ReduceOp(operation)
        work = group.reduce_scatter([output], [parts], options)
        assert torch.equal(work.get_future().wait()[0], output)
        assert work.wait()
        assert work.is_completed()
        if len(set(sizes)) == 1:
            again = torch.empty_like(output)
            group._reduce_scatter_base(again, whole, options).wait()
            assert torch.equal(again, output)
        group.allreduce(whole, operation).wait()
        return output, torch.split(whole, sizes)[rank]

    for output, expected in party.together(party.meet(3), act):
        assert torch.allclose(output, expected)
