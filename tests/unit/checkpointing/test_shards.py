"""DTensors travel as the rank's shard, and come to lie on the receiver's mesh or are refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tests.faults import raising
from tests.unit.checkpointing.states import dump_state, round_trip
from torchft_like.checkpointing.shards import place, shards_in
from torchft_like.checkpointing.state_stream import IncomingState, flatten_state, read_header
from torchft_like.errors import CheckpointFormatError, ConfigError
from torchft_like.manager.state_registry import StateRegistry
from torchft_like.plain_data import Shard as Sent


def lying(mesh: DeviceMesh, local: torch.Tensor, placement: Placement | None = None) -> DTensor:
    return DTensor.from_local(local, mesh, [placement or Shard(0)], run_check=False)


def test_a_parameter_comes_back_where_it_lay(mesh: DeviceMesh) -> None:
    local = torch.randn(3, 4)
    state = {"model": {"w": nn.Parameter(lying(mesh, local))}, "parts": [(lying(mesh, local + 1), 7)]}
    own = {"model": {"w": lying(mesh, torch.zeros(3, 4))}, "parts": [(lying(mesh, torch.zeros(3, 4)), 0)]}
    placed = place(round_trip(state), own)
    weight = placed["model"]["w"]
    assert (weight.shape, weight.placements, weight.device_mesh) == ((6, 4), (Shard(0),), mesh)
    assert torch.equal(weight.to_local(), local)
    assert torch.equal(placed["parts"][0][0].to_local(), local + 1)
    assert placed["parts"][0][1] == 7


def test_a_tensor_that_is_new_to_the_receiver_goes_to_the_mesh_of_the_others(mesh: DeviceMesh) -> None:
    sent = round_trip({"w": lying(mesh, torch.ones(3)), "moments": {0: lying(mesh, torch.ones(3))}})
    placed = place(sent, {"w": lying(mesh, torch.zeros(3)), "moments": {}})
    assert (placed["moments"][0].device_mesh, placed["moments"][0].stride()) == (mesh, (1,))


@pytest.mark.parametrize(
    ("own_shape", "placement"), [((2, 4), Shard(0)), ((3, 4), Replicate()), ((3, 4), Shard(1))], ids=str
)
def test_a_tensor_that_lies_otherwise_is_refused_by_its_path(
    mesh: DeviceMesh, own_shape: tuple[int, ...], placement: Placement
) -> None:
    sent = round_trip({"model": {"w": lying(mesh, torch.ones(3, 4))}})
    own = {"model": {"w": lying(mesh, torch.zeros(own_shape), placement)}}
    with pytest.raises(CheckpointFormatError, match=r"model\.w is .* here, and \(6, 4\) placed S\(0\)"):
        place(sent, own)


def test_without_a_mesh_of_that_form_it_is_refused(mesh: DeviceMesh) -> None:
    sent = round_trip([lying(mesh, torch.ones(3))])
    with pytest.raises(CheckpointFormatError, match=r"\[0\] is .* no DTensor there"):
        place(sent, [torch.ones(6)])


def test_of_two_meshes_of_that_form_it_is_put_on_the_one_where_the_sender_has_it(mesh: DeviceMesh) -> None:
    other = DeviceMesh("cpu", [1, 0], mesh_dim_names=("shard",))
    moments = [lying(other, torch.ones(3)), lying(mesh, torch.zeros(3))]
    sent = round_trip({"moments": moments, "v": lying(other, torch.ones(3)), "w": lying(mesh, torch.ones(3))})
    own = {"w": lying(mesh, torch.zeros(3)), "v": lying(other, torch.zeros(3)), "moments": []}
    assert [moment.device_mesh for moment in place(sent, own)["moments"]] == [other, mesh]


def test_where_no_place_tells_which_of_two_meshes_of_that_form_it_is_refused(mesh: DeviceMesh) -> None:
    sent = round_trip({"moments": [lying(mesh, torch.ones(3))]})
    other = DeviceMesh("cpu", [1, 0], mesh_dim_names=("shard",))
    own = {"w": lying(mesh, torch.zeros(3)), "v": lying(other, torch.zeros(3)), "moments": None}
    with pytest.raises(CheckpointFormatError, match=r"moments\[0\] is .* 2 meshes here have that form"):
        place(sent, own)


def test_meshes_are_told_apart_over_all_that_is_registered(mesh: DeviceMesh) -> None:
    other = DeviceMesh("cpu", [1, 0], mesh_dim_names=("shard",))
    state = {"model": [lying(mesh, torch.ones(3)), lying(other, torch.ones(3))]}
    state["optimizer"] = list(state["model"])
    registry, loaded = StateRegistry(), list[Any]()
    registry.register("model", loaded.append, lambda: state["model"])
    registry.register("optimizer", loaded.append, list)
    registry.load(round_trip(state))
    assert [moment.device_mesh for moment in loaded[1]] == [mesh, other]


def test_partial_values_are_refused_by_their_path(mesh: DeviceMesh) -> None:
    with pytest.raises(
        CheckpointFormatError, match=r"grads\.w is a DTensor placed P\(sum\): .* redistribute"
    ):
        flatten_state({"grads": {"w": lying(mesh, torch.ones(3), Partial())}})


def test_what_travels_says_how_it_lies(mesh: DeviceMesh) -> None:
    (sent,) = shards_in(round_trip([lying(mesh, torch.ones(3, 4), Replicate())]))
    assert isinstance(sent, Sent)
    assert str(sent.layout) == "(3, 4) placed R on a mesh (2,) ('shard',)"


def test_a_registry_places_what_it_loads(mesh: DeviceMesh) -> None:
    registry, loaded = StateRegistry(), list[Any]()
    registry.register("plain", loaded.append, lambda: torch.ones(2))
    registry.register("sharded", loaded.append, lambda: {"w": lying(mesh, torch.ones(2))})
    with registry.reading() as state:
        registry.load(round_trip(state))
    assert torch.equal(loaded[1]["w"].to_local(), torch.ones(2))


def test_a_state_that_arrived_in_kept_tensors_is_not_overwritten(mesh: DeviceMesh) -> None:
    """A function may copy the parameters into tensors that it keeps, whenever it is called (torchtitan)."""
    parameter, kept = torch.zeros(2), {"w": lying(mesh, torch.zeros(2))}

    def save() -> dict[str, Any]:
        kept["w"].to_local().copy_(parameter)
        return kept

    registry, loaded = StateRegistry(), list[Any]()
    registry.register("model", loaded.append, save)
    own = registry.own()
    source = io.BytesIO(dump_state({"model": {"w": lying(mesh, torch.ones(2))}}))
    incoming = IncomingState(read_header(source))
    assert incoming.land_in(own)
    registry.load(incoming.read_all(source), own)  # type: ignore[arg-type]
    assert torch.equal(loaded[0]["w"].to_local(), torch.ones(2))


def test_what_a_function_raises_when_it_is_looked_at_meets_the_script() -> None:
    registry = StateRegistry()
    registry.register("train", print, raising(ConfigError("not built yet")))
    with pytest.raises(ConfigError, match="not built yet"):
        registry.look(flatten_state)


def test_a_state_that_can_never_travel_is_refused_before_it_is_needed() -> None:
    registry = StateRegistry()
    registry.register("train", print, lambda: {"rng": torch.Generator()})
    with pytest.raises(CheckpointFormatError, match=r"train\.rng is a torch\._C\.Generator"):
        registry.look(flatten_state)


def test_a_state_is_looked_at_once_before_the_first_step_and_once_after_it() -> None:
    registry, calls, seen = StateRegistry(), list[int](), list[int]()
    registry.register("train", print, lambda: calls.append(1))
    for has_stepped in (False, False, True, True):
        registry.look(flatten_state, has_stepped=has_stepped)
        seen.append(len(calls))
    assert seen == [1, 1, 2, 2]


class Projection:
    """What some optimizers keep for a parameter once they have stepped."""


def test_what_an_optimizer_makes_in_its_first_step_is_refused_before_it_is_needed() -> None:
    registry, state = StateRegistry(), dict[str, Any]()
    registry.register("train", print, lambda: state)
    registry.look(flatten_state)
    form = registry.form
    state["projection"] = Projection()
    for _ in range(2):
        with pytest.raises(CheckpointFormatError, match=r"train\.projection is a .*Projection"):
            registry.look(flatten_state, has_stepped=True)
    state["projection"] = torch.ones(1)
    registry.look(flatten_state, has_stepped=True)
    assert registry.form == form, "which peers compare that have yet to step"
