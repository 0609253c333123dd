"""A fingerprint of tensors on a GPU: the same as on the CPU, and nobody waits for the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.device import busy
from torchft_like.divergence import StateFingerprint
from torchft_like.divergence.words import _ROWS_ELSEWHERE, ROW

LIMIT_S = 60.0


def state() -> list[Tensor]:
    """Tensors that are computed in every way there is: in one piece, in rows, in blocks of rows."""
    torch.manual_seed(4)
    return [
        torch.randn(7, 5),
        torch.randn(3 * ROW + 11),
        torch.randn((_ROWS_ELSEWHERE + 2) * ROW + 1),
        torch.randn(1001).bfloat16()[1:],
        torch.randn(4, 6).T,
        torch.randn(9, dtype=torch.complex64),
        torch.tensor(2.0),
        torch.empty(0),
    ]


@pytest.mark.parametrize("slices", [1, 5])
def test_a_gpu_computes_what_a_cpu_does(slices: int) -> None:
    here = StateFingerprint(state(), slices=slices)
    there = StateFingerprint([tensor.cuda() for tensor in state()], slices=slices)
    for step in range(slices):
        assert there.take(step).result() == here.take(step).result()


def test_a_state_on_two_kinds_of_device_has_a_fingerprint() -> None:
    tensors = [torch.zeros(3), torch.zeros(3, device="cuda")]
    fingerprint = StateFingerprint(tensors, slices=1)
    before = fingerprint.take(0).result()
    for tensor in tensors:
        tensor[1] = 1.0
        after = fingerprint.take(0).result()
        assert after != before
        before = after


def test_taking_it_does_not_wait_for_the_device() -> None:
    parameter = torch.zeros(5 * ROW, device="cuda")
    fingerprint = StateFingerprint([parameter], slices=1)
    before = fingerprint.take(0).result()  # the factors are on the device from now on
    busy()
    parameter.add_(1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = fingerprint.take(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not pending.is_ready
    after = pending.result()
    assert pending.is_ready
    assert after != before, "it was computed after what the stream had to do before"
    assert after == StateFingerprint([parameter.cpu()], slices=1).take(0).result()
