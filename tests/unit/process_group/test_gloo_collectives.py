"""Every collective through the wrapper: called as a method, by torch.distributed, and by DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._C._distributed_c10d import ReduceScatterOptions
from torch.distributed import P2POp, ReduceOp
from torch.nn.parallel import DistributedDataParallel

from tests.versions import NEEDS_ALLTOALL_OF_LISTS
from torchft_like.errors import ProcessGroupError
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo

from .conftest import Party

# torch 2.13 renames some functions; the old names are those of every version that is supported.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

WORLD = 3
Act = Callable[[int, Any], Tensor | list[Tensor]]


def own(rank: int, size: int = 2) -> Tensor:
    """Each rank's tensor: 1, 2, 3..."""
    return torch.full((size,), float(rank + 1))


def blank(*shape: int) -> Tensor:
    return torch.full(shape, -1.0)


def all_reduce(rank: int, group: Any) -> Tensor:
    tensor = own(rank)
    dist.all_reduce(tensor, group=group)
    return tensor


def all_reduce_average(rank: int, group: Any) -> Tensor:
    tensor = own(rank)
    dist.all_reduce(tensor, ReduceOp.AVG, group=group)
    return tensor


def all_reduce_async(rank: int, group: Any) -> Tensor:
    tensor = own(rank)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    return tensor


def all_reduce_coalesced(rank: int, group: Any) -> list[Tensor]:
    tensors = [own(rank), own(rank, 1)]
    group.allreduce_coalesced(tensors).wait()
    return tensors


def broadcast(rank: int, group: Any) -> Tensor:
    tensor = own(rank)
    dist.broadcast(tensor, group_src=1, group=group)
    return tensor


def broadcast_one(rank: int, group: Any) -> Tensor:
    tensor = own(rank)
    group.broadcast_one(tensor, 2).wait()
    return tensor


def reduce(rank: int, group: Any) -> Tensor:
    tensor = own(rank)
    dist.reduce(tensor, group_dst=0, group=group)
    return tensor if rank == 0 else blank(2)


def all_gather(rank: int, group: Any) -> list[Tensor]:
    outputs = [blank(2) for _ in range(WORLD)]
    dist.all_gather(outputs, own(rank), group=group)
    return outputs


def all_gather_coalesced(rank: int, group: Any) -> list[Tensor]:
    outputs = [[blank(2), blank(1)] for _ in range(WORLD)]
    group.allgather_coalesced(outputs, [own(rank), own(rank, 1)]).wait()
    return [tensor for per_rank in outputs for tensor in per_rank]


def all_gather_into_tensor(rank: int, group: Any) -> Tensor:
    output = blank(2 * WORLD)
    dist.all_gather_into_tensor(output, own(rank), group=group)
    return output


def all_gather_into_tensor_coalesced(rank: int, group: Any) -> Tensor:
    output = blank(2 * WORLD)
    group.allgather_into_tensor_coalesced([output], [own(rank)]).wait()
    return output


def gather(rank: int, group: Any) -> list[Tensor]:
    outputs = [blank(2) for _ in range(WORLD)]
    dist.gather(own(rank), outputs if rank == 1 else None, group_dst=1, group=group)
    return outputs


def scatter(rank: int, group: Any) -> Tensor:
    output = blank(2)
    dist.scatter(output, [own(r) for r in range(WORLD)] if rank == 0 else None, group_src=0, group=group)
    return output


def reduce_scatter(rank: int, group: Any) -> Tensor:
    output = blank(2)
    dist.reduce_scatter(output, [own(r) for r in range(WORLD)], group=group)
    return output


def reduce_scatter_tensor(rank: int, group: Any) -> Tensor:
    output = blank(2)
    dist.reduce_scatter_tensor(output, torch.cat([own(r) for r in range(WORLD)]), group=group)
    return output


def reduce_scatter_tensor_coalesced(rank: int, group: Any) -> Tensor:
    output = blank(2)
    group.reduce_scatter_tensor_coalesced([output], [torch.cat([own(r) for r in range(WORLD)])]).wait()
    return output


def all_to_all(rank: int, group: Any) -> list[Tensor]:
    outputs = [blank(2) for _ in range(WORLD)]
    dist.all_to_all(outputs, [own(rank) * 10 + r for r in range(WORLD)], group=group)
    return outputs


