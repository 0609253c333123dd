"""A mesh with an elastic dimension, asked everything that torch and its users ask a mesh.

The ranks of the replica group are torch's fake world: one process, whichever rank the test wants.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fake_world import fake_world
from tests.unit.process_group.conftest import Party
from tests.unit.process_group.failing import FakeManager
from torchft_like.device_mesh import ManagedDeviceMesh, extend_device_mesh, ft_init_device_mesh
from torchft_like.errors import CollectiveRefusedError, NotSupportedError, ShutdownError
from torchft_like.process_group import ManagedProcessGroup, ProcessGroup, ProcessGroupDummy, ProcessGroupGloo


class Quorum(FakeManager):
    """As much of a Manager as a mesh needs, with a quorum that the test changes."""

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        super().__init__(process_group or ProcessGroupGloo(), participants=0, rank=None)

    def be(self, rank: int | None, participants: int) -> None:
        self._rank, self._participants = rank, participants

    def init_process_group(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)

    def group_allreduce(self, tensors: list[torch.Tensor], options: Any, collective: Any) -> dist.Work:
        return self.process_group.allreduce(tensors)  # type: ignore[no-any-return]


def elastic_mesh(
    quorum: Quorum, shape: Sequence[int], names: tuple[str, ...], dim: int = 0
) -> ManagedDeviceMesh:
    """Return a mesh of which this dimension is elastic, made as torchft's users do."""
    return ft_init_device_mesh(
        device_type="cpu", mesh_shape=shape, mesh_dim_names=names, replicate_dim=dim, manager=quorum
    )


@pytest.fixture
def quorum() -> Quorum:
    return Quorum()


@pytest.fixture
def mesh(quorum: Quorum) -> Iterator[ManagedDeviceMesh]:
    """Elastic x 2 x 2, on rank 1 of 4."""
    with fake_world(4, rank=1):
        yield elastic_mesh(quorum, (3, 2, 2), ("dp_replicate", "dp_shard", "tp"))


# ---------------------------------------------------------------- the elastic dimension


def test_size_rank_and_coordinate_follow_the_quorum(mesh: ManagedDeviceMesh, quorum: Quorum) -> None:
    for rank, participants in [(0, 1), (2, 3), (1, 2)]:
        quorum.be(rank, participants)
        assert mesh.shape == (participants, 2, 2)
        assert (mesh.size(), mesh.size(0), mesh.size(1)) == (4 * participants, participants, 2)
        assert mesh.get_coordinate() == (rank, 0, 1)
        assert mesh.get_local_rank("dp_replicate") == mesh.get_local_rank(0) == rank
        assert mesh.get_local_rank("tp") == 1
        assert mesh["dp_replicate"].size() == participants
        assert mesh["dp_replicate", "dp_shard"].get_coordinate() == (rank, 0)


def test_a_mesh_has_a_shape_before_any_quorum_and_after(mesh: ManagedDeviceMesh, quorum: Quorum) -> None:
    assert (mesh.shape, mesh.get_coordinate()) == ((1, 2, 2), (0, 0, 1))
    quorum.be(1, 2)
    quorum.trouble = ShutdownError("the Manager was shut down")
    assert (mesh.shape, mesh.get_coordinate()) == ((1, 2, 2), (0, 0, 1))


class ThirdOfThree(ProcessGroupDummy):
    """Members that are not participants have a rank among the members."""

    def rank(self) -> int:
        return 2

    def size(self) -> int:
        return 3


def test_a_replica_that_does_not_participate_has_a_place_within_the_mesh() -> None:
    quorum = Quorum(ThirdOfThree(0, 1))
    quorum.be(None, 2)
    with fake_world(2, rank=1):
        mesh = elastic_mesh(quorum, (3, 2), ("dp", "fsdp"))
        assert (mesh.shape, mesh.get_coordinate()) == ((2, 2), (1, 1))
        flat = mesh._flatten("all")
        assert (flat.size(), flat.get_local_rank(), flat.get_group().rank()) == (4, 3, 3)


def test_the_rest_of_the_mesh_is_fixed(mesh: ManagedDeviceMesh, quorum: Quorum) -> None:
    before = hash(mesh), mesh["dp_replicate", "dp_shard"]
    quorum.be(1, 2)
    assert (hash(mesh), mesh["dp_replicate", "dp_shard"]) == before
    assert mesh.ndim == 3
    assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3]]]
    assert mesh.get_rank() == 1
    assert mesh.device_type == "cpu"
    assert repr(mesh) == "ManagedDeviceMesh((dp_replicate=elastic, dp_shard=2, tp=2), 'cpu')"


