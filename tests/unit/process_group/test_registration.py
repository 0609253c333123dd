"""What torch knows about our groups: names, members, and the backends that it makes them from."""

from __future__ import annotations

import gc
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    Backend,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    _DistributedBackendOptions,
    _resolve_process_group,
)
from torch.distributed import DistStoreError
from torch.distributed import distributed_c10d as c10d

from torchft_like.backends import BACKENDS, register_backends
from torchft_like.errors import (
    AddressError,
    NotSupportedError,
    ProcessGroupError,
    ProcessGroupNotConfiguredError,
)
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FaultInjectingProcessGroup,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
    ReconfigureOptions,
    reconfigure_with_store,
)
from torchft_like.process_group.handles import meeting_of, parse_handle
from torchft_like.testing.relay import Relay

from .conftest import LIMIT_S, Party

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _nothing_more_is_registered_afterwards() -> Iterator[None]:
    before = dict(c10d._world.pg_names)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    more = {group: name for group, name in c10d._world.pg_names.items() if group not in before}
    for group in more:
        dist.destroy_process_group(group)
    assert list(more.values()) == []


def fresh_name() -> str:
    return f"name-{next(_numbers)}"


def group_of_one(party: Party) -> Any:
    return party.meet(1)[0]


def resolved(name: str) -> Any:
    """The group that torch finds under a name."""
    return _resolve_process_group(name)  # type: ignore[arg-type] # a name is more than a string to the stub


def known_to_torch(group: ProcessGroup) -> list[bool]:
    world = c10d._world
    tables: tuple[Any, ...] = (
        world.pg_names,
        world.pg_map,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        [member for members in world.tags_to_pg.values() for member in members],
    )
    return [group in table for table in tables]


# Names


def test_a_registered_group_is_in_every_table_and_an_unregistered_one_in_none(party: Party) -> None:
    group = group_of_one(party)
    assert not any(known_to_torch(group))
    assert group.register(fresh_name()) is group
    assert all(known_to_torch(group))
    assert resolved(group.group_name) is group
    assert dist.get_backend(group) == "torchft-gloo"
    assert dist.get_process_group_ranks(group) == [0]
    group.unregister()
    assert not any(known_to_torch(group))
    with pytest.raises(RuntimeError, match="resolve"):
        resolved("torchft-gloo:name-0")


def test_a_name_is_given_once_at_a_time(party: Party) -> None:
    first, second = group_of_one(party), group_of_one(party)
    name = fresh_name()
    first.register(name)
    with pytest.raises(ProcessGroupError, match="registered already"):
        first.register(fresh_name())
    with pytest.raises(ProcessGroupError, match=f"registered already as 'torchft-gloo:{name}'"):
        second.register(name)
    assert not any(known_to_torch(second))
    with pytest.raises(ProcessGroupError, match="no name"):
        _ = second.group_name
    first.unregister()
    first.unregister()
    second.register(name)
    first.unregister()
    assert resolved(second.group_name) is second, "the name is not the first one's any more"
    second.unregister()


def test_of_two_threads_that_want_a_name_one_gets_it(party: Party) -> None:
    groups = [group_of_one(party) for _ in range(8)]
    name, start = fresh_name(), threading.Barrier(len(groups))

    def attempt(_: int, group: Any) -> bool:
        start.wait(LIMIT_S)
        try:
            group.register(name)
        except ProcessGroupError:
            return False
        return True

    assert party.together(groups, attempt).count(True) == 1
    for group in groups:
        group.unregister()


def test_a_group_may_be_registered_before_it_is_configured(party: Party) -> None:
    group = party.own(ProcessGroupGloo(30)).register(fresh_name())
    assert dist.get_process_group_ranks(group) == []
    group.configure(party.prefix(), 0, 1, global_ranks=[5])
    assert dist.get_process_group_ranks(group) == [5]
    assert dist.get_group_rank(group, 5) == 0
    assert dist.get_global_rank(group, 0) == 5
    with pytest.raises(ValueError, match="not part of"):
        dist.get_group_rank(group, 0)
    group.unregister()
    with pytest.raises(ProcessGroupNotConfiguredError):
        ProcessGroupWrapper().register(fresh_name())


