"""ProcessGroupGang over real Gloo groups, whose members are threads."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.unit.gang.conftest import CPU, Crew, MakeCrew
from tests.unit.process_group.conftest import Party
from torchft_like.errors import CollectiveMismatchError, NotSupportedError
from torchft_like.gang import (
    FakeGang,
    Gang,
    GangError,
    ProcessGroupGang,
    ReduceOperation,
    StaleGangError,
    all_sum,
    broadcast_flag,
)
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FaultInjectingProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
)
from torchft_like.process_group.generation import Generation

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
COMPLEX = [torch.complex64, torch.complex128]
OTHERS = [torch.bool, torch.uint64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS + WHOLES + COMPLEX, ids=str)
def test_reductions_are_those_of_torch(crew: MakeCrew, dtype: torch.dtype) -> None:
    whole = torch.tensor([[1, 2], [3, 4], [5, 6]]).to(dtype)  # a row for each rank

    def act(gang: ProcessGroupGang) -> dict[ReduceOperation, Any]:
        found: dict[ReduceOperation, Any] = {}
        for op in ReduceOperation:
            tensor = whole[gang.rank].clone()
            try:
                gang.all_reduce(tensor, op)
            except ValueError as error:
                found[op] = error
            else:
                found[op] = tensor.tolist()
        return found

    for found in crew(3).together(act):
        assert found[ReduceOperation.SUM] == [9, 12]
        if dtype.is_complex:
            assert isinstance(found[ReduceOperation.MAX], ValueError)
        else:
            assert found[ReduceOperation.PRODUCT] == [15, 48]
            assert found[ReduceOperation.MIN] == [1, 2]
            assert found[ReduceOperation.MAX] == [5, 6]
        if dtype.is_floating_point or dtype.is_complex:
            assert found[ReduceOperation.MEAN] == [3, 4]
        else:
            assert isinstance(found[ReduceOperation.MEAN], ValueError)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex32], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("number", [40000.0, 2.0**-24])
def test_a_mean_neither_overflows_nor_vanishes(crew: MakeCrew, dtype: torch.dtype, number: float) -> None:
    def act(gang: Gang) -> bool:
        tensor = torch.full((2,), number, dtype=dtype)
        before = tensor.clone()
        gang.all_reduce(tensor, ReduceOperation.MEAN)
        return tensor.dtype is dtype and torch.equal(as_real(tensor), as_real(before))

    assert crew(2).together(act) == [True] * 2
    assert act(FakeGang(CPU, size=2))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def test_reductions_of_bools_are_or_and_and(crew: MakeCrew) -> None:
    def act(gang: ProcessGroupGang) -> dict[ReduceOperation, list[bool]]:
        found = {}
        for op in set(ReduceOperation) - {ReduceOperation.MEAN}:
            tensor = torch.tensor([True, gang.rank == 0, False])
            gang.all_reduce(tensor, op)
            found[op] = tensor.tolist()
        return found

    for found in crew(2).together(act):
        assert found[ReduceOperation.SUM] == found[ReduceOperation.MAX] == [True, True, False]
        assert found[ReduceOperation.PRODUCT] == found[ReduceOperation.MIN] == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.uint64, torch.float8_e4m3fn], ids=str)
def test_dtypes_that_backends_lack_are_added_up_in_others(crew: MakeCrew, dtype: torch.dtype) -> None:
    def act(gang: ProcessGroupGang) -> torch.Tensor:
        tensor = torch.tensor([1, 3]).to(dtype)
        gang.all_reduce(tensor, ReduceOperation.SUM)
        return tensor

    gangs = crew(2)
    for found in gangs.together(act):
        assert found.dtype == dtype
        assert found.to(torch.float32).tolist() == [2, 6]
    with pytest.raises(NotSupportedError, match="uint64 tensors have no MAX"):
        gangs.gangs[0].all_reduce(torch.ones(1, dtype=torch.uint64), ReduceOperation.MAX)


@pytest.mark.parametrize("dtype", FLOATS + WHOLES + COMPLEX + OTHERS, ids=str)
def test_every_dtype_is_broadcast_and_gathered(crew: MakeCrew, dtype: torch.dtype) -> None:
    rows = torch.tensor([[0, 1], [1, 0]]).to(dtype)

    def act(gang: ProcessGroupGang) -> list[Any]:
        tensor = rows[gang.rank].clone()
        stacked, joined = torch.zeros(2, 2, dtype=dtype), torch.zeros(4, dtype=dtype)
        listed = [torch.zeros(2, dtype=dtype) for _ in range(2)]
        gang.all_gather(stacked, tensor)
        gang.all_gather(joined, tensor)
        gang.all_gather_to_list(listed, tensor)
        gang.broadcast(tensor, source_rank=1)
        return [x.tolist() for x in (stacked, joined.view(2, 2), torch.stack(listed), tensor)]

    expected = rows.tolist()
    assert crew(2).together(act) == [[expected] * 3 + [expected[1]]] * 2


def test_tensors_with_gaps_without_dimensions_and_without_elements(crew: MakeCrew) -> None:
    def act(gang: ProcessGroupGang) -> list[Any]:
        whole = torch.full((2, 3), float(gang.rank))
        column = whole[:, 1]
        gang.all_reduce(column, ReduceOperation.SUM)
        gang.broadcast(whole.t()[0], source_rank=2)
        scalars, rows = torch.zeros(3), torch.zeros(3, 2)
        gang.all_gather(scalars, torch.tensor(float(gang.rank)))
        gang.all_gather(rows, whole[:, 2])
        empty = torch.zeros(0, 3)
        gang.all_reduce(empty, ReduceOperation.SUM)
        gang.broadcast(empty)
        gang.all_gather(torch.zeros(3, 0, 3), empty)
        parameter = torch.nn.Parameter(torch.ones(2))
        gang.all_reduce(parameter, ReduceOperation.SUM)
        return [whole.tolist(), scalars.tolist(), rows.tolist(), parameter.tolist()]

    found = crew(3).together(act)
    for rank in range(3):
        assert found[rank] == [
            [[2.0, 3.0, float(rank)]] * 2,
            [0.0, 1.0, 2.0],
            [[0.0] * 2, [1.0] * 2, [2.0] * 2],
            [3.0, 3.0],
        ]


def test_views_that_conjugate_are_taken_for_what_they_show(crew: MakeCrew) -> None:
    def act(gang: ProcessGroupGang) -> list[Any]:
        seen, total, sent = (torch.tensor([complex(1, 1 + gang.rank)]).conj() for _ in range(3))
        gathered = torch.zeros(2, 1, dtype=seen.dtype)
        gang.all_gather(gathered, seen)
        gang.all_reduce(total, ReduceOperation.SUM)
        gang.broadcast(sent, source_rank=1)
        assert total.is_conj()
        assert sent.is_conj()
        return [gathered.flatten().tolist(), total.tolist(), sent.tolist()]

    assert crew(2).together(act) == [[[1 - 1j, 1 - 2j], [2 - 3j], [1 - 2j]]] * 2


ROWS = torch.zeros(3, 2)
WRONG: list[tuple[Callable[[Gang], object], str]] = [
    (lambda gang: gang.broadcast(ROWS, 2), r"source_rank 2 is not within \[0, 2\)"),
    (lambda gang: gang.broadcast(ROWS, -1), r"source_rank -1 is not within \[0, 2\)"),
    (lambda gang: gang.broadcast_objects([1], 2), r"source_rank 2 is not within \[0, 2\)"),
    (lambda gang: broadcast_flag(gang, True, source_rank=2), r"source_rank 2 is not within \[0, 2\)"),
    *(
        (lambda gang, shape=shape: gang.all_gather(torch.zeros(shape), ROWS), r"not \(2, 3, 2\) or \(6, 2\)")
        for shape in [(5, 2), (3, 2), (3, 3, 2), (12,), (2, 2, 3), (1, 2, 3, 2)]
    ),
    (lambda gang: gang.all_gather(torch.zeros(6, 2).int(), ROWS), "output_tensor is torch.int32"),
    (lambda gang: gang.all_gather(torch.zeros(2, 6).t(), ROWS), "not contiguous"),
    (lambda gang: gang.all_gather(torch.zeros(6, 2).to_mkldnn(), ROWS), "dense tensors"),
    (lambda gang: gang.all_gather(torch.zeros(6, 2).to_sparse(), ROWS), "dense tensors"),
    (lambda gang: gang.all_gather(torch.zeros(6, 2), ROWS.to_sparse()), "dense tensors"),
    (lambda gang: gang.all_gather_to_list([ROWS], ROWS), "1 tensors for a gang of 2"),
    (lambda gang: gang.all_gather_to_list([ROWS, ROWS[:1]], ROWS), r"s\[1\] has the shape \(1, 2\)"),
    (lambda gang: gang.all_reduce(ROWS.long(), ReduceOperation.MEAN), "floating point"),
    (lambda gang: gang.all_reduce(ROWS, "sum"), "no ReduceOperation"),  # type: ignore[arg-type]
    (lambda gang: gang.all_reduce(ROWS.to_sparse(), ReduceOperation.SUM), "dense tensors"),
    (lambda gang: gang.all_reduce(ROWS.to("meta"), ReduceOperation.SUM), "meta"),
    (lambda gang: gang.all_reduce(ROWS[:1].expand(3, 2), ReduceOperation.SUM), "expanded"),
    (lambda gang: gang.all_gather_to_list([ROWS, ROWS[:1].expand(3, 2)], ROWS), "expanded"),
    (lambda gang: gang.all_gather_to_list([ROWS, ROWS.to_sparse()], ROWS), "dense tensors"),
    (lambda gang: gang.broadcast(quantized()), "dense tensors"),
    (lambda gang: gang.all_gather_to_list([quantized(), quantized()], quantized()), "dense tensors"),
    (lambda gang: gang.create_gang([]), "at least one rank"),
    (lambda gang: gang.create_gang([0, 2]), r"ranks \[2\] are not within \[0, 2\)"),
    (lambda gang: gang.create_gang([-1]), r"ranks \[-1\] are not within \[0, 2\)"),
    (lambda gang: gang.create_gang([0, 0]), "duplicates"),
    (lambda gang: gang.split([[0, 1], [1]]), r"\[1\] are in more than one"),
]


def quantized() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch will do without
        return torch.quantize_per_tensor(ROWS, 0.1, 0, torch.quint8)


def test_a_tensor_on_a_device_that_the_group_does_not_serve_is_refused(crew: MakeCrew) -> None:
    gang = crew(2).gangs[0]
    with FakeTensorMode():
        elsewhere = torch.zeros(2, device="cuda")
        acts: list[Callable[[], object]] = [
            lambda: gang.all_reduce(elsewhere, ReduceOperation.SUM),
            lambda: gang.all_gather(torch.zeros(2, 2, device="cuda"), elsewhere),
            lambda: gang.broadcast(elsewhere),
        ]
        for act in acts:
            with pytest.raises(ValueError, match="moves cpu tensors"):
                act()


@pytest.mark.parametrize("is_fake", [False, True])
def test_wrong_arguments_are_refused_before_anything_is_sent(crew: MakeCrew, is_fake: bool) -> None:
    # The other one never calls: whatever is sent would hang.
    gang = FakeGang(CPU, size=2) if is_fake else crew(2).gangs[0]
    for act, match in WRONG:
        with pytest.raises(ValueError, match=match):
            act(gang)


def test_a_tensor_of_another_shape_is_an_error_on_all_and_the_gang_goes_on(crew: MakeCrew) -> None:
    gangs = crew(3, lambda: ProcessGroupGloo(30, check_collectives=True))

    def act(gang: ProcessGroupGang) -> None:
        gang.all_reduce(torch.ones(2 + (gang.rank == 1)), ReduceOperation.SUM)

    for error in gangs.outcomes(act):
        assert isinstance(error, GangError)
        assert isinstance(error.__cause__, CollectiveMismatchError)
    assert gangs.together(lambda gang: all_sum(gang, 1).item()) == [3] * 3


# ------------------------------------------------------------------------------- helpers


def test_a_flag_is_that_of_the_source(crew: MakeCrew) -> None:
    gangs = crew(3)
    assert gangs.together(lambda gang: broadcast_flag(gang, gang.rank == 1, 1)) == [True] * 3
    assert gangs.together(lambda gang: broadcast_flag(gang, gang.rank == 1)) == [False] * 3


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.5, 2.0, 3.0], torch.tensor(6.5)),
        ([1, 2, 3], torch.tensor(6)),
        ([1, 2.5, -3], torch.tensor(0.5)),
        ([2**53 + 1, 2**53 + 1, -1], torch.tensor(2**54 + 1)),
        ([-(2**62), -(2**62), 5], torch.tensor(-(2**63) + 5)),
        ([float("inf"), 1, 2], torch.tensor(float("inf"))),
        ([np.float32(1.5), np.int64(2), True], torch.tensor(4.5)),
        ([np.uint8(200), np.uint8(200), torch.tensor([7])], torch.tensor(407)),
        ([np.longdouble(1.5), np.array(2), np.array([3.0])], torch.tensor(6.5)),
        ([torch.tensor(0.25, dtype=torch.float64)] * 3, torch.tensor(0.75, dtype=torch.float64)),
    ],
)
def test_numbers_of_any_kind_are_added(crew: MakeCrew, values: list[float], expected: torch.Tensor) -> None:
    for found in crew(3).together(lambda gang: all_sum(gang, values[gang.rank])):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_sums_of_what_is_no_number_or_too_large_are_refused(crew: MakeCrew) -> None:
    gangs = crew(2)
    with pytest.raises(TypeError, match="not str"):
        all_sum(gangs.gangs[0], "1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tensors of 2 elements: use all_reduce"):
        all_sum(gangs.gangs[0], torch.ones(2))
    with pytest.raises(TypeError, match="arrays of 2 elements: use all_reduce"):
        all_sum(gangs.gangs[0], np.ones(2))
    with pytest.raises(ValueError, match="64 bits"):
        all_sum(gangs.gangs[0], 2**63)
    assert all(isinstance(error, ValueError) for error in gangs.outcomes(lambda gang: all_sum(gang, 2**62)))


# ----------------------------------------------------------------------------- sub-gangs


def test_parts_have_parts(crew: MakeCrew) -> None:
    def act(gang: ProcessGroupGang) -> Any:
        half = gang.split([[1, 3], [2, 0]])
        assert half is not None
        one = half.create_gang([1])
        with_itself = None if one is None else all_sum(one, gang.rank).item()
        return all_sum(half, gang.rank).item(), with_itself

    assert crew(4).together(act) == [(2, 0), (4, None), (2, None), (4, 3)]


@pytest.mark.usefixtures("no_operator")
def test_a_part_inherits_class_timeout_and_options(party: Party, crew: MakeCrew) -> None:
    gangs = crew(2, lambda: ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(17, check_collectives=False)))

    def act(gang: ProcessGroupGang) -> bool:
        part = gang.create_gang([1, 0])
        assert part is not None
        group = part.as_process_group()
        assert isinstance(group, ErrorSwallowingProcessGroupWrapper)
        inner = group._pg
        assert isinstance(inner, ProcessGroupGloo)
        return inner._timeout.total_seconds() == 17 and inner._check is False

    assert gangs.together(act) == [True, True]


def test_a_dummy_group_is_a_gang_of_one() -> None:
    gang = ProcessGroupGang(ProcessGroupDummy(0, 1), CPU)
    part = gang.create_gang([0])
    assert part is not None
    assert all_sum(part, 3).item() == 3


def test_members_that_are_given_different_ranks_all_hear_of_it(crew: MakeCrew) -> None:
    gangs = crew(3)
    found = gangs.outcomes(lambda gang: gang.create_gang([0, 1 + (gang.rank == 2)]))
    assert all(isinstance(error, ValueError) and "different ranks" in str(error) for error in found)
    assert gangs.together(lambda gang: all_sum(gang, 1).item()) == [3] * 3


def test_the_group_of_a_part_is_known_to_torch(crew: MakeCrew) -> None:
    def act(gang: ProcessGroupGang) -> list[int]:
        part = gang.create_gang([2, 1])
        if part is None:
            return []
        group = part.as_process_group()
        ranks = dist.get_process_group_ranks(group)
        assert dist.get_backend(group) == "torchft-gloo"
        tensor = torch.tensor([gang.rank])
        dist.broadcast(tensor, src=2, group=group)  # a rank of the job
        assert tensor.item() == 2
        part.close()
        part.close()
        with pytest.raises(GangError, match="closed"):
            part.barrier()
        return ranks

    assert crew(3).together(act) == [[], [2, 1], [2, 1]]


# -------------------------------------------------------------------------------- errors


def test_who_is_not_in_a_group_has_no_gang() -> None:
    with pytest.raises(ValueError, match="member"):
        ProcessGroupGang(dist.GroupMember.NON_GROUP_MEMBER, CPU)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not meta"):
        ProcessGroupGang.create_default_process_group(torch.device("meta"))
    for timeout in (timedelta(0), timedelta(seconds=-1), "5"):
        with pytest.raises(ValueError, match="positive number of seconds or a timedelta"):
            ProcessGroupGang.create_default_process_group(CPU, timeout=timeout)  # type: ignore[arg-type]


def test_every_function_of_a_group_that_is_not_configured_raises_a_gang_error_with_its_cause() -> None:
    for group in (ProcessGroupGloo(30), ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(30))):
        for act in functions(ProcessGroupGang(group, CPU)):
            with pytest.raises(GangError, match="never configured") as raised:
                act()
            assert raised.value.__cause__ is not None


def functions(gang: ProcessGroupGang) -> list[Callable[[], object]]:
    """A call of each that communicates, as a gang of two has it."""
    one, two = torch.ones(1), torch.ones(2)
    return [
        gang.barrier,
        lambda: gang.all_reduce(one, ReduceOperation.SUM),
        lambda: gang.all_gather(two, one),
        lambda: gang.all_gather_to_list([one, one], one),
        lambda: gang.broadcast(one),
        lambda: gang.broadcast_objects([1]),
        lambda: gang.create_gang([0, 1]),
        lambda: all_sum(gang, 1),
        lambda: broadcast_flag(gang, True),
    ]


def abort(gangs: Crew, rank: int) -> None:
    group: Any = gangs.gangs[rank].as_process_group()
    group.abort("the test says so")


def test_errors_that_a_group_swallows_are_raised(crew: MakeCrew) -> None:
    faulty = [FaultInjectingProcessGroup(ProcessGroupGloo(30)) for _ in range(2)]
    groups = iter(faulty)
    gangs = crew(2, lambda: ErrorSwallowingProcessGroupWrapper(next(groups)))
    for group in faulty:
        group.fail("allreduce", RuntimeError("planted"))

    def act(gang: ProcessGroupGang) -> None:
        gang.all_reduce(torch.ones(1), ReduceOperation.SUM)

    for error in gangs.outcomes(act):
        assert isinstance(error, GangError)
        assert "planted" in str(error)
    assert [group.injected for group in faulty] == [1, 1]
    with pytest.raises(GangError, match="planted"):  # skipped, and so not reduced
        gangs.gangs[0].barrier()


def test_a_function_that_the_backend_lacks_is_not_supported(crew: MakeCrew) -> None:
    group = FaultInjectingProcessGroup(ProcessGroupDummy(0, 1))
    group.refuse("barrier", NotImplementedError("no barrier"))
    with pytest.raises(NotSupportedError, match="no barrier"):
        ProcessGroupGang(group, CPU).barrier()


def test_a_part_ends_with_the_configuration_in_which_it_was_made(party: Party) -> None:
    groups = party.meet(3)
    gangs = [ProcessGroupGang(group, CPU) for group in groups]
    parts = party.together(gangs, lambda _, gang: gang.split([[0, 1], [2]]))
    inner = party.together(parts[:2], lambda _, gang: gang.create_gang([1, 0]))
    blocked = party.aside(inner[0].barrier)
    party.configure(groups)
    with pytest.raises(GangError):  # its own end, or that of the other member, whichever came first
        blocked.result(60)
    for part in (*parts, *inner):
        assert part is not None
        with pytest.raises(StaleGangError, match="derive it again"):
            part.barrier()
    assert party.together(gangs, lambda _, gang: all_sum(gang, 1).item()) == [3] * 3


@pytest.mark.parametrize("agrees", [False, True])
def test_an_abort_of_the_whole_ends_the_making_of_a_part(
    party: Party, monkeypatch: pytest.MonkeyPatch, agrees: bool
) -> None:
    groups = party.meet(2)
    gangs = [ProcessGroupGang(group, CPU) for group in groups]
    making = party.aside(gangs[0].create_gang, [0, 1])
    if agrees:
        monkeypatch.setattr(groups[1], "make_alike", lambda: 1 / 0)
        with pytest.raises(GangError, match="division"):
            gangs[1].create_gang([0, 1])
    groups[0].abort("the other one does not come")
    with pytest.raises(GangError, match="does not come"):
        making.result(60)


def test_the_store_of_a_part_is_served_until_all_have_met(
    crew: MakeCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    gangs, configure, is_made = crew(2), ProcessGroupGloo.configure, threading.Event()

    def late(group: ProcessGroupGloo, address: str, rank: int, *args: Any, **options: Any) -> None:
        configure(group, address, rank, *args, **options)
        assert rank == 0 or not is_made.wait(0.2), "rank 0, which serves it, has gone on"

    def act(gang: ProcessGroupGang) -> None:
        gang.create_gang([0, 1])
        is_made.set()

    monkeypatch.setattr(ProcessGroupGloo, "configure", late)
    gangs.together(act)


def test_an_aborted_part_closes_without_a_wait(crew: MakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    gangs = crew(2)
    parts = gangs.together(lambda gang: gang.create_gang([0, 1]))
    abort(gangs, 0)
    monkeypatch.setattr(Generation, "wait_gone", lambda *_: pytest.fail("it waits"))
    assert parts[0] is not None
    parts[0].close()


# Objects that a gang broadcasts.


@pytest.mark.parametrize("size", [1, 2, 4])
def test_objects_of_the_source_replace_those_of_the_others(crew: MakeCrew, size: int) -> None:
    source = size - 1
    sent = [
        {"a": [1, 2.5, None, True, "text", b"bytes"], ("b", 3): (torch.arange(3), torch.zeros(0, 2))},
        np.arange(4, dtype=np.int16).reshape(2, 2),
        torch.tensor(True),
        torch.arange(6.0).view(2, 3).t(),
    ]

    def act(gang: ProcessGroupGang) -> list[Any]:
        objects: list[Any] = list(sent) if gang.rank == source else [None] * len(sent)
        gang.broadcast_objects(objects, source)
        return objects

    for first, array, flag, turned in crew(size).together(act):
        assert first["a"] == sent[0]["a"]  # type: ignore[index]
        assert torch.equal(first["b", 3][0], torch.arange(3))
        assert first["b", 3][1].shape == (0, 2)
        assert array.tolist() == [[0, 1], [2, 3]]
        assert array.dtype == np.int16
        assert flag.item() is True
        assert torch.equal(turned, torch.arange(6.0).view(2, 3).t())


def test_lists_of_unequal_length_are_an_error_on_every_member(crew: MakeCrew) -> None:
    gangs = crew(3)
    found = gangs.outcomes(lambda gang: gang.broadcast_objects([0] * (1 + (gang.rank == 1))))
    assert len({str(error) for error in found}) == 1
    assert "length 1; rank 1: broadcast_objects src 0 length 2" in str(found[0])
    assert all(isinstance(error, ValueError) for error in found)
    assert gangs.together(lambda gang: broadcast_flag(gang, gang.rank == 2, 2)) == [True] * 3


def test_something_else_than_a_list_is_an_error_on_every_member(crew: MakeCrew) -> None:
    gangs = crew(2)
    found = gangs.outcomes(lambda gang: gang.broadcast_objects([1] if gang.rank == 0 else (None,)))  # type: ignore[arg-type]
    assert all(isinstance(error, ValueError) for error in found)
    assert "rank 1: broadcast_objects src 0 length of no list" in str(found[0])
    assert str(found[1]) == "objects are given in a list, not in a tuple"
    assert gangs.together(lambda gang: all_sum(gang, 1).item()) == [2, 2]


def test_an_object_that_does_not_fit_into_memory_is_an_error_on_every_member(crew: MakeCrew) -> None:
    gangs = crew(2)
    found = gangs.outcomes(lambda gang: gang.broadcast_objects([torch.zeros(1).expand(2**46)]))
    assert "memory" in str(found[0])
    assert isinstance(found[1], GangError)
    assert "cannot send its objects" in str(found[1])
    assert gangs.together(lambda gang: all_sum(gang, 1).item()) == [2, 2]