def test_groups_are_torchs_own_and_the_one_that_was_given(mesh: ManagedDeviceMesh) -> None:
    elastic, shard, tp = mesh.get_all_groups()
    assert isinstance(elastic, ManagedProcessGroup)
    assert mesh.get_group("dp_replicate") is mesh.get_group(0) is mesh["dp_replicate"].get_group() is elastic
    assert dist.get_process_group_ranks(shard) == [1, 3]
    assert dist.get_process_group_ranks(tp) == [0, 1]
    assert mesh["tp"].get_group() is tp
    with pytest.raises(RuntimeError, match="dimensions"):
        mesh.get_group()


def test_torch_finds_the_elastic_group_by_its_name(mesh: ManagedDeviceMesh) -> None:
    group = mesh.get_group("dp_replicate")
    assert _resolve_process_group(group.group_name) is group


# ------------------------------------------------------------------------------ slices


def test_slices_without_the_elastic_dimension_are_torchs(mesh: ManagedDeviceMesh) -> None:
    assert type(mesh["tp"]) is type(mesh["dp_shard", "tp"]) is DeviceMesh
    assert mesh["dp_shard"].mesh.tolist() == [1, 3]


def test_slices_with_it_keep_it(mesh: ManagedDeviceMesh) -> None:
    part = mesh["dp_replicate", "tp"]
    assert part.mesh_dim_names == ("dp_replicate", "tp")
    assert part.mesh.tolist() == [[0, 1]]
    assert part["dp_replicate"].get_group() is mesh.get_group("dp_replicate")
    assert part["tp"] == mesh["tp"]
    assert mesh["dp_replicate", "dp_shard", "tp"] is mesh


@pytest.mark.parametrize(
    "names", ["pp", ("dp_shard", "dp_replicate"), ("dp_replicate", "pp"), ("tp", "dp_shard")]
)
def test_a_wrong_name_or_order_is_a_key_error(mesh: ManagedDeviceMesh, names: str | tuple[str, ...]) -> None:
    with pytest.raises(KeyError):
        mesh[names]


def test_a_slice_of_a_slice_has_no_more_than_the_slice(mesh: ManagedDeviceMesh) -> None:
    with pytest.raises(KeyError):
        mesh["dp_replicate"]["tp"]


def test_torch_joins_a_slice_with_one_of_the_fixed_mesh(mesh: ManagedDeviceMesh) -> None:
    """FSDP does so with the mesh of tensor parallelism."""
    joined = DeviceMesh._concatenate([mesh["dp_replicate", "dp_shard"], mesh["tp"]])
    assert joined.shape == (1, 2, 2)
    assert joined.get_group("dp_replicate") is mesh.get_group("dp_replicate")


def test_an_unflattened_dimension_leaves_the_elastic_one(mesh: ManagedDeviceMesh, quorum: Quorum) -> None:
    quorum.be(1, 3)
    unflat = mesh._unflatten("tp", (2, 1), ("cp", "ep"))
    assert unflat.mesh_dim_names == ("dp_replicate", "dp_shard", "cp", "ep")
    assert unflat.shape == (3, 2, 2, 1)
    last = extend_device_mesh(mesh["dp_shard", "tp"], mesh._group(), "dp", dim=2)
    assert last._unflatten(0, (1, 2), ("a", "b")).shape == (1, 2, 2, 3)
    with pytest.raises(NotSupportedError):
        mesh._unflatten("dp_replicate", (2, 1), ("a", "b"))


# ------------------------------------------------------------------- extend_device_mesh


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_mesh_is_extended_at_any_place(dim: int) -> None:
    with fake_world(4, rank=2):
        fixed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        mesh = extend_device_mesh(fixed, ProcessGroupDummy(0, 1), name="ft", dim=dim)
        names = ["fsdp", "tp"]
        names.insert(dim, "ft")
        assert mesh.mesh_dim_names == tuple(names)
        assert mesh.mesh.tolist() == fixed.mesh.unsqueeze(dim).tolist()
        assert mesh.get_local_rank("fsdp") == 1
        assert mesh["fsdp"] == fixed["fsdp"]


def test_a_slice_is_extended_and_joined_with_its_sibling() -> None:
    with fake_world(4):
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        hsdp = extend_device_mesh(root["fsdp"], ProcessGroupDummy(0, 1))
        assert hsdp.mesh_dim_names == ("dp", "fsdp")
        assert DeviceMesh._concatenate([hsdp, root["tp"]]).shape == (1, 2, 2)


