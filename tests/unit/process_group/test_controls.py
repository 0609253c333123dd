"""torch's own settings of a group do what they do to torch's groups, or say that they cannot."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, HashStore, PrefixStore
from torch.distributed import distributed_c10d as c10d

from torchft_like.errors import (
    CollectiveRefusedError,
    ConfigError,
    NotSupportedError,
)
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)
from torchft_like.testing.processes import Processes

from .conftest import Party

SEVEN = timedelta(seconds=7)
CPU = torch.device("cpu")
_names = itertools.count()


@pytest.fixture(
    params=["torchft-gloo", "torchft-baby-gloo", "torchft-dummy", "registered", "unregistered", "wrapped"]
)
def group(party: Party, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Of one member; made by torch where the name is a backend's."""
    kind = request.param
    if kind.startswith("torchft-"):
        made_by_torch(kind)
        yield dist.group.WORLD
        dist.destroy_process_group()
        return
    (own,) = party.meet(1)
    if kind == "wrapped":
        own = ProcessGroupWrapper(pg=ErrorSwallowingProcessGroupWrapper(own))
    yield own.register(f"controls-{next(_names)}") if kind == "registered" else own
    own.unregister()


def made_by_torch(backend: str, **more: Any) -> None:
    limit = timedelta(seconds=30)
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit, **more)


