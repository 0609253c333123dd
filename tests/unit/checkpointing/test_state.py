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
from tests.faults import raising
from tests.unit.checkpointing.states import dump_state, load_state, round_trip, stream_of
from torchft_like.checkpointing import state_stream
from torchft_like.checkpointing.shards import STATE_SCHEMA
from torchft_like.checkpointing.state_stream import (
    HEADER_BYTES,
    Expectation,
    IncomingState,
    Snapshot,
    flatten_state,
    read_header,
)
from torchft_like.errors import CheckpointError, CheckpointFormatError
from torchft_like.plain_data import DEPTH_MAX, Limits

# torch says this of every complex32 tensor, wherever it is made.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

# Beside those of tests/unit/test_plain_data.py, which messages hold, too.
SCALARS: list[object] = [
    *(1 << 20_000, math.nan, struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0]),
    *(complex(1, -0.0), complex(math.nan, math.inf), '\x00\n"\\'),
    *(torch.Size([-1, 3]), torch.Size([]), torch.float32, torch.bfloat16),
    *(torch.device("cpu"), torch.device("cuda:3")),
    *(np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.float64(math.nan)),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: type(value).__name__)
def test_scalar_comes_back_with_its_type_and_bits(value: object) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip({"key": [value, (value,)]}), {"key": [value, (value,)]})


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[::2, 1:],
        lambda t: t[0],
        lambda t: t[2, 3],
        lambda t: t.unsqueeze(0).expand(3, -1, -1),
        lambda t: t.flip(0),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
    ],
    ids=["stride", "row", "cell", "expand", "flip", "conj", "neg"],
)
def test_views_arrive_with_the_values_that_they_show(view: Any) -> None:
    tensor = view(torch.arange(32, dtype=torch.float32).reshape(4, 8)[:4])
    (received,) = round_trip([tensor])
    assert torch.equal(received, tensor.resolve_conj().resolve_neg())
    assert received.is_contiguous()
    assert received._base is None


def test_elements_without_a_gap_between_them_lie_as_they_did() -> None:
    """Or each step of an optimizer would take another kernel after a heal, and several times as long."""
    matrix, images = torch.randn(3, 4).T, torch.randn(2, 5, 3, 3).to(memory_format=torch.channels_last)
    state = {
        "m": matrix,
        "tied": matrix.detach(),
        "i": nn.Parameter(images),
        "c": torch.complex(matrix, matrix),
    }
    received = round_trip(state)
    assert same(received, {name: tensor.detach() for name, tensor in state.items()})
    assert {n: t.stride() for n, t in received.items()} == {n: t.stride() for n, t in state.items()}
    assert received["m"].data_ptr() == received["tied"].data_ptr()


def test_ordered_dict_and_counter_keep_their_types_and_a_models_state_its_versions() -> None:
    model = nn.BatchNorm1d(2).state_dict()
    state = {"o": OrderedDict([("b", 1), ("a", 2)]), "c": Counter("aab"), "model": model}
    received = round_trip(state)
    assert same(received, state)
    assert vars(received["model"])["_metadata"] == vars(model)["_metadata"]


def test_tied_weights_are_sent_once_and_are_one_memory_again() -> None:
    weight = torch.randn(1000, 1000)
    state = {"wte": weight, "head": weight.detach(), "other": weight.clone()}
    assert Snapshot(state).nbytes < 2.1 * weight.nbytes
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
        ([defaultdict(int)], r"collections\.defaultdict"),
        ([Point(1, 2)], "Point"),
        ({Foo(): 1}, r"^\[.*\] is under a key of type .*Foo"),
        ({"a": {b"key": 1}}, r"a\[b'key'\] is under a key of type bytes"),
        ([torch.empty(2, dtype=vars(torch)["uint4"])], r"dtype torch\.uint4"),
    ],
)
def test_a_type_outside_the_schema_is_refused_with_its_path(state: object, message: str) -> None:
    with pytest.raises(CheckpointFormatError, match=message):
        Snapshot(state)