def test_a_registered_group_keeps_its_name() -> None:
    group = ProcessGroupDummy(0, 1)
    group.register("of_its_own")
    name = group.group_name
    with fake_world(2):
        extend_device_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), group)
        assert group.group_name == name


@pytest.mark.parametrize(("name", "dim"), [("fsdp", 0), ("dp", 2), ("dp", -1)])
def test_a_dimension_that_cannot_be_added_is_a_value_error(name: str, dim: int) -> None:
    with fake_world(2):
        fixed = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        with pytest.raises(ValueError, match="do not fit"):
            extend_device_mesh(fixed, ProcessGroupDummy(0, 1), name, dim)


def test_a_mesh_without_names_cannot_be_extended() -> None:
    with fake_world(2), pytest.raises(ValueError, match="no mesh_dim_names"):
        extend_device_mesh(init_device_mesh("cpu", (2,)), ProcessGroupDummy(0, 1))


# ------------------------------------------------------------------ ft_init_device_mesh


def test_a_mesh_of_nothing_but_the_elastic_dimension(quorum: Quorum) -> None:
    with fake_world(2, rank=1):
        mesh = elastic_mesh(quorum, (2,), ("dp",))
        quorum.be(1, 3)
        assert (mesh.shape, mesh.get_coordinate(), mesh.get_local_rank()) == ((3,), (1,), 1)
        assert mesh.mesh.tolist() == [1]
        assert mesh.get_group() is mesh["dp"].get_group()
        assert mesh._flatten("all").size() == 3
        with pytest.raises(KeyError):
            mesh["tp"]


def test_the_manager_starts_the_default_group_if_there_is_none(quorum: Quorum) -> None:
    try:
        mesh = elastic_mesh(quorum, (2, 1), ("dp", "fsdp"))
        assert mesh["fsdp"].get_group() is dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "names", "dim"),
    [((2, 2), ("a",), 0), ((2, 2), ("a", "b"), 2), ((2, 2), ("a", "b"), -1), ((2, 2), ("a", "a"), 0)],
)
def test_arguments_that_do_not_fit_are_a_value_error(
    quorum: Quorum, shape: tuple[int, ...], names: tuple[str, ...], dim: int
) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        elastic_mesh(quorum, shape, names, dim)


# -------------------------------------------------------------------------- flattening


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_ranks_of_a_flattened_mesh_are_numbered_as_torch_numbers_them(dim: int) -> None:
    shape = [2, 2]
    shape.insert(dim, 3)
    numbers = torch.arange(math.prod(shape)).view(shape)
    for fixed_rank, elastic_rank in product(range(4), range(3)):
        quorum = Quorum()
        quorum.be(elastic_rank, 3)
        with fake_world(4, rank=fixed_rank):
            mesh = elastic_mesh(quorum, shape, ("a", "b", "c"), dim)
            flat = mesh._flatten()
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            assert flat.get_local_rank() == int(numbers[coordinate])
            assert (flat.size(), flat.mesh_dim_names) == (12, ("a_b_c",))


def test_a_flattened_mesh_is_found_by_its_name(mesh: ManagedDeviceMesh, quorum: Quorum) -> None:
    quorum.be(1, 2)
    flat = mesh["dp_replicate", "dp_shard"]._flatten("dp")
    assert mesh["dp"] is flat is mesh["dp_replicate", "dp_shard"]._flatten("dp")
    assert mesh.get_group("dp") is flat.get_group()
    assert (flat.size(), flat.get_local_rank(), mesh.get_local_rank("dp")) == (4, 2, 2)
    assert mesh["dp", "tp"].shape == (4, 2)
    assert mesh["dp", "tp"]["dp"] == flat
    assert flat._flatten() is flat


def test_fixed_dimensions_are_flattened_by_torch(mesh: ManagedDeviceMesh, quorum: Quorum) -> None:
    quorum.be(0, 2)
    flat = mesh["dp_shard", "tp"]._flatten("model")
    assert type(flat) is DeviceMesh
    assert flat.size() == 4
    assert mesh.get_group("model") is flat.get_group()


def test_a_name_means_one_thing(mesh: ManagedDeviceMesh) -> None:
    part = mesh["dp_replicate", "dp_shard"]
    part._flatten("dp")
    with pytest.raises(ValueError, match="flattened to already"):
        mesh._flatten("dp")
    with pytest.raises(ValueError, match="another name"):
        part._flatten("tp")
    with pytest.raises(RuntimeError, match="overlaps"):
        mesh["dp", "dp_shard"]


