"""State survives the stream bit for bit, and nothing but that state comes out of a damaged one."""

from __future__ import annotations

import io
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.equality import same
from tests.unit.checkpointing.states import load_state, round_trip
from torchft_like.checkpointing import state_stream
from torchft_like.checkpointing.shards import STATE_SCHEMA
from torchft_like.checkpointing.state_stream import (
    EncodedState,
    Expectation,
    IncomingState,
    flatten_state,
    read_header,
)
from torchft_like.errors import CheckpointFormatError
from torchft_like.plain_data import DEPTH_MAX, Limits

# torch says this of every complex32 tensor, wherever it is made.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SCALARS: list[object] = [
    *(None, True, False, 0, 1, -1, 2**63 - 1, -(2**63), 2**64, -(2**200), 1 << 20_000),
    *(0.0, -0.0, 1.5, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 0.1),
    *(
        struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0],
        complex(1, -0.0),
        complex(math.nan, math.inf),
    ),
    *("", "text", "naïve 日本 🙂", '\x00\n"\\', "\ud800", "\ud83d\ude00", b"", b"\x00\xff" * 100),
    *(
        torch.Size([2, 3]),
        torch.Size([]),
        torch.float32,
        torch.bfloat16,
        torch.device("cpu"),
        torch.device("cuda:3"),
    ),
    *(np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.float64(math.nan)),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: type(value).__name__)
def test_scalar_comes_back_with_its_type_and_bits(value: object) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip({"key": [value, (value,)]}), {"key": [value, (value,)]})


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[::2, 1:],
        lambda t: t[0],
        lambda t: t[2, 3],
        lambda t: t.unsqueeze(0).expand(3, -1, -1),
        lambda t: t.flip(0),
        lambda t: t.reshape(2, 2, 2, 4).to(memory_format=torch.channels_last),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
    ],
    ids=["T", "stride", "row", "cell", "expand", "flip", "channels_last", "conj", "neg"],
)
def test_views_arrive_with_the_values_that_they_show(view: Any) -> None:
    tensor = view(torch.arange(32, dtype=torch.float32).reshape(4, 8)[:4])
    (received,) = round_trip([tensor])
    assert torch.equal(received, tensor.resolve_conj().resolve_neg())
    assert received.is_contiguous()
    assert received._base is None


def test_ordered_dict_and_counter_keep_their_types() -> None:
    state = {"o": OrderedDict([("b", 1), ("a", 2)]), "c": Counter("aab")}
    assert same(round_trip(state), state)


def test_a_model_and_its_optimizer_continue_where_they_were() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    optimizer.step()
    schedule.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "schedule": schedule.state_dict()}
    received = round_trip(state)
    assert same(received, state)
    assert vars(received["model"])["_metadata"] == vars(state["model"])["_metadata"]
    optimizer.load_state_dict(received["optim"])
    model.load_state_dict(received["model"])
    schedule.load_state_dict(received["schedule"])


def test_tied_weights_are_sent_once_and_are_one_memory_again() -> None:
    weight = torch.randn(1000, 1000)
    state = {"wte": weight, "head": weight.detach(), "other": weight.clone()}
    assert EncodedState(state).part_nbytes() < 2.1 * weight.nbytes
    received = round_trip(state)
    assert received["wte"].data_ptr() == received["head"].data_ptr() != received["other"].data_ptr()


def test_overlapping_views_are_equal_but_no_longer_alias() -> None:
    whole = torch.arange(10.0)
    received = round_trip([whole, whole[2:5]])
    assert torch.equal(received[0][2:5], received[1])
    received[0].zero_()
    assert received[1].tolist() == [2.0, 3.0, 4.0]


def test_a_parameter_arrives_as_a_plain_tensor() -> None:
    (received,) = round_trip([nn.Parameter(torch.ones(2))])
    assert type(received) is torch.Tensor
    assert not received.requires_grad


def test_received_tensors_do_not_hold_each_other_alive() -> None:
    received = round_trip([torch.ones(4), torch.ones(100_000)])
    assert received[0].untyped_storage().nbytes() == 16


@pytest.mark.heal_is_clean
def test_a_snapshot_does_not_change_with_the_state() -> None:
    tensor = torch.ones(5)
    encoded = EncodedState([tensor])
    tensor.zero_()
    assert same(load_state(b"".join(encoded.part())), [torch.ones(5)])