def all_to_all_single(rank: int, group: Any) -> Tensor:
    output = blank(WORLD)
    dist.all_to_all_single(output, own(rank, WORLD) * 10 + torch.arange(WORLD), group=group)
    return output


def send_and_recv(rank: int, group: Any) -> Tensor:
    tensor = own(rank)
    if rank == 0:
        dist.send(tensor, group_dst=1, group=group)
    elif rank == 1:
        dist.recv(tensor, group_src=0, group=group)
    return tensor


def recv_from_anybody(rank: int, group: Any) -> Tensor:
    tensor = own(rank)
    if rank == 2:
        dist.send(tensor, group_dst=0, group=group)
    elif rank == 0:
        group.recv_anysource([tensor], 0).wait()
    return tensor


def exchange_with_isend_and_irecv(rank: int, group: Any) -> Tensor:
    tensor = blank(2)
    works = [
        dist.isend(own(rank), group_dst=(rank + 1) % WORLD, group=group),
        dist.irecv(tensor, group_src=(rank - 1) % WORLD, group=group),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return tensor


def barriers(rank: int, group: Any) -> Tensor:
    dist.barrier(group=group)
    group.monitored_barrier()
    return own(0)


def objects(rank: int, group: Any) -> Tensor:
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    return torch.tensor([float(entry["rank"]) for entry in gathered])


TEN = [torch.tensor([10.0, 11, 12]), torch.tensor([20.0, 21, 22]), torch.tensor([30.0, 31, 32])]
EXPECTED: list[Any] = [  # what is called, and what each rank has then
    (all_reduce, lambda r: torch.full((2,), 6.0)),
    (all_reduce_average, lambda r: torch.full((2,), 2.0)),
    (all_reduce_async, lambda r: torch.full((2,), 6.0)),
    (all_reduce_coalesced, lambda r: [torch.full((2,), 6.0), torch.full((1,), 6.0)]),
    (broadcast, lambda r: own(1)),
    (broadcast_one, lambda r: own(2)),
    (reduce, lambda r: torch.full((2,), 6.0) if r == 0 else blank(2)),
    (all_gather, lambda r: [own(0), own(1), own(2)]),
    (all_gather_coalesced, lambda r: [t for i in range(3) for t in (own(i), own(i, 1))]),
    (all_gather_into_tensor, lambda r: torch.cat([own(0), own(1), own(2)])),
    (all_gather_into_tensor_coalesced, lambda r: torch.cat([own(0), own(1), own(2)])),
    (gather, lambda r: [own(0), own(1), own(2)] if r == 1 else [blank(2)] * 3),
    (scatter, own),
    (reduce_scatter, lambda r: own(r) * 3),
    (reduce_scatter_tensor, lambda r: own(r) * 3),
    (reduce_scatter_tensor_coalesced, lambda r: own(r) * 3),
    pytest.param(all_to_all, lambda r: [ten[r].expand(2) for ten in TEN], marks=NEEDS_ALLTOALL_OF_LISTS),
    (all_to_all_single, lambda r: torch.stack(TEN)[:, r]),
    (send_and_recv, lambda r: own(0) if r == 1 else own(r)),
    (recv_from_anybody, lambda r: own(2) if r == 0 else own(r)),
    (exchange_with_isend_and_irecv, lambda r: own((r - 1) % 3)),
    (barriers, lambda r: own(0)),
    (objects, lambda r: torch.arange(3.0)),
]


@pytest.fixture(scope="module")
def groups(store: Any) -> Any:
    party = Party(store)
    try:
        members = party.meet(WORLD)
        for rank, member in enumerate(members):
            member.register(f"collectives-{rank}")
        yield party, members
        for member in members:
            member.unregister()
    finally:
        party.end()


@pytest.mark.parametrize(("act", "expected"), EXPECTED, ids=lambda value: getattr(value, "__name__", None))
def test_three_members_get_the_right_result_of(
    groups: tuple[Party, list[ProcessGroup]], act: Act, expected: Callable[[int], Any]
) -> None:
    party, members = groups
    for rank, result in enumerate(party.together(members, act)):
        wanted = expected(rank)
        for got, want in zip(as_list(result), as_list(wanted), strict=True):
            assert torch.equal(got, want), (rank, result, wanted)


def as_list(value: Tensor | list[Tensor]) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


def test_a_future_carries_the_tensors_and_runs_callbacks(party: Party) -> None:
    def act(rank: int, group: Any) -> float:
        tensor = own(rank)
        doubled = group.allreduce([tensor]).get_future().then(lambda f: f.value()[0] * 2)
        return float(doubled.wait()[0])

    assert party.together(party.meet(2), act) == [6.0, 6.0]


class TestTensorsThatAreNotWhatLiesInMemory:
    """Views that negate or conjugate, also those that lie in memory without gaps."""

    @pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1)])
    def test_a_negative_view_is_sent_and_received_as_what_it_shows(
        self, party: Party, shape: tuple[int, ...]
    ) -> None:
        def act(rank: int, group: Any) -> Tensor:
            tensor = torch.full(shape, 1 + 2j).conj().imag if rank == 0 else torch.zeros(shape)
            assert tensor.is_neg() == (rank == 0)
            group.broadcast([tensor]).wait()
            assert torch.equal(tensor, torch.full(shape, -2.0))
            group.allreduce([tensor]).wait()
            return tensor

        for result in party.together(party.meet(2), act):
            assert torch.equal(result, torch.full(shape, -4.0))

    def test_negative_views_are_reduced_and_scattered(self, party: Party) -> None:
        def act(rank: int, group: Any) -> float:
            output, *parts = (torch.tensor([1 + 2j]).conj().imag for _ in range(3))
            group.reduce_scatter([output], [parts]).wait()
            return output.item()

        assert party.together(party.meet(2), act) == [-4.0, -4.0]

    @pytest.mark.parametrize("make", [lambda t: t.conj(), lambda t: t.conj().mT])
    def test_a_conjugate_view_is_sent_and_received_as_what_it_shows(
        self, party: Party, make: Callable[[Tensor], Tensor]
    ) -> None:
        values = torch.tensor([[1 + 2j, 3 + 4j], [5 + 6j, 7 + 8j]])

        def act(rank: int, group: Any) -> Tensor:
            tensor = make(values.clone() if rank == 0 else torch.zeros_like(values))
            assert tensor.is_conj()
            group.broadcast([tensor]).wait()
            return tensor

        for result in party.together(party.meet(2), act):
            assert torch.equal(result, make(values))


