"""Gangs: how they are made of a root, closed, and found by those who were not handed them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context

import pytest
import torch

from torchft_like.errors import GangError, OperationalError, TopologyError
from torchft_like.gang import (
    FakeGang,
    Gang,
    GangContext,
    Gangs,
    ManagedGang,
    ProcessGroupGang,
    ReduceOperation,
    create_fake_gangs,
    create_fsdp_gangs,
    create_parallel_gangs,
    get_current_gangs,
    get_default_gangs,
    maybe_get_current_gangs,
    raise_operational_gang_error,
    set_default_gangs,
    set_gangs,
)
from torchft_like.gang import gangs as gangs_module
from torchft_like.process_group import ProcessGroupGloo

CPU, META = torch.device("cpu"), torch.device("meta")


def fake_root(rank: int = 0, size: int = 8) -> FakeGang:
    return FakeGang(CPU, rank=rank, size=size)


def places(*gangs: Gang) -> list[tuple[int, int]]:
    return [(gang.rank, gang.size) for gang in gangs]


@pytest.mark.parametrize("rank", range(8))
def test_a_root_of_eight_with_tensor_parallelism_over_two_or_on_nodes_of_four(rank: int) -> None:
    gangs = create_parallel_gangs(fake_root(rank), tp_size=2)
    assert places(gangs.root, gangs.tp, gangs.dp) == [(rank, 8), (rank % 2, 2), (rank // 2, 4)]
    assert places(gangs.rdp, gangs.sdp, gangs.pp) == [(rank // 2, 4), (0, 1), (0, 1)]
    gangs = create_parallel_gangs(fake_root(rank))
    assert create_fsdp_gangs(gangs, intra_node_size=4) is gangs
    assert places(gangs.sdp, gangs.rdp) == [(rank % 4, 4), (rank // 4, 2)]


def test_gangs_of_an_earlier_call_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Gang] = []

    def close(gang: Gang) -> None:
        closed.append(gang)

    monkeypatch.setattr(FakeGang, "close", close)
    gangs = create_fsdp_gangs(create_parallel_gangs(fake_root()), intra_node_size=4)
    before = [gangs.sdp, gangs.rdp]
    create_fsdp_gangs(gangs, intra_node_size=2)
    assert [gang for gang in closed if gang in before] == before
    kept = [gangs.root, gangs.dp, gangs.tp, gangs.pp, gangs.sdp, gangs.rdp]
    assert not [gang for gang in closed if gang in kept]


def test_without_a_node_size_all_data_parallel_processes_share_the_model() -> None:
    gangs = create_fsdp_gangs(create_parallel_gangs(fake_root(3), tp_size=2))
    assert gangs.sdp is gangs.dp
    assert places(gangs.rdp) == [(0, 1)]


def test_a_part_that_is_the_whole_is_the_whole_gang() -> None:
    root = fake_root(3)
    assert create_parallel_gangs(root, tp_size=1).dp is root
    assert create_parallel_gangs(root, tp_size=8).tp is root
    gangs = create_parallel_gangs(root)
    assert create_fsdp_gangs(gangs, 8).sdp is gangs.dp


@pytest.mark.parametrize("part", [0, -1, 3, 16])
def test_a_part_that_does_not_divide_the_whole_is_refused_with_those_that_do(part: int) -> None:
    with pytest.raises(TopologyError, match=r"tp_size.*take one of 1, 2, 4, 8"):
        create_parallel_gangs(fake_root(), tp_size=part)
    with pytest.raises(TopologyError, match=r"intra_node_size.*take one of 2, 4, 8"):
        create_fsdp_gangs(create_parallel_gangs(fake_root()), part)


def test_a_node_of_one_process_is_refused() -> None:
    with pytest.raises(TopologyError, match="intra_node_size 1 must be 2 or more: take one of 2, 4, 8"):
        create_fsdp_gangs(create_parallel_gangs(fake_root()), 1)
    with pytest.raises(TopologyError, match="it needs 2 processes or more"):
        create_fsdp_gangs(create_fake_gangs(CPU), 1)


@pytest.mark.parametrize("name", ["dp", "rdp", "sdp", "tp", "pp"])
def test_rank_0_of_the_root_is_rank_0_of_every_gang(name: str) -> None:
    alone = FakeGang(CPU)
    gangs = dict.fromkeys(("root", "dp", "rdp", "sdp", "tp", "pp"), alone)
    with pytest.raises(ValueError, match=f"'{name}': 1"):
        Gangs(**{**gangs, name: FakeGang(CPU, rank=1, size=2)})
    others = {"root": fake_root(3), name: FakeGang(CPU, rank=1, size=2)}
    assert Gangs(**{**gangs, **others}).device == CPU


def test_gangs_without_members_yet_may_be_put_together() -> None:
    unconfigured = ProcessGroupGang(ProcessGroupGloo(), CPU)
    alone = FakeGang(CPU)
    gangs = Gangs(root=unconfigured, dp=alone, rdp=alone, sdp=alone, tp=alone, pp=alone)
    with pytest.raises(GangError, match="no members yet"):
        _ = gangs.root.rank


def test_gangs_that_have_a_process_group_say_so() -> None:
    assert not FakeGang(CPU).supports_process_group
    assert ProcessGroupGang(ProcessGroupGloo(), CPU).supports_process_group
    assert ManagedGang.supports_process_group is Gang.supports_process_group


def test_a_failure_that_ends_a_job_keeps_its_cause() -> None:
    cause = GangError("rank 3 is gone")
    with pytest.raises(OperationalError, match="rank 3 is gone") as found:
        raise_operational_gang_error(cause)
    assert found.value.__cause__ is cause


def test_fake_gangs_are_of_one_process() -> None:
    gangs = create_fake_gangs(CPU)
    tensor = torch.tensor([gangs.root.rank + 5.0])
    gangs.dp.all_reduce(tensor, ReduceOperation.SUM)
    assert tensor.item() == 5.0
    assert places(gangs.root, gangs.dp, gangs.rdp, gangs.sdp, gangs.tp, gangs.pp) == [(0, 1)] * 6


def test_a_part_is_closed_if_the_next_one_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    parts = iter([Recording("first", closed)])
    monkeypatch.setattr(FakeGang, "split", lambda *_: next(parts))
    with pytest.raises(StopIteration):
        create_parallel_gangs(fake_root(), tp_size=2)
    assert closed == ["first"]


class Recording:
    """Stands for a gang; notes when it is closed."""

    rank = 0

    def __init__(self, name: str, closed: list[str]) -> None:
        self._name, self._closed = name, closed

    def close(self) -> None:
        self._closed.append(self._name)


def test_closing_closes_every_gang_once_and_the_root_last() -> None:
    closed: list[str] = []
    root, dp, tp, one = (Recording(name, closed) for name in ("root", "dp", "tp", "one"))
    gangs = Gangs(root=root, dp=dp, rdp=dp, sdp=one, tp=tp, pp=one)  # type: ignore[arg-type]
    gangs.close()
    assert sorted(closed) == ["dp", "one", "root", "tp"]
    assert closed[-1] == "root"


def test_the_current_gangs_are_those_of_the_innermost_block() -> None:
    outer, inner = create_fake_gangs(CPU), create_fake_gangs(CPU)
    assert maybe_get_current_gangs() is None
    with outer as entered:
        assert entered is outer
        assert maybe_get_current_gangs() is outer
        with inner, inner:
            assert maybe_get_current_gangs() is inner
        assert maybe_get_current_gangs() is outer
    assert maybe_get_current_gangs() is None


def test_an_error_ends_the_block_as_well() -> None:
    with pytest.raises(KeyError), create_fake_gangs(CPU):
        raise KeyError
    assert maybe_get_current_gangs() is None


def test_every_thread_has_its_own_current_gangs() -> None:
    with create_fake_gangs(CPU), ThreadPoolExecutor(1) as aside:

        def look() -> tuple[Gangs | None, bool, Gangs | None]:
            before, own = maybe_get_current_gangs(), create_fake_gangs(CPU)
            with own:
                during = maybe_get_current_gangs() is own
            return before, during, maybe_get_current_gangs()

        assert aside.submit(look).result() == (None, True, None)
        assert asyncio.run(asyncio.to_thread(maybe_get_current_gangs)) is None


def test_a_thread_that_gets_the_number_of_an_ended_one_does_not_get_its_gangs() -> None:
    contexts: list[Context] = []

    def enter() -> None:
        with create_fake_gangs(CPU):
            contexts.append(copy_context())

    seen: list[Gangs | None] = []
    for act in (enter, lambda: seen.append(contexts[0].run(maybe_get_current_gangs))):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    assert seen == [None]


def test_tasks_of_one_thread_do_not_see_each_others() -> None:
    async def use() -> bool:
        own = create_fake_gangs(CPU)
        with own:
            await asyncio.sleep(0)
            return maybe_get_current_gangs() is own

    async def both() -> list[bool]:
        return list(await asyncio.gather(use(), use()))

    assert asyncio.run(both()) == [True, True]


def test_blocks_in_generators_may_end_out_of_order() -> None:
    first, second = create_fake_gangs(CPU), create_fake_gangs(CPU)

    def use(gangs: Gangs) -> Iterator[None]:
        with gangs:
            yield

    uses = [use(first), use(second)]
    for each in uses:
        next(each)
    assert list(uses[0]) == []
    assert maybe_get_current_gangs() is second
    assert list(uses[1]) == []
    assert maybe_get_current_gangs() is None


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has set no default gangs."""
    monkeypatch.setattr(gangs_module, "_defaults", {})