@pytest.mark.parametrize("made", [ProcessGroupGloo, ProcessGroupBabyGloo])
def test_a_group_is_not_made_for_an_interface_that_this_host_has_not(
    monkeypatch: pytest.MonkeyPatch, made: type[ProcessGroup]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME is 'no-such'.* set it to one of .*\blo\b"):
        made()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made().shutdown()


def all_reduce(group: Any) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


# Timeouts


def by_function(group: Any) -> None:
    """Its name is another one from torch 2.14 on."""
    function = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    function(SEVEN, group)


def by_backend(group: Any) -> None:
    group._get_backend(CPU)._set_default_timeout(SEVEN)


def by_options(group: Any) -> None:
    group._get_backend(CPU).options._timeout = SEVEN


def by_method(group: Any) -> None:
    group.set_timeout(SEVEN)


@pytest.mark.parametrize("set_timeout", [by_function, by_backend, by_options, by_method])
def test_a_timeout_can_be_set_in_each_of_torchs_ways(group: Any, set_timeout: Callable[[Any], None]) -> None:
    set_timeout(group)
    assert group.timeout == SEVEN
    assert group._get_backend(CPU).options._timeout == SEVEN
    assert all_reduce(group) == 1.0


@pytest.mark.parametrize("set_timeout", [by_function, by_backend, by_options, by_method])
def test_the_timeout_that_was_set_ends_a_wait_for_a_peer_now_and_after_configure(
    party: Party, monkeypatch: pytest.MonkeyPatch, set_timeout: Callable[[Any], None]
) -> None:
    monkeypatch.setattr(f"{__name__}.SEVEN", timedelta(seconds=0.2))
    groups = party.meet(2, lambda: ProcessGroupGloo(3600))
    for group in groups:
        set_timeout(group)
    with pytest.raises(RuntimeError, match=r"(?i)timed ?out|in time|within|0\.2 s"):
        all_reduce(groups[0])
    for group in groups:
        group.set_timeout(timedelta(hours=1))
    party.configure(groups)
    set_timeout(groups[1])
    with pytest.raises(RuntimeError, match=r"(?i)timed ?out|in time|within|0\.2 s"):
        all_reduce(groups[1])


def test_the_default_group_and_those_of_torch_are_set_as_before() -> None:
    for backend in ("gloo", "torchft-gloo"):
        made_by_torch(backend)
        by_function(None)
        assert dist.group.WORLD is not None
        assert dist.group.WORLD._get_backend(CPU).options._timeout == SEVEN
        dist.destroy_process_group()


def test_options_say_what_torchs_say(group: Any) -> None:
    options = group._get_backend(CPU).options
    assert isinstance(options, Backend.Options)
    assert options.backend == group.getBackendName()
    assert options.global_ranks_in_group == [0]


@pytest.mark.parametrize("function", ["init_process_group", "new_group"])
def test_options_that_a_group_does_not_take_are_refused(function: str) -> None:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # the stub calls it Options
    if function == "init_process_group":
        with pytest.raises(NotSupportedError, match="takes no pg_options"):
            made_by_torch("torchft-gloo", pg_options=options)
        return
    made_by_torch("torchft-gloo")
    with pytest.raises(NotSupportedError, match="takes no pg_options"):
        dist.new_group([0], pg_options=options)
    dist.destroy_process_group()


# The sequence number


def test_the_sequence_number_counts_operations_as_torchs_does(party: Party) -> None:
    for group in [*party.meet(1), ProcessGroupWrapper(pg=party.meet(1)[0])]:
        group._set_sequence_number_for_group()
        before = group._get_sequence_number_for_group()
        for _ in range(3):
            all_reduce(group)
        assert group._get_sequence_number_for_group() == before + 3
        assert group._get_backend(CPU)._get_sequence_number_for_group() == before + 3


def test_a_group_that_does_not_count_says_so() -> None:
    group = ProcessGroupDummy(0, 1)
    for act in (group._get_sequence_number_for_group, group._set_sequence_number_for_group):
        with pytest.raises(NotSupportedError, match="sequence_number"):
            act()


# The store


def test_members_share_a_store_until_they_are_others(party: Party) -> None:
    groups = party.meet(2)

    def share(rank: int, group: ProcessGroup) -> bytes:
        group.get_group_store().set(f"said/{rank}", f"by {rank}")
        return group.get_group_store().get(f"said/{1 - rank}")

    assert party.together(groups, share) == [b"by 1", b"by 0"]
    party.configure(groups)
    assert not groups[0].get_group_store().check(["said/0"])
    assert party.together(groups, share) == [b"by 1", b"by 0"]


def test_torch_finds_the_store_of_a_registered_group_and_follows_each_configure(party: Party) -> None:
    groups = [group.register(f"stores-{next(_names)}") for group in party.meet(2)]
    for _ in range(2):
        stores = [c10d._get_process_group_store(group) for group in groups]
        stores[0].set("said", "here")
        assert stores[1].get("said") == b"here"
        assert dist.get_backend(groups[0]) == "torchft-gloo"
        party.configure(groups)
        assert not c10d._get_process_group_store(groups[0]).check(["said"])
    for group in groups:
        group.unregister()


def test_the_store_of_a_group_that_torch_made_is_torchs_until_it_is_configured(party: Party) -> None:
    made_by_torch("torchft-gloo")
    group: Any = dist.group.WORLD
    first = c10d._get_process_group_store(group)
    group.get_group_store().set("first", "here")
    assert PrefixStore("cpu/", first).get("first") == b"here"  # which is the part of it for the device
    party.configure([group])
    c10d._get_process_group_store(group).set("said", "here")
    assert group.get_group_store().check(["said"])
    assert not first.check(["said"])
    assert dist.get_backend() == "torchft-gloo"
    dist.destroy_process_group()


def test_a_group_that_met_nowhere_has_no_store() -> None:
    with pytest.raises(NotSupportedError, match="get_group_store"):
        ProcessGroupDummy(0, 1).get_group_store()


# What it is asked by name, or by class


@pytest.mark.parametrize("function", [dist.monitored_barrier, c10d.monitored_barrier])
def test_the_monitored_barrier_of_torch_takes_every_group(group: Any, function: Callable[..., None]) -> None:
    function(group)
    function(group, SEVEN, wait_all_ranks=True)
    assert all_reduce(group) == 1.0  # no error is left in it


def test_the_monitored_barrier_says_who_did_not_come(party: Party) -> None:
    first, _ = party.meet(2)
    with pytest.raises(RuntimeError, match=r"(?i)rank 1 (failed|did not come)"):
        dist.monitored_barrier(first, timedelta(seconds=0.2))


def test_the_monitored_barrier_of_torchs_own_groups_is_as_before() -> None:
    made_by_torch("gloo")
    dist.monitored_barrier()
    dist.monitored_barrier(dist.group.WORLD, SEVEN, True)
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="not been initialized"):
        dist.monitored_barrier()


def test_a_device_can_be_made_as_with_torchs_gloo(group: Any) -> None:
    """For options of torch's own groups; ours refuse those."""
    made = [group._get_backend(CPU).create_device(interface="lo"), group.create_default_device()]
    assert {type(device) for device in made} == {type(dist.ProcessGroupGloo.create_device(interface="lo"))}


