"""Values of a library's own classes travel in a state if torch knows the classes as plain data."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Flag
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from lighthouse.core.state_form import first_difference
from tests.fake_world import fake_mesh
from tests.unit.checkpointing.library_types import KINDS, Quantized, Range, Rounding, Settings, quantized
from tests.unit.checkpointing.states import dump_state, load_state, round_trip
from torchft_like.checkpointing.shards import place
from torchft_like.checkpointing.state_stream import IncomingState, flatten_state, read_header
from torchft_like.digest import state_digest
from torchft_like.errors import CheckpointFormatError
from torchft_like.manager.state_registry import form_of


@pytest.fixture(autouse=True)
def _known_to_torch() -> Iterator[None]:
    known = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(KINDS)
    yield
    torch.serialization.clear_safe_globals()  # which some tests do: other tests need what libraries gave
    torch.serialization.add_safe_globals(known)


def incoming(state: object) -> tuple[IncomingState, io.BytesIO]:
    source = io.BytesIO(dump_state(state))
    return IncomingState(read_header(source)), source


def test_a_tensor_of_a_librarys_class_is_put_together_of_the_same_parts() -> None:
    sent = {"optim": {"state": {0: {"exp_avg": quantized()}}}}
    received = round_trip(sent)["optim"]["state"][0]["exp_avg"]
    assert type(received) is Quantized
    assert torch.equal(received.codes, quantized().codes)
    assert received.settings == Settings(Rounding.STOCHASTIC)
    assert state_digest({"": received}) == state_digest({"": quantized()})
    assert state_digest({"": received}) != state_digest({"": quantized(scale=0.25)})


@pytest.mark.parametrize("value", [Rounding.NEAREST, Settings(Rounding.NEAREST, 3, [0.5]), Range(1, 2.5)])
def test_settings_travel(value: object) -> None:
    (received,) = round_trip([value])
    assert type(received) is type(value)
    assert received == value


@pytest.mark.parametrize("value", [Rounding.NEAREST, Settings(Rounding.NEAREST), Range(1, 2), quantized()])
def test_a_class_that_torch_does_not_know_is_refused_at_both_ends(value: object) -> None:
    sent = dump_state({"a": value})
    name = type(value).__qualname__
    torch.serialization.clear_safe_globals()
    with pytest.raises(CheckpointFormatError, match=rf"^a.*{name}, .*add_safe_globals\(\[{name}\]\)"):
        dump_state({"a": value})
    with pytest.raises(CheckpointFormatError, match=r"\w, which this process does not take: import"):
        load_state(sent)


def test_a_class_that_torch_was_given_under_another_name_travels() -> None:
    torch.serialization.clear_safe_globals()
    with torch.serialization.safe_globals([(Rounding, "library.before.Rounding")]):
        assert round_trip([Rounding.NEAREST]) == [Rounding.NEAREST]


def test_other_fields_of_the_same_class_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = dump_state([Settings(Rounding.NEAREST), Rounding.NEAREST])

    @dataclass
    class Other:
        step: int

    Other.__module__, Other.__qualname__ = Settings.__module__, Settings.__qualname__
    torch.serialization.clear_safe_globals()
    with (
        torch.serialization.safe_globals([Other, Rounding]),
        pytest.raises(CheckpointFormatError, match="fields"),
    ):
        load_state(sent)


def test_a_dataclass_that_holds_more_than_its_fields_is_refused() -> None:
    value = Settings(Rounding.NEAREST)
    object.__setattr__(value, "cache", 1)
    with pytest.raises(CheckpointFormatError, match="Settings, which does not travel"):
        dump_state(value)


def test_what_a_receiver_could_not_put_together_is_refused_at_its_sender() -> None:
    class Flags(Flag):
        A = 1
        B = 2

    @dataclass
    class Mapped(dict):  # type: ignore[type-arg]
        step: int = 0

    @dataclass
    class Plain:
        __slots__ = ("step",)
        step: int

    with torch.serialization.safe_globals([Flags, Mapped, Plain]):
        assert round_trip([Flags.A, Plain(3)]) == [Flags.A, Plain(3)]
        for value in Flags.A | Flags.B, Flags(0), Mapped(3):
            with pytest.raises(
                CheckpointFormatError, match=f"a.*{type(value).__name__}, which does not travel"
            ):
                dump_state({"a": value})


def test_no_dtensor_comes_by_this_way() -> None:
    with fake_mesh(2) as mesh:
        whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
        structure, _ = flatten_state({"a": whole})
    assert b"DTensor" not in structure


def test_a_named_tuple_travels_beside_dtensors_and_with_them() -> None:
    with fake_mesh(2) as mesh:
        whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
        sent = {"w": whole, "range": Range(1, whole)}
        received: Any = place(round_trip(sent), sent)
        assert type(received["range"]) is Range
        assert received["range"].low == 1
        assert isinstance(received["range"].high, DTensor)


def test_a_dtensor_in_another_value_of_a_librarys_class_is_refused_at_its_sender() -> None:
    """Its receiver would load the shard that it came as."""
    with fake_mesh(2) as mesh:
        whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
        for value in Settings(Rounding.NEAREST, kept=[Range(1, whole)]), Quantized(whole, whole, None):  # type: ignore[arg-type, list-item]
            with pytest.raises(CheckpointFormatError, match=r"^a\..* is a DTensor in a value of a library's"):
                dump_state({"a": value})
        dump_state({"a": whole})


def test_a_shard_of_a_dtensor_may_be_of_a_librarys_class() -> None:
    with fake_mesh(2) as mesh:
        own: Any
        own, sent = (
            {"w": DTensor.from_local(one, mesh, [Replicate()], run_check=False)}
            for one in (quantized(1), quantized())
        )
        state, source = incoming(sent)
        assert first_difference(form_of(own), form_of(state.outline)) is None
        assert state.land_in(own)
        received: Any = place(state.read_all(source), own)
    assert torch.equal(received["w"].to_local().codes, quantized().codes)
    assert torch.equal(own["w"].to_local().codes, quantized().codes)


def test_what_arrives_lands_in_the_inner_tensors_at_its_place() -> None:
    own: Any = {"a": quantized(1), "b": nn.Parameter(quantized(2), requires_grad=False)}
    state, source = incoming({"a": quantized(), "b": quantized()})
    assert state.land_in(own)
    received: Any = state.read_all(source)
    assert received["a"].codes.data_ptr() == own["a"].codes.data_ptr()
    assert torch.equal(own["a"].codes, quantized().codes)


def test_a_state_is_no_strangers_before_it_has_come() -> None:
    own = {"optim": {"weight": quantized(1), "rounding": Rounding.NEAREST}}
    state, _ = incoming(own)
    assert first_difference(form_of(own), form_of(state.outline)) is None
    other, _ = incoming({"optim": {"weight": torch.ones(4, 3), "rounding": Rounding.NEAREST}})
    difference = first_difference(form_of(own), form_of(other.outline))
    assert difference is not None
    assert difference.path == "optim.weight"