def test_torch_sees_the_members_of_the_group_within_a_wrapper(party: Party) -> None:
    inner = party.own(ProcessGroupGloo(30))
    outer = ErrorSwallowingProcessGroupWrapper(inner).register(fresh_name())
    inner.configure(party.prefix(), 0, 1, global_ranks=[7])
    assert dist.get_process_group_ranks(outer) == [7]
    outer.configure(party.prefix(), 0, 1)
    assert dist.get_process_group_ranks(outer) == [0]
    outer.unregister()


def test_torch_keeps_a_registered_group_alive_and_nothing_keeps_an_unregistered_one() -> None:
    group = ProcessGroupDummy(0, 1).register(fresh_name())
    alive, name = weakref.ref(group), group.group_name
    del group
    gc.collect()
    again = resolved(name)
    assert isinstance(again, ProcessGroupDummy)
    again.unregister()
    del again
    gc.collect()
    assert alive() is None


def test_what_is_under_way_survives_unregistering(party: Party) -> None:
    groups = party.meet(2)
    groups[0].register(fresh_name())
    tensor = torch.ones(1)
    work = groups[0].allreduce([tensor])
    groups[0].unregister()
    dist.all_reduce(torch.ones(1), group=groups[1])
    assert work.wait()
    assert float(tensor) == 2.0


def test_torch_can_destroy_a_registered_group_which_may_be_used_again_later(party: Party) -> None:
    group = group_of_one(party).register(fresh_name())
    c10d._world.default_pg = None
    dist.destroy_process_group(group)
    assert not any(known_to_torch(group))
    with pytest.raises(ProcessGroupError, match="shut down"):
        group.allreduce([torch.ones(1)])
    group.unregister()
    group.configure(party.prefix(), 0, 1)
    group.register(fresh_name()).unregister()