# What it is given

NAN = torch.tensor([1.0, float("nan")])


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch, party: Party) -> list[Any]:
    """Groups of two members that look for NaNs."""
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    return [ProcessGroupWrapper(pg=group) for group in party.meet(2)]


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.allreduce([torch.ones(2), NAN.clone()]),
        lambda g: g.allreduce(NAN.clone().to_sparse()),
        lambda g: g.allgather([[torch.ones(2), torch.ones(2)]], [NAN]),
        lambda g: g.broadcast_one(NAN.clone(), g.rank()),
        lambda g: g.alltoall_base(torch.ones(2), NAN, [], []),
        lambda g: g.send([NAN], 1 - g.rank(), 0),
        lambda g: dist.all_reduce(NAN.clone().to(torch.bfloat16), group=g),
    ],
    ids=["second", "sparse", "allgather", "broadcast", "alltoall", "send", "function"],
)
def test_a_nan_is_refused_before_a_call_begins_where_torch_is_told_to_look(
    checking: list[Any], party: Party, call: Callable[[Any], object]
) -> None:
    for group in checking:
        group.register(f"nan-{next(_names)}")
        with pytest.raises(CollectiveRefusedError, match="was given a NaN, in a tensor of"):
            call(group)
        group.unregister()
    assert party.together(checking, lambda _, group: group.allreduce(torch.ones(1)).wait()) == [True, True]


def test_a_nan_in_what_is_only_received_is_no_matter(checking: list[Any], party: Party) -> None:
    def run(rank: int, group: Any) -> float:
        received, whole = NAN.clone() if rank else torch.ones(2), torch.full((2,), float("nan"))
        group.broadcast_one(received, 0).wait()
        group._allgather_base(whole, torch.ones(1)).wait()
        group.allreduce(torch.ones(2, dtype=torch.int64)).wait()
        return float(received.sum() + whole.sum())

    assert party.together(checking, run) == [4.0, 4.0]


def test_nobody_looks_for_nans_unasked(party: Party) -> None:
    (group,) = party.meet(1)
    tensor = NAN.clone()
    group.allreduce([tensor]).wait()
    assert tensor.isnan().any()


def test_the_flight_recorder_has_the_calls_of_each_configuration_under_a_name_that_all_ranks_share(
    processes: Processes, tmp_path: Path
) -> None:
    """In a process of its own: torch reads once how much the recorder keeps."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pickle, torch, torch.distributed as dist\n"
        "from torch._C import _distributed_c10d as c\n"
        "import torchft_like\n"
        "dist.init_process_group('torchft-gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(3))\n"
        "entry = pickle.loads(c._dump_fr_trace())['entries'][-1]\n"
        "print(entry['profiling_name'], entry['input_sizes'], *entry['process_group'])\n"
        "print(dist.group.WORLD.store_address.prefix)\n"
        "dist.destroy_process_group()\n"
    )
    process = processes.fork(str(script), env={"TORCH_FR_BUFFER_SIZE": "10"})
    assert process.wait() == 0, process.output
    recorded, prefix = process.output.splitlines()
    assert recorded == f"gloo:all_reduce [[3]] {prefix} torchft-gloo"
    assert prefix


# What is refused. Left to torch, some of these end the process.


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda g: g.split_group([0], SEVEN, None, "name", "description"), "new_group"),
        (lambda g: g.merge_remote_group(HashStore(), 1, SEVEN, "name", "description"), "new_group"),
        (lambda g: g._register_on_completion_hook(print), "futures"),
        (lambda g: g._wait_for_pending_works(), "futures"),
    ],
    ids=["split", "merge", "hook", "pending"],
)
def test_what_it_cannot_do_names_the_cure(group: Any, call: Callable[[Any], object], cure: str) -> None:
    with pytest.raises(NotSupportedError, match=cure):
        call(group)
    assert all_reduce(group) == 1.0


def test_an_ephemeral_timeout_warns_that_it_has_no_effect(group: Any) -> None:
    with pytest.warns(UserWarning, match="set_timeout"):
        group._add_ephemeral_timeout(SEVEN)