def test_a_flattened_fixed_mesh_has_no_elastic_dimension(mesh: ManagedDeviceMesh, quorum: Quorum) -> None:
    """torch reduces over several dimensions at once where it knows a flattened mesh of the same layout."""
    quorum.be(0, 2)
    mesh["dp_shard", "tp"]._flatten("model")
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    calls: list[str] = []
    record_reductions(mesh.get_group("dp_replicate"), calls)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial(), Partial(), Partial()], run_check=False)
    partial.redistribute(placements=[Replicate(), Replicate(), Replicate()])
    assert calls == ["elastic"]


def record_reductions(group: dist.ProcessGroup, calls: list[str]) -> None:
    def allreduce(tensors: list[torch.Tensor], options: object = None) -> dist.Work:
        calls.append("elastic")
        return ProcessGroupDummy(0, 1).allreduce(tensors)

    group.allreduce = allreduce  # type: ignore[method-assign, assignment]


# ---------------------------------------------------------------------------- identity


def test_an_elastic_mesh_is_not_the_plain_one_of_the_same_ranks(quorum: Quorum) -> None:
    with fake_world(2):
        plain = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "fsdp"))
        mesh = extend_device_mesh(plain["fsdp"], ManagedProcessGroup(quorum))
        other = extend_device_mesh(plain["fsdp"], ManagedProcessGroup(quorum))
        assert mesh == mesh["dp", "fsdp"]
        assert mesh["dp"] == mesh["dp"]
        assert hash(mesh["dp"]) == hash(mesh["dp"])
        assert len({mesh, other, plain, mesh["dp"], other["dp"], plain["dp"]}) == 6


def test_a_copy_finds_the_group_again(mesh: ManagedDeviceMesh, quorum: Quorum) -> None:
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    copied = copy.deepcopy(mesh)
    quorum.be(1, 2)
    assert copied == mesh
    assert copied.shape == (2, 2, 2)
    assert copied.get_group("dp_replicate") is mesh.get_group("dp_replicate")
    assert copied["dp"].size() == 4


# ----------------------------------------------------------------------------- DTensor


@pytest.mark.parametrize("participants", [1, 2])
def test_dtensor_reduces_over_the_members_whoever_of_them_participates(
    party: Party, participants: int
) -> None:
    """One that heals needs the result, too, so the reduction is not left out for want of participants."""

    def total(rank: int, group: ProcessGroup) -> list[float]:
        quorum = Quorum(group)
        quorum.be(rank if rank < participants else None, participants)
        mesh = extend_device_mesh(fixed, ManagedProcessGroup(quorum))
        mine = torch.tensor([float(rank < participants)])
        partial = DTensor.from_local(mine, mesh, [Partial(), Replicate()], run_check=False)
        values: list[float] = partial.full_tensor().tolist()
        return values

    with fake_world(1):
        fixed = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        assert party.together(party.meet(2), total) == [[participants]] * 2


def test_a_group_refuses_a_dtensor_whose_memory_is_its_parts_and_goes_on(party: Party) -> None:
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,))
    groups = party.meet(2)
    for name in ("allreduce", "broadcast", "_reduce_scatter_base"):

        def refused(_: int, group: ProcessGroup, name: str = name) -> None:
            whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
            arguments = [torch.empty(1), whole] if name[0] == "_" else [[whole]]
            with pytest.raises(CollectiveRefusedError, match=rf"{name} was given a DTensor, .*\.to_local"):
                getattr(group, name)(*arguments).wait()

        party.together(groups, refused)
    ones = [torch.ones(2), torch.ones(2)]
    party.together(groups, lambda rank, group: group.allreduce([ones[rank]]).wait())
    assert [one.tolist() for one in ones] == [[2.0, 2.0]] * 2


def test_dtensor_shards_over_the_fixed_dimensions_only(mesh: ManagedDeviceMesh, quorum: Quorum) -> None:
    placements = [Replicate(), Shard(0), Replicate()]
    whole = torch.arange(8.0)
    before = DTensor.from_local(whole[:4], mesh, placements, run_check=False)
    quorum.be(1, 2)
    after = DTensor.from_local(whole[:4], mesh, placements, run_check=False)
    assert before.shape == after.shape == (8,)
    added = before + after
    assert isinstance(added, DTensor)
    assert added.to_local().tolist() == (2 * whole[:4]).tolist()
