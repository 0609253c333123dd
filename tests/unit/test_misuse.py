"""What a first user gives wrongly, and the error that says what was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

import torchft_like
from torchft_like import Manager, ProcessGroupDummy
from torchft_like.collectives import allreduce_quantized
from torchft_like.errors import ConfigError, NotSupportedError
from torchft_like.gang import FakeGang, ReduceOperation


class AManager:
    """What of a Manager a wrapper looks at when it is made."""

    def should_commit(self) -> bool:
        raise AssertionError("no step has begun")


def manager_with(**arguments: Any) -> Manager:
    return Manager(ProcessGroupDummy(0, 1), None, None, 1, lighthouse_addr="http://127.0.0.1:9", **arguments)


net: Any = torch.nn.Linear(2, 1)
sgd: Any = torch.optim.SGD(net.parameters())
manager: Any = AManager()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: torchft_like.Optimizer(sgd, manager), "takes the Manager and .* not SGD and AManager"),
        (lambda: torchft_like.Optimizer(manager, net), "not AManager and Linear"),
        (lambda: torchft_like.DistributedDataParallel(net, manager), "the module, not Linear and AManager"),
        (lambda: torchft_like.PureDistributedDataParallel(net, manager), "not Linear and AManager"),
        (lambda: torchft_like.DiLoCo(manager, net, sgd, sgd, 4), r"is a Linear: pass a list, as \[model\]"),
        (lambda: torchft_like.LighthouseServer(join_timeout=5), "join_timeout; there are .*join_timeout_ms"),
        (lambda: torchft_like.restartable(max_restart=3), "option max_restart; there are .*max_restarts"),  # type: ignore[call-overload]
        (lambda: manager_with(checkpoint_transport="http"), "is 'http': it must be an HTTPTransport"),
    ],
)
def test_an_argument_that_is_something_else_is_named(misuse: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        misuse()


def test_a_reduction_names_what_it_cannot_reduce() -> None:
    tensor: Any = torch.zeros(2)
    with pytest.raises(ConfigError, match="a list of tensors, not a tensor"):
        allreduce_quantized(tensor, ReduceOp.SUM, ProcessGroupDummy(0, 1))
    with pytest.raises(NotSupportedError, match="MAX of quantized numbers"):
        allreduce_quantized([tensor], ReduceOp.MAX, ProcessGroupDummy(0, 1))
    numbers: Any = [1.0]
    with pytest.raises(ValueError, match="reduces a tensor, not a list"):
        FakeGang(torch.device("cpu")).all_reduce(numbers, ReduceOperation.SUM)