class Foo:
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"optimizer": {"state": [0, {"foo": Foo()}]}},
            r"^optimizer\.state\[1\]\.foo is a .*\.Foo, which does not travel",
        ),
        ({"layer.0": Foo()}, r"^\['layer\.0'\] is a "),
        (Foo(), "^the state is a "),
        ([{1, 2}], r"^\[0\] is a set"),
        ([print], r"^\[0\] is a builtin_function_or_method"),
        ([defaultdict(int)], r"collections\.defaultdict"),
        ([Point(1, 2)], "Point"),
        ({Foo(): 1}, r"^\[.*\] is under a key of type .*Foo"),
        ({"a": {b"key": 1}}, r"a\[b'key'\] is under a key of type bytes"),
        ([np.array(["text"])], "numpy dtype <U4: only numbers travel"),
        ([np.array([Foo()])], "numpy dtype object"),
        ([torch.eye(2).to_sparse()], r"layout torch\.sparse_coo"),
        ([torch.empty(2, device="meta")], "is a tensor on meta"),
        ([torch.empty(2, dtype=vars(torch)["uint4"])], r"dtype torch\.uint4"),
    ],
)
def test_a_type_outside_the_schema_is_refused_with_its_path(state: object, message: str) -> None:
    with pytest.raises(CheckpointFormatError, match=message):
        EncodedState(state)


def test_nesting_up_to_the_limit_travels() -> None:
    state: object = 1
    for _ in range(DEPTH_MAX):
        state = [state]
    assert round_trip(state) == state


def test_a_description_that_is_too_large_is_refused_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(STATE_SCHEMA, limits=Limits(structure_bytes=1000))
    monkeypatch.setattr(state_stream, "STATE_SCHEMA", small)
    with pytest.raises(CheckpointFormatError, match="keep large lists of numbers in tensors"):
        EncodedState(list(range(1000)))


def test_a_header_that_claims_too_much_is_refused_before_it_is_read() -> None:
    prefix = struct.pack("<8sIII", b"TFTSTATE", 2, 2**32 - 1, 0)
    with pytest.raises(CheckpointFormatError, match="the header claims 4294967295 bytes"):
        load_state(prefix)


def test_a_stream_of_another_version_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(CheckpointFormatError, match=r"has version 1, this is 2: .* same version"):
        load_state(struct.pack("<8sIII", b"TFTSTATE", 1, 2, 0) + b"{}")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([torch.zeros(1, dtype=torch.uint8).expand(300_000_000)], r"has 300000000 bytes .* state_bytes_max"),
        ([torch.empty(0)] * 20_000, r"20000 tensors .* at most 16400 are taken"),
    ],
    ids=["bytes", "leaves"],
)
def test_a_receiver_takes_no_more_than_its_own_state_lets_expect(state: object, message: str) -> None:
    expected = Expectation()
    expected.learn({"w": torch.zeros(10)})
    structure, _ = flatten_state(state)
    IncomingState(structure)
    with pytest.raises(CheckpointFormatError, match=message):
        IncomingState(structure, expected.limits)


def test_a_receiver_reads_no_longer_header_than_its_own_state_lets_expect() -> None:
    expected = Expectation()
    expected.learn({"w": torch.zeros(10)})
    header = next(EncodedState([2**40] * 200_000).part())
    assert read_header(io.BytesIO(header))
    with pytest.raises(CheckpointFormatError, match=r"claims 18000\d\d bytes.* beside this rank's own state"):
        read_header(io.BytesIO(header[:20]), expected.limits)


def test_a_caller_may_know_better_how_large_a_state_may_grow() -> None:
    expected = Expectation(2**40)
    for _ in range(2):
        assert expected.limits.leaf_bytes == 2**40
        expected.learn([])


def test_memory_is_made_for_what_has_come() -> None:
    encoded = EncodedState(
        [torch.zeros(5_000_000, dtype=torch.uint8), *(torch.ones(1000) for _ in range(50))]
    )
    stream = io.BytesIO(b"".join(encoded.part())[:1_000_000])
    incoming = IncomingState(read_header(stream))
    with pytest.raises(CheckpointFormatError, match="truncated"):
        incoming.read_part(stream)
    assert [made is not None for made in incoming._leaves] == [True, *[False] * 50]


def test_parts_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_stream, "CHUNK_BYTES", 1000)
    state = {
        "a": torch.randn(333),
        "b": [torch.arange(5), torch.empty(0), torch.randn(70, 7)],
        "c": b"x" * 999,
    }
    encoded = EncodedState(state)
    for count in (1, 2, 3, 7, 50):
        parts = [b"".join(encoded.part(index, count)) for index in range(count)]
        assert [len(part) for part in parts] == [encoded.part_nbytes(index, count) for index in range(count)]
        incoming = IncomingState(read_header(io.BytesIO(parts[0])))
        for index in reversed(range(count)):
            source = io.BytesIO(parts[index])
            assert read_header(source) == incoming.header
            incoming.check_length(len(parts[index]) - incoming.header_nbytes, index, count)
            incoming.read_part(source, index, count)
        assert same(incoming.state(), state)
