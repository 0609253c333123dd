"""A DeviceMesh with one elastic dimension: the replica groups, whose number changes.

torch's mesh is a fixed array of ranks. Within a replica group this mesh is one, too, and torch answers for
its fixed dimensions. The elastic dimension is a process group of this package. Two rules make that safe:

* For torch's bookkeeping (layout, ranks, identity) the elastic dimension has size one and never
  changes: a mesh is a key of torch's caches and part of every sharded tensor.
* For the dimension itself (size, rank, coordinate, group) its process group answers, at the moment of the
  call. FSDP and DTensor ask whenever they reduce.

A mesh that is flattened over the elastic dimension has a group of all ranks that share the data, over which a
script averages its loss or counts its tokens. There are no connections between all these ranks, nor could
they be kept over the death of a replica group. So an operation runs within the replica group first, and then
across.

The module knows process groups, and not how they are configured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed import _mesh_layout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchft_like.errors import FaultToleranceError, NotSupportedError, ProcessGroupError
from torchft_like.process_group.base import ProcessGroup
from torchft_like.process_group.collectives import JOINING, Call, Collective
from torchft_like.process_group.swallowing import GroupManager, ManagedProcessGroup
from torchft_like.process_group.work import FinishedOperation
from torchft_like.process_group.wrapper import ProcessGroupWrapper

MeshLayout: Any = _mesh_layout._MeshLayout

_registrations = itertools.count()


def ft_init_device_mesh(
    *,
    device_type: str,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str],
    replicate_dim: int,
    manager: GroupManager,
) -> ManagedDeviceMesh:
    """Make a mesh for a job with replica groups, as `init_device_mesh` does; one dimension is the manager's
    quorum.

        mesh = ft_init_device_mesh(
            device_type="cpu",
            mesh_shape=(2, 2),
            mesh_dim_names=("dp_replicate", "dp_shard"),
            replicate_dim=0,
            manager=manager,
        )
        fully_shard(model, mesh=mesh)

    Every rank of the replica group calls this. If there is no default process group, the manager starts one,
    which spans the replica group, not the job.

    Args:
        device_type: "cpu" or "cuda".
        mesh_shape: the sizes of all dimensions. That of the elastic one may be any number: the quorum
          decides.
        mesh_dim_names: the names of all dimensions.
        replicate_dim: the index of the elastic dimension.
        manager: the Manager of this rank.

    Raises:
        ValueError: shape, names and `replicate_dim` do not fit together.
    """
    shape, names = list(mesh_shape), tuple(mesh_dim_names)
    _check_dimensions(len(shape), names, replicate_dim)
    if not dist.is_initialized():
        manager.init_process_group()
    del shape[replicate_dim]
    static = None
    if shape:
        static_names = names[:replicate_dim] + names[replicate_dim + 1 :]
        static = init_device_mesh(device_type, tuple(shape), mesh_dim_names=static_names)
    return ManagedDeviceMesh(static, names, ManagedProcessGroup(manager), replicate_dim)


def extend_device_mesh(
    mesh: DeviceMesh, pg: ProcessGroup, name: str = "dp", dim: int = 0
) -> ManagedDeviceMesh:
    """Return `mesh` with `pg` as one more dimension.

    Args:
        mesh: the mesh of this replica group; its dimensions have names.
        pg: the group of this rank and its counterparts. It is registered under a name of its own if it is not
          registered yet.
        name: the name of the new dimension.
        dim: the index of the new dimension, `0 <= dim <= mesh.ndim`.

    Raises:
        ValueError: the mesh has no names, or the new one is taken, or `dim` is out of range.
    """
    if (names := mesh.mesh_dim_names) is None:
        raise ValueError("the mesh has no mesh_dim_names: give it some, or its new dimension cannot have one")
    return ManagedDeviceMesh(mesh, (*names[:dim], name, *names[dim:]), pg, dim)


class ManagedDeviceMesh(DeviceMesh):
    """A DeviceMesh with one elastic dimension, which FSDP and DTensor take in a DeviceMesh's place.

    `size` and `shape` follow the elastic group. `mesh`, the tensor of ranks, holds those of this replica
    group: the ranks of others have no number here. Slices that leave the elastic dimension out are plain
    meshes of torch's. Use the elastic dimension to replicate and to reduce: what is sharded over it is gone
    when a replica group dies.

    Args:
        mesh: the fixed dimensions, with names; None if there are none.
        mesh_dim_names: the names of all dimensions.
        replicate_pg: the elastic group. It is registered under a name of its own if it is not registered yet.
        replicate_dim: the index of the elastic dimension.
        parent: the mesh that this one was made from.

    Raises:
        ValueError: names, dimensions and `replicate_dim` do not fit together.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        mesh_dim_names: Sequence[str],
        replicate_pg: ProcessGroup,
        replicate_dim: int,
        parent: ManagedDeviceMesh | None = None,
    ) -> None:
        _check_dimensions(1 + (mesh.ndim if mesh is not None else 0), mesh_dim_names, replicate_dim)
        self._fixed = mesh
        self._elastic_dim = replicate_dim
        self._elastic_group: ProcessGroup | None = replicate_pg
        self._flattened: dict[str, ManagedDeviceMesh] = {}  # flattened meshes by name, on the root mesh
        self._made_of: tuple[str, ...] = ()  # the dimensions that were joined, for a flattened mesh
        like = mesh or parent
        super().__init__(
            like.device_type if like is not None else replicate_pg._device_types[0].type,
            mesh_dim_names=tuple(mesh_dim_names),
            _root_mesh=parent and parent._get_root_mesh(),
            _init_backend=False,
            **_insert_dimension(mesh, replicate_dim),
        )
        _register(replicate_pg, mesh_dim_names[replicate_dim])
        groups = mesh.get_all_groups() if mesh is not None else []
        groups = [*groups[:replicate_dim], replicate_pg, *groups[replicate_dim:]]
        self._dim_group_names = [group.group_name for group in groups]
        self._pg_registry.update(zip(self._dim_group_names, groups, strict=True))
        self._hash: int | None = None

    # ------------------------------------------------- answers of the elastic group

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions; waits for the quorum of the current step.

        The elastic dimension is as large as its group, and 1 while the group has no members. While a replica
        group heals it is never 1, because torch skips reductions over a dimension of that size.
        """
        return self._with_elastic(super().shape, self._elastic_size())

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the size of one dimension, or the product of all sizes, which are those of `shape`."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the caller's place in a dimension."""
        source = self._elastic_mesh(mesh_dim)
        return super().get_local_rank(mesh_dim) if source is None else source._elastic_rank()

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        """Return the process group of a dimension; the elastic one is the very group that was given."""
        if (source := self._elastic_mesh(mesh_dim)) is not None:
            return source._group()
        is_elsewhere = isinstance(mesh_dim, str) and mesh_dim not in self._names
        if is_elsewhere and self._fixed is not None:
            return self._fixed.get_group(mesh_dim)  # it may be flattened of fixed dimensions
        return super().get_group(mesh_dim)

    @property
    def _coordinate_on_dim(self) -> tuple[int, ...] | None:
        """The value of `get_coordinate`; None if the caller is not in the mesh."""
        if self._fixed_coordinate is None:
            return None
        return self._with_elastic(self._fixed_coordinate, self._elastic_rank())

    @_coordinate_on_dim.setter
    def _coordinate_on_dim(self, coordinate: tuple[int, ...] | None) -> None:
        self._fixed_coordinate = coordinate

    def _elastic_size(self) -> int:
        try:
            group = self._group()
            size = group.size()
            if size == 1 and isinstance(group, ManagedProcessGroup):
                # It is that of all members if only one of them contributes: torch skips a reduction over a
                # dimension of size one, but the members that do not contribute need the result, too.
                size = int(group.parent.size())
            return max(1, size)
        except FaultToleranceError:
            return 1

    def _elastic_rank(self) -> int:
        """Return the rank, capped to the size: a spare has its rank among all members."""
        try:
            return min(self._group().rank(), self._elastic_size() - 1)
        except FaultToleranceError:
            return 0

    def _group(self) -> ProcessGroup:
        if self._elastic_group is None:
            raise ProcessGroupError("the mesh was loaded where its elastic group is not registered")
        return self._elastic_group

    def _with_elastic(self, values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[: self._elastic_dim], value, *values[self._elastic_dim + 1 :])

    # ------------------------------------------------------------ meshes made from it

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of some of the dimensions, in their order, or a flattened mesh by its name.

        Raises:
            KeyError: there is no such dimension, or the names are in another order.
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        found = [(dim, mesh) for dim, name in enumerate(names) if (mesh := self._elastic_mesh(name))]
        if not found:
            return self._slice_fixed(names)
        dim, source = found[0]
        if names in (self._names, source._names):
            return self if names == self._names else source
        others = names[:dim] + names[dim + 1 :]
        if set(others) & set(source._made_of):
            raise RuntimeError(f"{names[dim]} overlaps with other dimensions of {names}")
        places = [self._names.index(name) for name in names if name in self._names]
        if places != sorted(places):
            raise KeyError(f"the dimensions {names} are not in the order of the mesh, {self._names}")
        fixed = self._slice_fixed(others) if others else None
        return ManagedDeviceMesh(fixed, names, source._group(), dim, parent=self)

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """Join all dimensions into one: a mesh whose group reduces over the fixed ones and the elastic one.

        Every rank of the replica group calls this, as it may make a group over several fixed dimensions.

        Raises:
            ValueError: the name is that of another dimension, or of another flattened mesh.
        """
        name = mesh_dim_name or "_".join(self._names)
        if self._names == (name,):
            return self
        flattened = self._root._flattened
        if name not in flattened:
            if name in self._root._names:
                raise ValueError(f"{name} is a dimension of the mesh already; choose another name")
            group = self._group()
            if (fixed := self._fixed) is not None:
                within = fixed if fixed.ndim == 1 else fixed._flatten(f"{name}_within", backend_override)
                inner_size = math.prod(fixed.shape[self._elastic_dim :])
                group = FlattenedProcessGroup(within.get_group(), group, inner_size)
            flattened[name] = ManagedDeviceMesh(None, (name,), group, 0, parent=self)
            flattened[name]._made_of = self._names
        if flattened[name]._made_of != self._names:
            raise ValueError(f"{name} is what {flattened[name]._made_of} were flattened to already")
        return flattened[name]

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
        backend_override: Any = None,
    ) -> DeviceMesh:
        """Split one of the fixed dimensions into several; the elastic one cannot be split."""
        place = self._names.index(dim) if isinstance(dim, str) else dim % self.ndim
        if self._fixed is None or place == self._elastic_dim:
            raise NotSupportedError("the elastic dimension is one: how many it joins is not known in advance")
        is_before = place < self._elastic_dim
        fixed = self._fixed._unflatten(
            place if is_before else place - 1, mesh_sizes, mesh_dim_names, backend_override
        )
        names = (*self._names[:place], *mesh_dim_names, *self._names[place + 1 :])
        elastic_dim = self._elastic_dim + (len(mesh_sizes) - 1 if is_before else 0)
        return ManagedDeviceMesh(fixed, names, self._group(), elastic_dim, parent=self)

    def _slice_fixed(self, names: tuple[str, ...]) -> DeviceMesh:
        if self._fixed is None:
            raise KeyError(f"there is no dimension {names} in the mesh {self._names}")
        return self._fixed[names]

    def _elastic_mesh(self, dim: int | str | None) -> ManagedDeviceMesh | None:
        """Return the mesh, this or a flattened one, whose elastic dimension `dim` names or numbers."""
        if isinstance(dim, str) and dim not in self._names:
            return self._root._flattened.get(dim)
        if isinstance(dim, str):
            dim = self._names.index(dim)
        is_elastic = self.ndim == 1 if dim is None else dim % self.ndim == self._elastic_dim
        return self if is_elastic else None

    @property
    def _names(self) -> tuple[str, ...]:
        return self.mesh_dim_names or ()

    @property
    def _root(self) -> ManagedDeviceMesh:
        root = self._get_root_mesh()
        return root if isinstance(root, ManagedDeviceMesh) else self

    # ----------------------------------------------------------------------- identity

    def __eq__(self, other: object) -> bool:
        """Return whether dimensions, ranks and elastic group are the same, in any quorum."""
        return isinstance(other, ManagedDeviceMesh) and self._hash_key() == other._hash_key()

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self._hash_key())
        return self._hash

    def _hash_key(self) -> tuple[Any, ...]:
        """Return what identifies the mesh.

        A plain mesh of the same ranks is not equal: its reductions stay in the replica group.
        """
        key = (self._flatten_rank_map, self._layout, self.device_type, self._names, self._thread_id)
        return (*key, self._elastic_dim, self._dim_group_names[self._elastic_dim])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the group: a copy in the same process finds it by its name."""
        return {**super().__getstate__(), "_elastic_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        name = self._dim_group_names[self._elastic_dim]
        group = self._pg_registry.get(name)
        self._elastic_group = group if isinstance(group, ProcessGroup) else None

    def __repr__(self) -> str:
        sizes = self._with_elastic(super().shape, 0)
        shown = (f"{name}={size or 'elastic'}" for name, size in zip(self._names, sizes, strict=True))
        return f"ManagedDeviceMesh(({', '.join(shown)}), {self.device_type!r})"


# As torch does for its own mesh: `torch.load` takes the DTensors of a rank that were saved with `torch.save`.
torch.serialization.add_safe_globals([ManagedDeviceMesh])


def _check_dimensions(ndim: int, names: Sequence[str], elastic_dim: int) -> None:
    if len(names) != ndim or len(set(names)) != ndim or not 0 <= elastic_dim < ndim:
        what = f"the names {tuple(names)} and the elastic dimension {elastic_dim}"
        raise ValueError(f"{what} do not fit a mesh of {ndim} dimensions")


def _register(group: ProcessGroup, name: str) -> None:
    """Give the group a name if it has none; all ranks that make the same meshes give the same names."""
    try:
        group.group_name  # noqa: B018 - it raises if the group has no name
    except ProcessGroupError:
        group.register(f"{name}-{next(_registrations)}")


# ------------------------------------------------------- how torch stores a mesh
#
# A DeviceMesh is a layout (size and stride of each dimension) over a list of ranks, and the names of its
# dimensions' process groups. torch 2.11, 2.12 and 2.13 differ in how they store that.


def _insert_dimension(mesh: DeviceMesh | None, dim: int) -> dict[str, Any]:
    """Return the arguments for DeviceMesh that describe `mesh` with one more dimension, of size one.

    The ranks are those of the mesh that `mesh` was sliced from: torch joins two meshes (FSDP does, with
    that of tensor parallelism) only where these are equal. Without a mesh, the only rank is the caller's.
    """
    if mesh is None:
        return {"_layout": _unit_layout(1), "_rank_map": torch.tensor([dist.get_rank()], dtype=torch.int)}
    layout: Any = mesh._layout
    return {
        "_layout": layout.splice(dim, dim, _unit_layout(_stride(layout, dim))),
        "_rank_map": mesh._rank_map,
    }


def _unit_layout(stride: int) -> Any:
    if hasattr(MeshLayout, "from_sizes_strides"):  # in these versions a dimension of size one has no stride
        return MeshLayout.from_sizes_strides((1,), (1,))
    return MeshLayout((1,), (stride,))


def _stride(layout: Any, dim: int) -> int:
    """Return an unsqueezed dimension's stride: torch 2.11 wants strides that do not grow."""
    if dim == len(layout):
        return 1
    size, stride = next(iter(layout[dim].sizes_and_strides), (1, 1))
    return int(size * stride)