def test_nesting_up_to_the_limit_travels() -> None:
    state: object = 1
    for _ in range(DEPTH_MAX):
        state = [state]
    assert round_trip(state) == state


def test_a_description_that_is_too_large_is_refused_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(STATE_SCHEMA, limits=Limits(structure_bytes=1000))
    monkeypatch.setattr(state_stream, "STATE_SCHEMA", small)
    with pytest.raises(CheckpointFormatError, match="keep large lists of numbers in tensors"):
        Snapshot(list(range(1000)))


def test_a_header_that_claims_too_much_is_refused_before_it_is_read() -> None:
    prefix = struct.pack("<8sIII", b"TFTSTATE", 3, 2**32 - 1, 0)
    with pytest.raises(CheckpointFormatError, match="the header claims 4294967295 bytes"):
        load_state(prefix)


def test_a_header_whose_text_has_changed_on_the_way_is_refused() -> None:
    with pytest.raises(CheckpointFormatError, match="the header is corrupt"):
        load_state(dump_state("name").replace(b"name", b"nama"))


def test_format_errors_are_checkpoint_errors_and_value_errors() -> None:
    assert issubclass(CheckpointFormatError, CheckpointError)
    assert issubclass(CheckpointFormatError, ValueError)


def test_a_stream_of_another_version_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(CheckpointFormatError, match=r"has version 1, this is 3: .* same version"):
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
    header = Snapshot([2**40] * 200_000).header
    assert read_header(io.BytesIO(header))
    with pytest.raises(CheckpointFormatError, match=r"claims 18000\d\d bytes.* beside this rank's own state"):
        read_header(io.BytesIO(header[:20]), expected.limits)


def test_a_caller_may_know_better_how_large_a_state_may_grow() -> None:
    expected = Expectation(2**40)
    for _ in range(2):
        assert expected.limits.leaf_bytes == 2**40
        expected.learn([])


def test_memory_is_made_for_what_has_come() -> None:
    state = [torch.zeros(5_000_000, dtype=torch.uint8), *(torch.ones(1000) for _ in range(50))]
    stream = io.BytesIO(dump_state(state)[:1_000_000])
    incoming = IncomingState(read_header(stream))
    with pytest.raises(CheckpointFormatError, match="truncated"):
        incoming.read_all(stream)
    assert [made is not None for made in incoming._leaves] == [True, *[False] * 50]


STATE = {"a": torch.randn(333), "b": [torch.arange(5), torch.empty(0), torch.randn(70, 7)], "c": b"x" * 5000}


def test_chunks_may_come_in_any_order_and_each_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_stream, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(state_stream, "PIECE_BYTES", 100)
    snapshot = Snapshot(STATE).fill()
    sums = b"".join(snapshot.sums())
    incoming = IncomingState(snapshot.header[HEADER_BYTES:])
    for start in reversed(range(0, snapshot.nbytes, 2048)):
        stop = min(start + 2048, snapshot.nbytes)
        assert not incoming.matches(sums, start, stop)
        incoming.read(io.BytesIO(b"".join(snapshot.pieces(start, stop))), start, stop)
        assert incoming.matches(sums, start, stop)
    assert same(incoming.state(), STATE)


def test_a_reader_hears_that_a_state_could_not_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot([torch.ones(100)])
    monkeypatch.setattr(snapshot, "_copy", raising(MemoryError))
    with pytest.raises(MemoryError):
        snapshot.fill()
    with pytest.raises(CheckpointError, match="could not be copied"):
        next(snapshot.pieces(0, 100))