@pytest.mark.parametrize("is_awaited_inside", [True, False])
def test_tensors_made_in_inference_mode_are_written_to_by_any_thread(
    party: Party, is_awaited_inside: bool
) -> None:
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


@NEEDS_ALLTOALL_OF_LISTS
@pytest.mark.usefixtures("no_operator")
@pytest.mark.parametrize("is_checking", [True, False])
def test_outputs_made_in_inference_mode_are_written_to_outside_of_it(party: Party, is_checking: bool) -> None:
    def act(rank: int, group: Any) -> list[list[float]]:
        one = torch.ones(2)
        with torch.inference_mode():
            whole, left, right, both = blank(4), blank(2), blank(2), blank(2)
            lists = [[blank(2), blank(2)] for _ in range(2)]
            sparse = one.to_sparse()
        group._allgather_base(whole, one).wait()
        group.allgather([lists[0]], [one]).wait()
        group.gather(*([[lists[1]]] if rank == 0 else [[]]), [one]).wait()
        group.allreduce_coalesced([left, right]).wait()
        group.allreduce([sparse]).wait()
        group.alltoall([both[:1], both[1:]], [one[:1], one[1:]]).wait()
        return [
            tensor.tolist() for tensor in (whole, *lists[0], *lists[1], left, right, both, sparse.to_dense())
        ]

    groups = party.meet(2, lambda: ProcessGroupGloo(30, check_collectives=is_checking))
    ones, summed = [1.0] * 2, [-2.0] * 2
    for rank, found in enumerate(party.together(groups, act)):
        gathered = [blank(2).tolist() if rank else ones] * 2
        assert found == [[1.0] * 4, ones, ones, *gathered, summed, summed, ones, [2.0] * 2]


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


def party_of_one() -> ProcessGroup:
    group = ProcessGroupGloo(30)
    group.configure("127.0.0.1:1/nobody-listens-there", 0, 1)
    return group


