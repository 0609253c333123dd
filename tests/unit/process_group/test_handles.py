"""Groups that are configured by handles, as `torch.distributed` and torchft's nightly do it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchft_like.errors import AddressError, ProcessGroupError
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FaultInjectingProcessGroup,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
    ReconfigureOptions,
    reconfigure_with_store,
)
from torchft_like.process_group.handles import meeting_of, parse_handle

from .conftest import LIMIT_S, Party

OWN = timedelta(seconds=30)
TORCHS: Any = dist  # whose stub is of an older torch
KINDS: dict[str, Callable[[], ProcessGroup]] = {
    "Gloo": lambda: ProcessGroupGloo(OWN),
    "BabyGloo": lambda: ProcessGroupBabyGloo(OWN),
    "wrapper": lambda: ProcessGroupWrapper(pg=ProcessGroupGloo(OWN)),
    "swallowing": lambda: ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(OWN)),
    "fault injecting": lambda: FaultInjectingProcessGroup(ProcessGroupGloo(OWN)),
}


def by_method(group: Any, uuid: int, handles: Collection[str], timeout: timedelta | None = None) -> None:
    """As torchft's nightly does it, with any torch."""
    opts = ReconfigureOptions()
    opts.uuid, opts.handles, opts.timeout = uuid, handles, timeout
    assert group.reconfigure(opts).wait()


def by_torch(group: Any, uuid: int, handles: Any, timeout: timedelta | None = None) -> None:
    """As torch's users do it."""
    assert TORCHS._supports_reconfigure(group)
    assert TORCHS._reconfigure(uuid=uuid, handles=handles, group=group, timeout=timeout).wait()


needs_torchs = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has it from 2.14 on")
WAYS = [by_method, pytest.param(by_torch, marks=needs_torchs)]


def meet(party: Party, groups: list[Any], uuid: int, way: Callable[..., None] = by_method) -> None:
    handles = [group.get_reconfigure_handle() for group in groups]
    party.together(groups, lambda _, group: way(group, uuid, handles))


def sums(party: Party, groups: list[Any], values: list[float]) -> list[float]:
    """What an allreduce of one value of each gives to each."""
    tensors = [torch.tensor([value]) for value in values]
    party.together(groups, lambda rank, group: group.allreduce([tensors[rank]]).wait())
    return [tensor.item() for tensor in tensors]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_members_shrink_change_places_and_grow(party: Party, kind: str, way: Callable[..., None]) -> None:
    groups = [party.own(KINDS[kind]()) for _ in range(3)]
    for uuid, members in enumerate([[0, 1, 2], [2, 0], [1, 2, 0]]):
        present = [groups[member] for member in members]
        meet(party, present, uuid, way)
        assert [(group.rank(), group.size()) for group in present] == [
            (i, len(members)) for i in range(len(members))
        ]
        assert sums(party, present, [member + 1.0 for member in members]) == [
            sum(member + 1.0 for member in members)
        ] * len(members)


def test_what_a_wrapper_does_in_configure_it_does_here(party: Party) -> None:
    groups: list[Any] = [
        party.own(ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(OWN))) for _ in range(2)
    ]
    meet(party, groups, 1)
    groups[0].report_error(RuntimeError("a test's"))
    meet(party, groups, 2)
    assert groups[0].error() is None
    assert sums(party, groups, [1.0, 2.0]) == [3.0, 3.0]


def test_a_set_of_handles_gives_every_member_a_place_of_its_own(party: Party) -> None:
    groups = [party.own(ProcessGroupGloo(OWN)) for _ in range(3)]
    handles = {group.get_reconfigure_handle() for group in groups}
    party.together(groups, lambda _, group: by_method(group, 1, handles))
    assert {group.rank() for group in groups} == {0, 1, 2}


def test_members_hear_each_others_ranks_in_the_job(party: Party) -> None:
    groups = [party.own(ProcessGroupGloo(OWN)) for _ in range(2)]
    groups[0].set_rank_info("a", 1, 2, 3)
    groups[1].set_rank_info("b", 1, 2, 5)
    meet(party, groups, 1)
    assert [list(group._member_ranks()) for group in groups] == [[3, 5], [3, 5]]
    groups[0].set_rank_info("a", 1, 2)
    meet(party, groups, 2)
    assert [list(group._member_ranks()) for group in groups] == [[0, 1], [0, 1]]