class TestLanding:
    """In the receiver's own tensors, where they lie like those that come."""

    def land(self, state: object, own: object) -> Any:
        snapshot = Snapshot(state).fill()
        source = io.BytesIO(stream_of(snapshot))
        incoming = IncomingState(read_header(source))
        incoming.land_in(own)
        return incoming.read_all(source)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
    def test_a_tensor_of_the_same_form_takes_the_bytes(self, dtype: torch.dtype) -> None:
        state = {"m": [OrderedDict(w=torch.ones(5, 3, dtype=dtype), s=torch.tensor(1, dtype=dtype))], "x": 1}
        own = {"m": [OrderedDict(w=torch.zeros(5, 3, dtype=dtype), s=torch.tensor(0, dtype=dtype))], "x": 0}
        received = self.land(state, own)
        assert same(received, state)
        for name in "ws":
            assert received["m"][0][name].data_ptr() == own["m"][0][name].data_ptr()  # type: ignore[index]

    def test_one_whose_elements_lie_in_the_same_order_takes_the_bytes(self) -> None:
        theirs = torch.randn(2, 5, 3, 3).to(memory_format=torch.channels_last)
        mine, other = torch.zeros_like(theirs), torch.zeros(2, 5, 3, 3)
        received = self.land({"a": theirs, "b": theirs.clone()}, {"a": mine, "b": other})
        assert torch.equal(mine, theirs)
        assert received["a"].data_ptr() == mine.data_ptr()
        assert not other.any()

    def test_a_parameter_takes_them_and_knows_nothing_of_it(self) -> None:
        net, peer = nn.Linear(3, 2), nn.Linear(3, 2)
        received = self.land(peer.state_dict(), net.state_dict(keep_vars=True))
        assert torch.equal(net.weight, peer.weight)
        assert not received["weight"].requires_grad
        assert net.weight.requires_grad

    @pytest.mark.parametrize(
        "own",
        [
            lambda: torch.zeros(4, 6)[:, ::2],
            lambda: torch.zeros(3, 4).T,
            lambda: torch.zeros(4, 3, dtype=torch.float64),
            lambda: torch.zeros(3, 4),
            lambda: torch.zeros(12),
            lambda: torch.zeros(4, 3, device="meta"),
            lambda: torch.zeros(1, 3).expand(4, 3),
            lambda: torch.zeros(4, 3).numpy(),
            lambda: None,
        ],
        ids=["strided", "transposed", "dtype", "shape", "flat", "meta", "expanded", "array", "none"],
    )
    def test_another_tensor_stays_as_it_is(self, own: Any) -> None:
        mine = own()
        received = self.land({"w": torch.ones(4, 3)}, {"w": mine})
        assert same(received, {"w": torch.ones(4, 3)})
        if mine is not None and getattr(mine, "device", None) != torch.device("meta"):
            assert not mine.any()

    def test_tensors_that_share_memory_here_and_not_there_stay_as_they_are(self) -> None:
        memory = torch.zeros(10)
        own = {"a": memory[:6], "b": memory[4:], "c": torch.zeros(2)}
        state = {"a": torch.ones(6), "b": torch.full((6,), 2.0), "c": torch.ones(2)}
        assert same(self.land(state, own), state)
        assert not memory.any()
        assert own["c"].all()

    def test_tied_weights_take_them_once(self) -> None:
        mine, theirs = torch.zeros(4), torch.ones(4)
        received = self.land({"wte": theirs, "head": theirs}, {"wte": mine, "head": mine})
        assert received["wte"].data_ptr() == received["head"].data_ptr() == mine.data_ptr()

    def test_a_state_of_another_form_lands_where_it_can(self) -> None:
        own = {"a": torch.zeros(2), "l": [torch.zeros(1)]}
        state = {
            "a": torch.ones(2),
            "l": [torch.ones(1), torch.ones(1)],
            "b": {"c": np.ones(3), "d": "e" * 5000},
        }
        assert same(self.land(state, own), state)
        assert own["a"].all()  # type: ignore[attr-defined]
        assert not own["l"][0].any()  # type: ignore[index]
