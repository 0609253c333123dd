"""What torch's DistributedDataParallel reduces, over a group whose members come and go.

torch assigns parameters to buckets twice: when the model is wrapped, and before the second forward pass, in
the order in which the first gradients came. A replica that joins later reduces its first gradients in buckets
that the others no longer have. A sum carries no names, so each takes the other's parameters for its own.

And it reduces which parameters were used, where it looks for unused ones: one that no member used keeps the
gradient that it had. A replica that heals adds zero to gradients, but has those of what it used. With a
static graph that is reduced in the first step of each replica only, which the others do not do with it.

Before each forward pass it sends the buffers of rank 0 to all, which may heal in that step.

A member that has joined torch's `Join` repeats the others' collectives without beginning their steps.

INVARIANTS
* Over a group that torch did not make, a reducer's buckets depend on the model alone.
* Over a managed group all members write the reduced gradients of the same parameters, and take the buffers of
  one that has the state. No member stands in for one that has no more inputs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,
    Work,
    _compute_bucket_assignment_by_size,
)
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from torchft_like.errors import NotSupportedError
from torchft_like.process_group.collectives import ALLREDUCE, Collective
from torchft_like.process_group.swallowing import ManagedProcessGroup, skipped
from torchft_like.process_group.torch_interface import TorchInterface
from torchft_like.process_group.wrapper import ProcessGroupDummy, ProcessGroupWrapper


def fix_buckets(model: DistributedDataParallel) -> None:
    """Let the model's reducer rebuild its buckets now, as it fills them where it looks for unused parameters.

    It rebuilds them once, so they stay as they are. It has the parameters that were trained as it was made.
    """
    parameters, are_sparse = _reduced[model]
    first = _DEFAULT_FIRST_BUCKET_BYTES if model.bucket_bytes_cap_default else model.bucket_bytes_cap
    limits = getattr(model, "bucket_bytes_cap_list", None) or [first, model.bucket_bytes_cap]
    buckets, _ = _compute_bucket_assignment_by_size(parameters, limits, are_sparse)
    reducer: Any = model.reducer
    dictating = _Dictating(buckets[::-1])  # as torch has them: the last one is reduced first
    reducer._update_process_group(dictating)
    try:
        reducer._push_all_rebuilt_params()
        reducer._rebuild_buckets()
    finally:
        reducer._update_process_group(_group_of_reducer(model))


def adopt_reducers() -> None:
    """Make torch's DistributedDataParallel keep these invariants. May be repeated."""
    for name, method in _ASSIGNING.items():
        setattr(DistributedDataParallel, name, _then_fixed(method))
    _torchs_class._sync_module_buffers = _sync_module_buffers
    _torchs_class.join_hook = _join_hook


NO_JOIN = "replicas need no join for uneven inputs: one that has no more of them shuts its Manager down"
_torchs_class: Any = DistributedDataParallel
_torchs_sync = _torchs_class._sync_module_buffers
_torchs_join_hook = _torchs_class.join_hook


def _join_hook(model: DistributedDataParallel, **kwargs: Any) -> Any:
    if isinstance(model.process_group, ManagedProcessGroup):
        raise NotSupportedError(NO_JOIN)
    return _torchs_join_hook(model, **kwargs)


def _sync_module_buffers(model: DistributedDataParallel, authoritative_rank: int) -> None:
    group: Any = model.process_group
    if isinstance(group, ManagedProcessGroup):
        authoritative_rank = group.member_with_state(authoritative_rank)
    _torchs_sync(model, authoritative_rank)


# By model: the parameters that its reducer has, and which of their gradients are sparse.
_reduced: weakref.WeakKeyDictionary[DistributedDataParallel, Any] = weakref.WeakKeyDictionary()
# After each of these torch would assign parameters anew.
_ASSIGNING: Mapping[str, Callable[..., None]] = {
    name: getattr(DistributedDataParallel, name)
    for name in ("_ddp_init_helper", "_set_static_graph", "_update_process_group")
}


def _then_fixed(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def call(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if method is _ASSIGNING["_ddp_init_helper"]:
            _reduced[model] = args[:2]
        method(model, *args, **kwargs)
        group: Any = model.process_group
        is_torchs = group in c10d._world.pg_map and not getattr(group, "_was_registered_here", False)
        if isinstance(group, TorchInterface) and not is_torchs:
            fix_buckets(model)

    return call


def _group_of_reducer(model: DistributedDataParallel) -> Any:
    group: Any = model.process_group
    if not isinstance(group, ManagedProcessGroup):
        return group
    kinds = _reducers_groups.setdefault(group, {})
    return kinds.setdefault(model.static_graph, _ReducersGroup(group, model.static_graph))


class _ReducersGroup(ProcessGroupWrapper):
    """A managed group for a reducer, whose only integers are how many members used each parameter.

    All members count. With a static graph each parameter counts as used.
    """

    def __init__(self, group: ManagedProcessGroup, is_static: bool) -> None:
        super().__init__()
        self._group = weakref.ref(group)  # the model has it
        self._is_static = is_static

    @property
    def parent(self) -> Any:
        """The managed group."""
        return self._group()

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        if collective is ALLREDUCE:
            call = collective.bind(args, kwargs)
            (tensor,) = call.inputs
            if tensor.dtype == torch.int32 and self._is_static:
                tensor.fill_(1)
                return skipped(call, self)
            if tensor.dtype == torch.int32:
                work: Work | None = self.parent.begin_allreduce(collective, args, kwargs, of_all_members=True)
                return work
        return super()._run(collective, args, kwargs)


# A reducer keeps only the part in C++ of its group alive.
_reducers_groups: weakref.WeakKeyDictionary[ManagedProcessGroup, dict[bool, _ReducersGroup]] = (
    weakref.WeakKeyDictionary()
)


class _Dictating(ProcessGroupDummy):
    """A group of one that answers a reducer's broadcasts of its buckets' parameters, by their numbers."""

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        super().__init__(0, 1)
        flat = [number for bucket in buckets for number in bucket]
        self._answers = [[*flat, len(buckets)], list(map(len, buckets))]

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        (tensor,) = collective.bind(args, kwargs).inputs
        tensor.copy_(torch.tensor(self._answers.pop(0), dtype=tensor.dtype, device=tensor.device))
        return super()._run(collective, args, kwargs)
