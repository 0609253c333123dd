"""The fingerprint of a state: what is in it, what is not, and in which step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.unit.checkpointing.library_types import quantized
from torchft_like.divergence import OnDivergence, StateFingerprint
from torchft_like.dtypes import DTYPES
from torchft_like.errors import ConfigError, NotSupportedError

SHAPES = [(), (1,), (3,), (5, 7), (0,), (2, 0, 3)]
DEVICE_OF_NO_BYTES = torch.device("meta")


def values(tensors: list[Tensor], slices: int = 1) -> list[bytes]:
    """The fingerprints of one round of steps."""
    fingerprint = StateFingerprint(tensors, slices=slices)
    return [fingerprint.take(step).result() for step in range(slices)]


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of any dtype with arbitrary bits in it, none of which a copy would change."""
    generator = torch.Generator().manual_seed(3)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def flip(tensor: Tensor, bit: int) -> None:
    """Change one bit of the elements of a tensor, whatever its strides."""
    memory = tensor.contiguous().reshape(-1).view(torch.uint8)
    memory[bit // 8] ^= 1 << bit % 8
    with torch.no_grad():
        tensor.copy_(memory.view(tensor.dtype).reshape(tensor.shape))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_and_shape_is_read(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some(dtype, shape)
    before = values([tensor])
    assert values([tensor.clone()]) == before
    if tensor.numel() and dtype != torch.bool:
        flip(tensor, 8 * tensor.numel() * tensor.element_size() - 3)
        assert values([tensor]) != before


STATE: dict[str, Callable[[], Tensor]] = {
    "weight": lambda: torch.randn(5, 7),
    "half": lambda: torch.randn(9).bfloat16(),
    "transposed": lambda: torch.randn(6, 4).T,
    "every other": lambda: torch.randn(40)[::2],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "not aligned": lambda: torch.randn(12).half()[1:],
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
}


@pytest.mark.agreement
@given(st.sampled_from(sorted(STATE)), st.integers(0), st.integers(1, 40), st.integers(0, 100))
@settings(max_examples=150)
def test_a_changed_bit_is_found_in_one_step(name: str, bit: int, slices: int, first_step: int) -> None:
    torch.manual_seed(1)
    state = {key: make() for key, make in STATE.items()}
    fingerprint = StateFingerprint(state.values(), slices=slices)
    steps = range(first_step, first_step + slices)
    before = [fingerprint.take(step).result() for step in steps]
    bits = 8 * state[name].numel() * state[name].element_size()
    if bits:
        flip(state[name], bit % bits)
    after = [fingerprint.take(step).result() for step in steps]
    assert sum(one != other for one, other in zip(before, after, strict=True)) == min(bits, 1)


def test_strides_do_not_count() -> None:
    """A healed replica may hold the same numbers in another memory format."""
    image = torch.randn(2, 3, 4, 5)
    assert values([image], 3) == values([image.to(memory_format=torch.channels_last)], 3)
    assert values([image.mT], 3) == values([image.mT.contiguous()], 3)
    one = torch.ones(1, 2, dtype=torch.float64)[:, ::2]
    assert values([one], 3) == values([torch.ones(1, 1, dtype=torch.float64)], 3)


def test_conjugated_and_negated_views_are_read_as_what_they_stand_for() -> None:
    numbers = torch.randn(5, dtype=torch.complex64)
    assert values([numbers.conj()]) == values([numbers.conj().resolve_conj()])
    assert values([numbers.conj().imag]) == values([numbers.conj().imag.resolve_neg()])


@pytest.mark.parametrize(
    "others",
    [
        [torch.zeros(6)],
        [torch.zeros(2, 3), torch.zeros(0)],
        [torch.zeros(3, 2)],
        [torch.zeros(2, 3, dtype=torch.int32)],
    ],
    ids=["shape", "number", "transposed", "dtype"],
)
def test_other_tensors_have_another_layout(others: list[Tensor]) -> None:
    assert layout_of(StateFingerprint(others)) != layout_of(StateFingerprint([torch.zeros(2, 3)]))


def test_another_number_of_slices_is_another_layout() -> None:
    tensors = [torch.zeros(2, 3)]
    assert layout_of(StateFingerprint(tensors, slices=2)) != layout_of(StateFingerprint(tensors, slices=3))


def layout_of(fingerprint: StateFingerprint) -> bytes:
    return fingerprint.take(0).result()[1:9]


def test_only_a_report_asks_nobody_to_heal() -> None:
    heals = {
        policy: StateFingerprint([torch.zeros(1)], on_divergence=policy).take(0).result()[0]
        for policy in OnDivergence
    }
    assert heals == {OnDivergence.HEAL: 1, OnDivergence.HEAL_UNLESS_TIED: 1, OnDivergence.REPORT: 0}


# ------------------------------------------------------------------ optimizers


class Trained:
    """A model and its optimizer after some steps."""

    def __init__(
        self, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
    ) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        self.optimizer = kind(self.model.parameters(), lr=0.1, **options)
        self.fingerprint = StateFingerprint(self.model.parameters(), [self.optimizer], slices=1)

    def step(self) -> None:
        torch.manual_seed(6)
        self.model(torch.randn(3, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def value(self) -> bytes:
        return self.fingerprint.take(0).result()

    def state_tensors(self) -> Iterator[Tensor]:
        for entries in self.optimizer.state.values():
            yield from (value for value in entries.values() if isinstance(value, Tensor))


def test_every_tensor_of_the_optimizer_is_watched_as_soon_as_it_is_there() -> None:
    trained = Trained()
    first = trained.value()
    trained.step()
    assert trained.value()[1:9] != first[1:9], "the layout has new tensors in it"
    tensors = list(trained.state_tensors())
    assert len(tensors) == 3 * 4
    for tensor in tensors:
        before = trained.value()
        flip(tensor, 0)
        assert trained.value() != before
        flip(tensor, 0)
        assert trained.value() == before


def test_loading_another_state_of_the_same_form_is_noticed() -> None:
    """Loading replaces the tensors: those of before are of no interest any more."""
    one, other = Trained(), Trained()
    one.step()
    other.step()
    assert one.value() == other.value()
    other.step()
    one.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    one.model.load_state_dict(other.model.state_dict())
    assert one.value() == other.value()


def test_loading_tensors_of_another_form_is_noticed() -> None:
    trained = Trained(torch.optim.SGD, momentum=0.9)
    trained.step()
    before = trained.value()
    parameter = trained.optimizer.param_groups[0]["params"][0]
    trained.optimizer.state[parameter]["momentum_buffer"] = torch.zeros(8, 4, dtype=torch.float64)
    after = trained.value()
    assert after[1:9] != before[1:9]


def test_a_tensor_where_there_was_none_is_noticed() -> None:
    trained = Trained(torch.optim.SGD)
    parameter = trained.optimizer.param_groups[0]["params"][0]
    entries = trained.optimizer.state[parameter]
    entries["momentum_buffer"] = None
    trained.value()
    entries["momentum_buffer"] = torch.zeros_like(parameter)
    before = trained.value()
    flip(entries["momentum_buffer"], 3)
    assert trained.value() != before


def test_looking_does_not_add_to_the_optimizer_s_state() -> None:
    trained = Trained()
    trained.value()
    assert len(trained.optimizer.state) == 0


# ------------------------------------------------------------- shards and devices


def test_of_a_sharded_tensor_the_local_shard_is_read(mesh: DeviceMesh) -> None:
    shard = torch.randn(3, 4)
    sharded = nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False))
    fingerprint = StateFingerprint([sharded], slices=1)
    before = fingerprint.take(0).result()
    assert before == values([shard])[0]
    flip(shard, 17)
    assert fingerprint.take(0).result() != before


def test_of_a_tensor_of_a_librarys_class_its_inner_tensors_are_read(mesh: DeviceMesh) -> None:
    own: Any = quantized()
    sharded = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    parameter = nn.Parameter(own, requires_grad=False)
    for tensor in own, parameter, sharded:
        fingerprint = StateFingerprint([tensor], slices=1)
        before = fingerprint.take(0).result()
        assert before == values([own.codes, own.scale])[0]
        flip(own.codes, 17)
        assert fingerprint.take(0).result() != before
        flip(own.codes, 17)


def test_a_tensor_of_a_librarys_class_in_the_place_of_another_is_noticed() -> None:
    trained = Trained(torch.optim.SGD)
    parameter = trained.optimizer.param_groups[0]["params"][0]
    entries = trained.optimizer.state[parameter]
    for tensor in torch.ones(4, 3), quantized(), torch.ones(4, 3), quantized(8):
        before = trained.value()
        entries["momentum_buffer"] = tensor
        assert trained.value()[1:9] != before[1:9]
    before = trained.value()
    entries["momentum_buffer"] = quantized()
    assert trained.value()[1:9] == before[1:9]
    assert trained.value() != before


def test_a_rank_without_a_share_of_a_tensor_has_a_fingerprint_too(mesh: DeviceMesh) -> None:
    empty = DTensor.from_local(torch.empty(0, 4), mesh, [Shard(0)], run_check=False)
    assert values([empty]) == values([torch.empty(0, 4)])


def test_nothing_is_left_to_wait_for_on_the_cpu() -> None:
    assert StateFingerprint([torch.zeros(3)]).take(0).is_ready


def test_autograd_does_not_see_it() -> None:
    parameter = nn.Parameter(torch.randn(3))
    StateFingerprint([parameter], slices=1).take(0).result()
    assert parameter.grad is None
    assert parameter.grad_fn is None


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.empty(3, device=DEVICE_OF_NO_BYTES)], ids=["sparse", "meta"]
)
def test_what_has_no_bytes_to_compare_is_refused(tensor: Tensor) -> None:
    with pytest.raises(NotSupportedError, match="leave it out"):
        StateFingerprint([tensor])


def test_bad_settings_are_refused() -> None:
    slices: list[Any] = [0, 1.5, True]
    for bad in slices:
        with pytest.raises(ConfigError, match=f"slices is {bad}"):
            StateFingerprint([torch.zeros(1)], slices=bad)
    with pytest.raises(ConfigError, match="no tensor"):
        StateFingerprint([])
