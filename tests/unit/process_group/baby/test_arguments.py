"""Arguments of collectives as plain data."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from torchft_like.errors import NotSupportedError
from torchft_like.plain_data import decode as decode_plain
from torchft_like.process_group.baby.messages import decode, decode_call, encode, encode_call

TENSORS = [torch.zeros(1), torch.ones(2)]
OPTIONS = [cls for name, cls in vars(c10d).items() if name.endswith("Options") and hasattr(cls, "asyncOp")]

WITHOUT_FACTOR = [op for op in ReduceOp.RedOpType.__members__.values() if op != ReduceOp.PREMUL_SUM]


def number_of(tensor: Tensor) -> bytes:
    return bytes([next(i for i, known in enumerate(TENSORS) if known is tensor)])


def through(value: Any) -> Any:
    (plain,) = decode_plain(encode(value, number_of))
    return decode(plain, lambda spec: TENSORS[spec[0]])


@pytest.mark.parametrize("count", [1, 1000])  # which is kept, and which is too long for that
def test_a_call_arrives_with_its_name_and_named_arguments(count: int) -> None:
    for _ in range(2):
        data = encode_call("allreduce", (count * [TENSORS[1]], 7), {"timeout": None, "tag": 3}, number_of)
        name, args, kwargs = decode_call(data)
        assert (name, args, kwargs) == ("allreduce", [count * [b"\x01"], 7], {"timeout": None, "tag": 3})
        decode(args, lambda spec: TENSORS[spec[0]]).clear()  # does not touch what is kept


def test_numbers_that_are_equal_and_of_other_types_are_not_taken_for_each_other() -> None:
    for value in (1, True, 1.0, 0.0, -0.0, False, 0):
        (_, (arrived,), _) = decode_call(encode_call("send", (value,), {}, number_of))
        assert repr(arrived) == repr(value)


@pytest.mark.parametrize(
    "value", [None, True, 7, -1, 2.5, "text", [1, 2], [], timedelta(milliseconds=-1), torch.device("cpu", 0)]
)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    assert through(value) == value


def test_tensors_are_found_again_however_deep_the_lists() -> None:
    first, second = TENSORS
    result = through([[first, second], (second,), []])
    assert [[t.numel() for t in inner] for inner in result] == [[1, 2], [2], []]
    assert result[0][0] is first


@pytest.mark.parametrize("operation", WITHOUT_FACTOR, ids=str)
def test_a_reduction_arrives_however_it_is_spelled(operation: Any) -> None:
    assert through(operation) == operation
    assert through(ReduceOp(operation)) == operation


def test_a_reduction_keeps_its_factor() -> None:
    sent = c10d._make_nccl_premul_sum(2.5)
    assert through(sent).__getstate__() == sent.__getstate__()


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_options_keep_every_field(cls: Any) -> None:
    options = cls()
    changes = {
        "timeout": timedelta(seconds=3),
        "rootRank": 2,
        "rootTensor": 1,
        "device_ids": [1, 3],
        "device": torch.device("cpu"),
        "reduceOp": ReduceOp(ReduceOp.MAX),
        "asyncOp": not options.asyncOp,
    }
    fields = [name for name, value in vars(cls).items() if isinstance(value, property)]
    assert set(fields) <= set(changes)
    for name in fields:
        setattr(options, name, changes[name])
    arrived = through(options)
    assert type(arrived) is cls
    assert {name: getattr(arrived, name) for name in fields} == {name: changes[name] for name in fields}


def test_options_that_differ_in_one_field_are_not_taken_for_each_other() -> None:
    variants = []
    for reduce_op in (ReduceOp.SUM, ReduceOp.MAX, *map(c10d._make_nccl_premul_sum, (0.5, 0.25))):
        for timeout in (timedelta(seconds=1), timedelta(seconds=2)):
            options = c10d.AllreduceOptions()
            options.reduceOp, options.timeout = reduce_op, timeout  # type: ignore[assignment] # torch takes either
            variants.append(options)
    for _ in range(2):
        for options in variants:
            arrived = through(options)
            assert arrived.reduceOp.__getstate__() == options.reduceOp.__getstate__()
            assert arrived.timeout == options.timeout


def test_what_no_collective_takes_is_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="set"):
        encode({1}, number_of)
