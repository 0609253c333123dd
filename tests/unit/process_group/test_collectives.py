"""The table of collectives: complete, readable in every overload, and right for a group of one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOp
from torch._C._distributed_c10d import ProcessGroup as TorchProcessGroup

from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.collectives import BY_NAME, COLLECTIVES

# Methods of newer torches that take one tensor in place of a list.
IN_ONE_TENSOR = {"gather_single", "gather_into_tensor"}

# What returns a work and moves no tensors.
WORK_OF_ANOTHER_KIND = {"_end_coalescing", "reconfigure"}

# Methods of torch's class that are not collectives.
NOT_COLLECTIVES = {
    "abort",
    "boxed",
    "get_group_store",
    "merge_remote_group",
    "name",
    "rank",
    "set_timeout",
    "shutdown",
    "size",
    "split_group",
    "unbox",
}


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def test_every_method_of_torchs_class_that_returns_work_has_a_row() -> None:
    methods = {
        name
        for name, method in inspect.getmembers(TorchProcessGroup, callable)
        if not name.startswith("__") and ("c10d::Work" in (method.__doc__ or "") or "barrier" in name)
    }
    assert methods - WORK_OF_ANOTHER_KIND - set(BY_NAME) - IN_ONE_TENSOR == set()
    for row in COLLECTIVES:
        assert set(row.names) & methods, f"{row.name} is no method of this torch"
    assert vars(ProcessGroup).keys() >= IN_ONE_TENSOR
    assert not NOT_COLLECTIVES & set(BY_NAME)


def test_every_name_is_a_method_of_its_own_with_name_doc_and_signature() -> None:
    for name, row in BY_NAME.items():
        method = vars(ProcessGroup)[name]
        assert method.__name__ == name
        assert row.signature in method.__doc__
        assert next(iter(inspect.signature(method).parameters)) == "self"


def test_every_overload_binds_to_the_same_call() -> None:
    tensor = ones(2)
    outputs = [zeros(2), zeros(2)]
    rows: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("allreduce", ([tensor],), {}),
        ("allreduce", (tensor, ReduceOp.SUM), {}),
        ("allreduce", (), {"tensors": [tensor]}),
        ("broadcast", (tensor, 0), {}),
        ("broadcast", (), {"tensor": tensor, "root": 0}),
    ]
    for name, args, kwargs in rows:
        assert BY_NAME[name].bind(args, kwargs).outputs[0] is tensor
    for args in (([outputs], [tensor]), (outputs, tensor)):
        call = BY_NAME["allgather"].bind(args, {})
        assert call.outputs[0][1] is outputs[1]
        assert call.inputs[0] is tensor
        assert [item is output for item, output in zip(call.result, outputs, strict=True)] == [True, True]


def test_a_name_that_is_not_torchs_is_told_of() -> None:
    with pytest.raises(TypeError, match=r"missing argument 'tensors' \(given are tensor_list, opts; the"):
        BY_NAME["broadcast"].bind((), {"tensor_list": [torch.ones(1)], "opts": BroadcastOptions()})


def test_the_reduction_is_read_from_every_overload() -> None:
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.MAX)
    allreduce = BY_NAME["allreduce"]
    for args, kwargs in [
        (([ones(1)], options), {}),
        ((ones(1), ReduceOp.MAX), {}),
        ((ones(1),), {"op": ReduceOp(ReduceOp.MAX)}),
    ]:
        assert allreduce.bind(args, kwargs).reduce_op == ReduceOp(ReduceOp.MAX)
    assert allreduce.bind((ones(1),), {}).reduce_op == ReduceOp(ReduceOp.SUM)


def garbage(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def split(count: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(i)) for i in range(count)]


ALONE: dict[str, tuple[tuple[Any, ...], Any]] = {
    # the arguments of rank 1 in a world of 3, and the outputs that it is left with
    "allreduce": (([ones(2)],), [ones(2)]),
    "allreduce_coalesced": (([ones(2)],), [ones(2)]),
    "broadcast": (([ones(2)],), [ones(2)]),
    "reduce": (([ones(2)],), [ones(2)]),
    "allgather": (([[garbage(2) for _ in range(3)]], [ones(2)]), [[ones(2)] * 3]),
    "allgather_coalesced": (
        ([[garbage(2), garbage(1)] for _ in range(3)], [ones(2), zeros(1)]),
        [[ones(2), zeros(1)]] * 3,
    ),
    "_allgather_base": ((garbage(6), ones(2)), ones(6)),
    "allgather_into_tensor_coalesced": (([garbage(6)], [ones(2)]), [ones(6)]),
    "gather": (([[garbage(2) for _ in range(3)]], [ones(2)]), [[ones(2)] * 3]),
    "scatter": (([garbage(2)], [split(3)]), [ones(2)]),
    "reduce_scatter": (([garbage(2)], [split(3)]), [ones(2)]),
    "_reduce_scatter_base": ((garbage(2), torch.cat(split(3))), ones(2)),
    "reduce_scatter_tensor_coalesced": (([garbage(2)], [torch.cat(split(3))]), [ones(2)]),
    "alltoall": (([garbage(2) for _ in range(3)], split(3)), [zeros(2), ones(2), zeros(2)]),
    "alltoall_base": ((garbage(6), torch.cat(split(3)), [], []), torch.cat([zeros(2), ones(2), zeros(2)])),
    "send": (([ones(2)], 0, 0), None),
    "recv": (([garbage(2)], 0, 0), [zeros(2)]),
    "recv_anysource": (([garbage(2)], 0), [zeros(2)]),
    "barrier": ((), None),
    "monitored_barrier": ((), None),
}


def test_alone_outputs_made_in_inference_mode_are_defined_too() -> None:
    with torch.inference_mode():
        outputs, own = [torch.full((2,), 9.0) for _ in range(3)], torch.ones(2)
    BY_NAME["allgather"].bind(([outputs], [own]), {}).apply_locally(rank=1, world_size=3)
    assert outputs[1].tolist() == [1.0, 1.0]


def test_alone_uneven_splits_keep_the_callers_own_rows() -> None:
    output, source = garbage(4), torch.arange(5.0)
    call = BY_NAME["alltoall_base"].bind((output, source, [1, 2, 1], [2, 2, 1]), {})
    call.apply_locally(rank=1, world_size=3)
    assert output.tolist() == [0, 2, 3, 0]


def test_alone_who_is_not_the_root_gets_zeros_from_a_scatter_and_nothing_from_a_gather() -> None:
    output = garbage(2)
    BY_NAME["scatter"].bind(([output], []), {}).apply_locally(rank=1, world_size=3)
    assert torch.equal(output, zeros(2))
    BY_NAME["gather"].bind(([], [ones(2)]), {}).apply_locally(rank=1, world_size=3)