@pytest.mark.usefixtures("defaults")
def test_without_a_block_the_current_gangs_are_the_default_ones() -> None:
    fake = get_current_gangs()
    assert (fake.root.rank, fake.root.size, fake.device) == (0, 1, CPU)
    assert get_current_gangs(CPU) is get_default_gangs(META) is fake  # which has no gangs of its own
    ours, inner = create_fake_gangs(CPU), create_fake_gangs(CPU)
    set_default_gangs(ours)
    assert (get_current_gangs(), get_default_gangs(META)) == (ours, fake)
    with inner:
        assert (get_current_gangs(), get_default_gangs()) == (inner, ours)
    set_default_gangs(inner, meta=True)
    assert get_default_gangs(META) is get_current_gangs() is inner


@pytest.mark.usefixtures("defaults")
def test_the_current_gangs_are_those_for_the_device_that_is_asked_about() -> None:
    outer, inner = create_fake_gangs(CPU), create_fake_gangs(CPU)
    elsewhere = create_fake_gangs(torch.device("cuda", 1))
    with set_gangs(outer, meta=True), inner, elsewhere:
        assert maybe_get_current_gangs() is elsewhere
        assert (get_current_gangs(), get_current_gangs(META)) == (inner, outer)
        with META:  # where tensors are made, and so torch's default device
            assert get_current_gangs() is outer
    assert maybe_get_current_gangs() is None


@pytest.mark.usefixtures("defaults")
def test_current_gangs_may_be_handed_over_as_an_object() -> None:
    handed, gangs = GangContext(), create_fake_gangs(CPU)
    with handed.set_gangs(gangs):
        assert handed.get_current_gangs() is get_current_gangs() is gangs
    with pytest.raises(KeyError), handed.set_gangs(gangs):
        raise KeyError
    assert handed.get_current_gangs(CPU) is not gangs


def test_the_cpu_is_one_device_under_every_name() -> None:
    gangs = create_fake_gangs(torch.device("cpu:0"))
    with gangs:
        assert get_current_gangs(CPU) is get_current_gangs(torch.device("cpu:0")) is gangs
    with create_fake_gangs(CPU) as plain:
        assert get_current_gangs(torch.device("cpu:0")) is plain