Handler = Callable[[Call], Work]


class FlattenedProcessGroup(ProcessGroupWrapper):
    """A group of the ranks of `within` times the members of `across`.

    It has the reductions to all, broadcast, gathering to all and the barrier. The first half of an
    operation is waited for before the second begins, so only the second is asynchronous.

    INVARIANT: what is done within does not depend on the elastic group, whose error one rank of a replica
    group may know of before another does: all of them do the same, and none waits for one that does not.

    Args:
        within: torch's group of the ranks of this replica group.
        across: the elastic group of this rank and its counterparts, to which `configure`, `abort`,
          `shutdown` and `set_timeout` are passed on; operations within keep the timeout that torch was given.
        inner_size: how many consecutive ranks have the same place in `across`. All of `within` if its
            dimension is the outer one; a divisor if the elastic one stands between two others.
    """

    def __init__(self, within: dist.ProcessGroup, across: ProcessGroup, inner_size: int) -> None:
        super().__init__(pg=across)
        self._within = within
        self._inner_size = inner_size
        self._handlers: Mapping[str, Handler] = {
            "allreduce": self._within_then_across,
            "allreduce_coalesced": self._within_then_across,
            "broadcast": self._broadcast,
            "allgather": self._gather,
            "_allgather_base": self._gather,
            "barrier": self._within_then_across,
        }

    def size(self) -> int:
        """Return the number of ranks of the replica group times the number of members across."""
        return int(self._within.size() * self._across_size())

    def rank(self) -> int:
        """Return the caller's place in row-major order of the dimensions that were flattened."""
        across_rank = min(self.parent.rank(), self._across_size() - 1)  # a healing rank may have a higher one
        return self._rank_of(across_rank, self._within.rank())

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        if (handler := self._handlers.get(collective.name)) is None:
            raise NotSupportedError(
                f"a flattened group has no {collective.name}; use the groups of the dimensions one by one"
            )
        call = collective.bind(args, kwargs)
        if collective.name in JOINING and len(call.outputs) > 1:
            raise NotSupportedError(
                f"{collective.name} of {len(call.outputs)} tensors joins tensors and ranks in one, which "
                "a flattened group cannot do in two halves; pass one tensor, or use allreduce_coalesced"
            )
        return handler(call)

    def _within_then_across(self, call: Call) -> Work:
        """Run the collective within the replica group, then across.

        Averages are right, as replica groups are equally large. A rank that has met its counterparts across
        knows that all ranks have met within.
        """
        name = call.collective.name
        getattr(self._within, name)(*call.args, **call.kwargs).wait()
        work: Work = getattr(self.parent, name)(*call.args, **call.kwargs)
        return work

    def _broadcast(self, call: Call) -> Work:
        """Broadcast within every replica group, then across, from every rank of the root's group."""
        outside, inner = divmod(call.root, self._inner_size)
        outer, across_root = divmod(outside, self._across_size())
        within_root = outer * self._inner_size + inner
        (tensor,) = call.outputs
        self._within.broadcast(tensor, within_root).wait()
        work: Work = self.parent.broadcast_one(tensor, across_root)
        return work

    def _gather(self, call: Call) -> Work:
        for source, outputs in _gathered(call, self.size()):
            mine = torch.stack(self._gather_in(self._within, source))
            for across_rank, rows in enumerate(self._gather_in(self.parent, mine)):
                for within_rank, row in enumerate(rows):
                    outputs[self._rank_of(across_rank, within_rank)].copy_(row)
        return FinishedOperation(call.result)

    @staticmethod
    def _gather_in(group: dist.ProcessGroup, source: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(source) for _ in range(group.size())]
        group.allgather([parts], [source]).wait()
        return parts

    def _across_size(self) -> int:
        """Return the number of members across; 1 while none is known."""
        return max(1, int(self.parent.size()))

    def _rank_of(self, across_rank: int, within_rank: int) -> int:
        outer, inner = divmod(within_rank, self._inner_size)
        return (outer * self._across_size() + across_rank) * self._inner_size + inner


def _gathered(call: Call, size: int) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return each tensor to be gathered with the tensors that take it, in the order of ranks."""
    if call.collective.name == "_allgather_base":
        source = call.inputs
        if call.outputs.numel() != size * source.numel():
            numbers = f"{call.outputs.numel()} elements for {size} times {source.numel()}"
            raise ValueError(f"an output of {numbers}")
        return [(source, list(call.outputs.view(size, *source.shape)))]
    for outputs in call.outputs:
        if len(outputs) != size:
            raise ValueError(f"{len(outputs)} output tensors for a group of {size}")
    return list(zip(call.inputs, call.outputs, strict=True))
