"""The buckets of torch's DistributedDataParallel, over a group whose members come and go.

torch assigns parameters to buckets twice: when the model is wrapped, and before the second forward pass, in
the order in which the first gradients came. A replica that joins later reduces its first gradients in buckets
that the others no longer have. A sum carries no names, so each takes the other's parameters for its own.

INVARIANT: over a group that torch did not make, a reducer's buckets depend on the model alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,
    Work,
    _compute_bucket_assignment_by_size,
)
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from torchft_like.process_group.collectives import Collective
from torchft_like.process_group.torch_interface import TorchInterface
from torchft_like.process_group.wrapper import ProcessGroupDummy


def fix_buckets(model: DistributedDataParallel) -> None:
    """Let the model's reducer rebuild its buckets now, as it fills them where it looks for unused parameters.

    It rebuilds them once, so they stay as they are.
    """
    parameters, are_sparse = model._build_params_for_reducer()  # type: ignore[no-untyped-call]
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
        reducer._update_process_group(model.process_group)


def adopt_reducers() -> None:
    """Make torch's DistributedDataParallel keep its first buckets over such groups. May be repeated."""
    _torchs_class._ddp_init_helper = _init_and_fix


_torchs_class: Any = DistributedDataParallel
_torchs_init = _torchs_class._ddp_init_helper


def _init_and_fix(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    _torchs_init(model, *args, **kwargs)
    group: Any = model.process_group
    is_torchs = group in c10d._world.pg_map and not getattr(group, "_was_registered_here", False)
    if isinstance(group, TorchInterface) and not is_torchs:
        fix_buckets(model)


class _Dictating(ProcessGroupDummy):
    """A group of one that answers a reducer's broadcasts of its buckets' parameters, by their numbers."""

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        super().__init__(0, 1)
        flat = [number for bucket in buckets for number in bucket]
        self._answers = [[*flat, len(buckets)], list(map(len, buckets))]

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        (tensor,) = collective.bind(args, kwargs).inputs
        tensor.copy_(torch.tensor(self._answers.pop(0), dtype=tensor.dtype))
        return super()._run(collective, args, kwargs)