def _through_store(address: str, size: int, rank: int, group: ProcessGroup) -> None:
    reconfigure_with_store(group, address, rank, size, OWN)


def test_handles_go_through_a_store(party: Party) -> None:
    groups = [party.own(ProcessGroupGloo(OWN)) for _ in range(3)]
    for _ in range(2):
        exchange = partial(_through_store, party.prefix(), len(groups))
        party.together(groups, exchange)
        assert sums(party, groups, [1.0, 2.0, 4.0]) == [7.0] * 3


def test_a_member_that_never_comes_is_waited_for_as_long_as_the_options_say(party: Party) -> None:
    first, second = (party.own(ProcessGroupGloo(timedelta(hours=1))) for _ in range(2))
    handles = [first.get_reconfigure_handle(), second.get_reconfigure_handle()]
    lone = party.aside(by_method, first, 1, handles, timedelta(seconds=0.5))
    assert isinstance(lone.exception(LIMIT_S), ProcessGroupError)
    assert first.timeout == timedelta(hours=1)


def test_the_limit_of_a_configuration_is_none_of_its_operations(party: Party) -> None:
    group: Any = party.own(ProcessGroupGloo(OWN))
    by_method(group, 1, [group.get_reconfigure_handle()], timedelta(seconds=7))
    assert group.timeout == OWN
    assert group.parent.options._timeout == OWN


@pytest.mark.no_zombie
def test_a_number_that_was_used_is_refused_on_every_member(party: Party) -> None:
    groups = [party.own(ProcessGroupGloo(OWN)) for _ in range(2)]
    meet(party, groups, 1)
    handles = [group.get_reconfigure_handle() for group in groups]
    again = [party.aside(by_method, group, 1, handles) for group in groups]
    for future in again:
        assert "every configure needs a fresh one" in str(future.exception(LIMIT_S))
    meet(party, groups, 2)


def test_the_user_of_a_managed_group_does_not_configure_it() -> None:
    class Manager:
        process_group = ProcessGroupDummy(0, 1)

    group = ManagedProcessGroup(Manager())  # type: ignore[arg-type] # what is asked here needs no more of it
    assert not group.supports_reconfigure
    with pytest.raises(ProcessGroupError, match="configured by its Manager"):
        group.get_reconfigure_handle()
    with pytest.raises(ProcessGroupError, match="configured by its Manager"):
        group.reconfigure(ReconfigureOptions())


# What is read from a handle


def handle(name: str, **changes: object) -> str:
    return json.dumps({"id": name, "store": "10.0.0.1:29500", "global_rank": None, **changes})


def test_members_meet_in_the_first_ones_store_in_the_order_of_the_handles() -> None:
    handles = [handle("b", store="10.0.0.2:1", global_rank=3), handle("a", global_rank=5)]
    assert meeting_of(handles, "a") == ("10.0.0.2:1", 1, [3, 5])


def test_what_a_handle_says_beyond_is_left_out() -> None:
    assert parse_handle(handle("a", colour="blue")) == parse_handle(handle("a"))


@pytest.mark.parametrize(
    "text",
    ["", "gloo:0:-1:0:127.0.0.1:1", "[]", "1", "null", "{}", handle("a", id=1), handle("a", global_rank="1")],
)
def test_a_handle_of_another_kind_of_group_is_shown(text: str) -> None:
    with pytest.raises(ProcessGroupError, match="is no handle of a group of this package") as error:
        meeting_of([handle("a"), text], "a")
    assert repr(text) in str(error.value)


def test_a_store_at_no_address_is_shown() -> None:
    with pytest.raises(AddressError, match="nowhere"):
        meeting_of([handle("a"), handle("b", store="nowhere")], "a")


@pytest.mark.parametrize(("own", "error"), [("c", "own handle is not among the 2"), ("a", "is twice among")])
def test_handles_that_are_not_those_of_all_members_are_refused(own: str, error: str) -> None:
    handles = [handle("a"), handle("b" if own == "c" else "a")]
    with pytest.raises(ProcessGroupError, match=error):
        meeting_of(handles, own)


def test_a_group_whose_handle_nobody_has_asked_for_is_in_no_meeting() -> None:
    with pytest.raises(ProcessGroupError, match="own handle is not among the 1"):
        by_method(ProcessGroupGloo(OWN), 1, [handle("a")])