def test_destroying_the_world_is_no_trouble_for_a_group_registered_beside_it(party: Party) -> None:
    group = group_of_one(party).register(fresh_name())
    dist.init_process_group("torchft-dummy", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert not any(known_to_torch(group))
    group.unregister()
    group.register(fresh_name()).unregister()


def test_a_group_that_torch_made_has_the_name_that_torch_gave_it() -> None:
    dist.init_process_group("torchft-dummy", store=HashStore(), rank=0, world_size=1)
    group: Any = dist.group.WORLD
    assert resolved(group.group_name) is group
    assert group.group_desc == "default_pg"
    with pytest.raises(ProcessGroupError, match="registered already"):
        group.register(fresh_name())
    group.unregister()
    assert all(known_to_torch(group)), "torch made it, torch destroys it"


# Backends


def options(store: Store, rank: int, world_size: int, timeout_s: float = 30) -> _DistributedBackendOptions:
    """As torch describes to a backend the group that it wants."""
    wanted = _DistributedBackendOptions()
    wanted.store, wanted.group_rank, wanted.group_size = store, rank, world_size
    wanted.timeout, wanted.global_ranks_in_group = timedelta(seconds=timeout_s), []
    return wanted


def create(backend: str, wanted: _DistributedBackendOptions, pg_options: object = None) -> Any:
    plugin: Any = dist.Backend._plugins[backend.upper()]
    return plugin.creator_fn(wanted, pg_options)


def test_registering_the_backends_again_changes_nothing() -> None:
    before = set(dist.Backend._plugins), list(dist.Backend.backend_list)
    register_backends()
    assert (set(dist.Backend._plugins), list(dist.Backend.backend_list)) == before
    assert {name.upper() for name in BACKENDS} <= before[0]
    defaults = dist.Backend.default_device_backend_map
    assert (defaults["cpu"], defaults["cuda"]) == ("gloo", "nccl"), "ours are used where they are named"


@pytest.mark.parametrize("kind", ["tcp", "hash"])
def test_a_member_that_is_not_told_where_to_meet_says_so(store: TCPStore, kind: str) -> None:
    place = PrefixStore(fresh_name(), store if kind == "tcp" else HashStore())
    with pytest.raises(
        ProcessGroupNotConfiguredError, match="configuring rank 1 of 2 failed: rank 0 did not"
    ):
        create("torchft-gloo", options(place, 1, 2, timeout_s=0.05))


CPU_BACKENDS = [name for name, origin in BACKENDS.items() if "cpu" in origin.devices]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("template", ["{}", "cpu:{}"])
def test_a_world_of_one_can_be_made_of_every_backend(backend: str, template: str) -> None:
    name = template.format(backend)
    dist.init_process_group(name, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert (dist.get_backend(), dist.get_world_size(), float(tensor)) == (name, 1, 1.0)
    assert isinstance(dist.group.WORLD, ProcessGroup)
    assert dist.group.WORLD._device_types == [torch.device("cpu")]
    assert not dist.group.WORLD._has_hooks()  # torch's C++ asks the default backend
    if hasattr(dist, "get_backend_impl"):
        assert dist.get_backend_impl() is dist.group.WORLD
    group = dist.new_group([0])
    assert dist.get_process_group_ranks(group) == [0]
    alive = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert alive() is None, "nothing refers to it, not even a cycle"


def reduced(rank: int, group: Any) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def test_a_store_that_rank_0_serves_ends_when_all_have_met(party: Party) -> None:
    given = HashStore()

    def meet(rank: int) -> Any:
        return party.own(create("torchft-gloo", options(given, rank, 2)))

    groups = [future.result(LIMIT_S) for future in [party.aside(meet, rank) for rank in range(2)]]
    host, _, rest = given.get("torchft/meeting/1").decode().partition(":")
    with pytest.raises(dist.DistNetworkError):
        TCPStore(host, int(rest.partition("/")[0]), is_master=False, timeout=timedelta(seconds=1))
    assert party.together(groups, reduced) == [2.0, 2.0]


def test_a_group_whose_members_are_lost_as_they_meet_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ProcessGroup] = []

    def barrier(group: ProcessGroup) -> None:
        made.append(group)
        raise RuntimeError("a member is gone")

    monkeypatch.setattr(ProcessGroupGloo, "barrier", barrier)
    with pytest.raises(RuntimeError, match="is gone"):
        create("torchft-gloo", options(HashStore(), 0, 1))
    assert "shut down" in str(made[0].errored())


def test_what_cannot_be_made_says_why() -> None:
    with pytest.raises(ValueError, match="world of 1"):
        create("torchft-dummy", options(HashStore(), 1, 2))
    with pytest.raises(ProcessGroupNotConfiguredError, match="rank 0 of 2"):
        create("torchft-gloo", options(HashStore(), 0, 2, timeout_s=0.2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in CPU_BACKENDS])
def test_a_backend_for_gpus_says_that_there_is_none(backend: str) -> None:
    with pytest.raises(NotSupportedError, match="CUDA"):
        create(backend, options(HashStore(), 0, 1))


# A group under torch's functions has a backend where torch's C++ looks for one.


NEEDS_A_PYTHON_BACKEND = pytest.mark.skipif(
    not hasattr(Backend, "get_error"), reason="before torch 2.14 no Python class can be a backend"
)


@NEEDS_A_PYTHON_BACKEND
def test_an_operator_of_torch_on_an_aborted_group_raises(party: Party) -> None:
    """An allreduce as torch's C++ dispatches it, without a look at the methods of the Python class."""
    group: Any = group_of_one(party).register(fresh_name())
    group.abort("the test says so")
    with pytest.raises(RuntimeError, match="the test says so"):
        dist.ProcessGroup.allreduce(group, [torch.ones(1)]).wait()
    party.configure([group])
    dist.ProcessGroup.allreduce(group, [torch.ones(1)]).wait()
    group.unregister()


# Groups that are configured by handles, as `torch.distributed` and torchft's nightly do it.


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


def test_a_member_that_never_comes_is_waited_for_no_longer_where_the_stores_host_falls_silent(
    party: Party,
) -> None:
    is_over = threading.Event()

    def silent_after_the_first_answer() -> Callable[[bytes], bytes]:
        passes = iter([True])

        def carry(data: bytes) -> bytes:
            next(passes, False) or is_over.wait()
            return data

        return carry

    relay = Relay(("127.0.0.1", party.store.port), silent_after_the_first_answer)
    group = party.own(ProcessGroupGloo(OWN))
    address = f"127.0.0.1:{relay.port}/silent"
    waiting = party.aside(reconfigure_with_store, group, address, 0, 2, timedelta(seconds=1))
    try:
        with pytest.raises(DistStoreError):
            waiting.result(LIMIT_S)
    finally:
        is_over.set()


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
