"""Functional collectives, called as they are and from compiled code.

They find the group by its name, and C++ calls it. Inductor would need a C++ compiler; `aot_eager`
traces and functionalises as it does, and runs what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from .scene import Case, Scene

Collective = Callable[[Tensor, Scene], Any]

# The tensor's first dimension is that of `joined`, so that it can be scattered.
_ALL: dict[str, Collective] = {
    "all_reduce": lambda t, s: functional.all_reduce(t, "sum", s.group),
    "broadcast": lambda t, s: functional.broadcast(t, s.root, s.group),
    "all_gather_tensor": lambda t, s: functional.all_gather_tensor(t, 0, s.group),
    "all_gather_single": lambda t, s: functional.all_gather_single(t, 0, s.group),
    "reduce_scatter_tensor": lambda t, s: functional.reduce_scatter_tensor(t, "sum", 0, s.group),
    "reduce_scatter_single": lambda t, s: functional.reduce_scatter_single(t, "sum", 0, s.group),
    "all_reduce_coalesced": lambda t, s: functional.all_reduce_coalesced([t, t + 1], "sum", s.group),
    "all_gather_into_tensor_coalesced": lambda t, s: functional.all_gather_into_tensor_coalesced(
        [t, t + 1], s.group
    ),
    "reduce_scatter_tensor_coalesced": lambda t, s: functional.reduce_scatter_tensor_coalesced(
        [t, t + 1], "sum", [0, 0], s.group
    ),
    "all_to_all_single": lambda t, s: functional.all_to_all_single(t, None, None, s.group),
    "permute_tensor": lambda t, s: functional.permute_tensor(t, [*s.ranks[1:], 0], s.group),
    "all_gather_tensor_autograd": lambda t, s: functional.all_gather_tensor_autograd(t, 0, s.group),
    "reduce_scatter_tensor_autograd": lambda t, s: functional.reduce_scatter_tensor_autograd(
        t, "sum", 0, s.group
    ),
    "all_to_all_single_autograd": lambda t, s: functional.all_to_all_single_autograd(t, None, None, s.group),
}
FUNCTIONAL = {name: collective for name, collective in _ALL.items() if hasattr(functional, name)}


def functional_call(name: str) -> Case:
    """Return a case that calls a collective, uses its result, and goes backward through it where it can."""

    def case(s: Scene) -> Any:
        tensor = s.tensor(shape=s.joined())
        if name.endswith("_autograd"):
            tensor.requires_grad_()
            result = plain(FUNCTIONAL[name](tensor, s))
            (result * 2).sum().backward()
            return result, tensor.grad
        return plain(FUNCTIONAL[name](tensor, s))

    return case


def compiled(name: str) -> Case:
    """Return the same case for code that `torch.compile` has traced in one piece, twice."""

    def case(s: Scene) -> Any:
        def compute(tensor: Tensor) -> Any:
            given = FUNCTIONAL[name](tensor * 2, s)
            return [t + 1 for t in given] if isinstance(given, list) else given + 1

        torch._dynamo.reset()
        traced = torch.compile(compute, backend="aot_eager", fullgraph=True)
        return [plain(traced(s.tensor(salt, s.joined()))) for salt in (0, 1)]

    return case


def between(s: Scene) -> Any:
    """Call what Dynamo cannot trace, so that the interpreter calls the group between two compiled pieces."""

    def compute(tensor: Tensor) -> Tensor:
        total = tensor * 2
        work = dist.all_reduce(total, group=s.group, async_op=True)
        work.wait()
        dist.broadcast(tensor, s.root, group=s.group)
        return total + tensor

    torch._dynamo.reset()
    traced = torch.compile(compute, backend="aot_eager")
    return [traced(s.tensor(salt)) for salt in (0, 1)]


def plain(given: Any) -> Any:
    """Return the tensors themselves, once they are there."""
    return [plain(t) for t in given] if isinstance(given, list) else functional.wait_tensor(given) + 0  # type: ignore[no-untyped-call]