def test_functional_collectives_work_on_a_registered_group(party: Party) -> None:
    members = party.meet(2)
    for rank, member in enumerate(members):
        member.register(f"member-{rank}")

    def act(rank: int, group: Any) -> list[list[float]]:
        results = [
            functional.all_reduce(own(rank), "sum", group),
            functional.all_gather_tensor(own(rank), 0, group),
            functional.reduce_scatter_tensor(torch.cat([own(0), own(1)]), "sum", 0, group),
            functional.all_to_all_single(own(rank) * 10 + torch.arange(2), None, None, group),
            functional.broadcast(own(rank), 1, group),
        ]
        return [functional.wait_tensor(result).tolist() for result in results]  # type: ignore[no-untyped-call]

    try:
        first, second = party.together(members, act)
    finally:
        for member in members:
            member.unregister()
    assert first == [[3.0, 3.0], [1.0, 1.0, 2.0, 2.0], [2.0, 2.0], [10.0, 20.0], [2.0, 2.0]]
    assert second == [[3.0, 3.0], [1.0, 1.0, 2.0, 2.0], [4.0, 4.0], [11.0, 21.0], [2.0, 2.0]]


def test_a_registered_group_has_a_name_and_knows_global_ranks_after_each_configure(party: Party) -> None:
    members = party.meet(2)
    with pytest.raises(ProcessGroupError, match="register"):
        _ = members[0].group_name
    for rank, member in enumerate(members):
        member.register(f"ranks-{rank}")
    try:
        assert members[0].group_name == "torchft-gloo:ranks-0"
        assert dist.get_process_group_ranks(members[0]) == [0, 1]
        with pytest.raises(ProcessGroupError, match="already"):
            members[0].register("twice")
        with pytest.raises(ProcessGroupError, match="already"):
            party.meet(1)[0].register("ranks-0")
        prefix = party.prefix()
        party.together(members, lambda r, g: g.configure(prefix, r, 2, global_ranks=[3, 7]))
        assert dist.get_process_group_ranks(members[0]) == [3, 7]

        def act(rank: int, group: Any) -> float:
            tensor = own(rank)
            dist.broadcast(tensor, src=7, group=group)
            return float(tensor[0])

        assert party.together(members, act) == [2.0, 2.0]
    finally:
        for member in members:
            member.unregister()
            member.unregister()


def test_ddp_trains_over_the_group(party: Party) -> None:
    def act(rank: int, group: Any) -> list[float]:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=group)
        model(own(rank)).sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        return gradient.flatten().tolist()

    assert party.together(party.meet(2), act) == [[1.5, 1.5]] * 2


def test_a_ddp_hook_may_return_a_continued_future(party: Party) -> None:
    def act(rank: int, group: Any) -> list[float]:
        def hook(state: Any, bucket: Any) -> Any:
            future = group.allreduce([bucket.buffer()]).get_future()
            return future.then(lambda f: f.value()[0].div_(2))

        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=group)
        hook.__annotations__.clear()  # torch insists on the class itself, not on its name
        model.register_comm_hook(None, hook)
        model(own(rank)).sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        return gradient.flatten().tolist()

    assert party.together(party.meet(2), act) == [[1.5, 1.5]] * 2


def test_batched_sends_and_receives_work(party: Party) -> None:
    members = party.meet(2)
    for rank, member in enumerate(members):
        member.register(f"batched-{rank}")

    def act(rank: int, group: Any) -> float:
        tensor = blank(1)
        operations = [
            P2POp(dist.isend, own(rank, 1), group=group, group_peer=1 - rank),
            P2POp(dist.irecv, tensor, group=group, group_peer=1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return float(tensor[0])

    try:
        assert party.together(members, act) == [2.0, 1.0]
    finally:
        for member in members:
            member.unregister()


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


def test_a_reduce_scatter_over_a_part_of_its_own_input(party: Party) -> None:
    """As FSDP passes it: the output is where the caller's part of the input lies."""

    def act(rank: int, group: Any) -> list[float]:
        whole = torch.arange(6.0) + rank
        output = whole[2 * rank : 2 * rank + 2]
        group._reduce_scatter_base(output, whole).wait()
        return output.tolist()

    assert party.together(party.meet(3), act) == [[3.0, 6.0], [9.0, 12.0], [15.0, 18.0]]
