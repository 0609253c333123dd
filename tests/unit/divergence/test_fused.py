"""The kernel for fingerprints on a GPU, in triton's interpreter, where torch has brought triton along."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from torchft_like.divergence import words

LIMIT_S = 110.0

INTERPRETED = """
import torch
from torchft_like.divergence import fused, words

torch.manual_seed(5)
for rows, dtype in ((1, torch.int32), (2, torch.int64), (19, torch.int32)):
    matrix = torch.randint(-2**31, 2**31, (rows, 2 * fused.COLUMNS)).to(dtype)
    factors = torch.randint(-2**62, 2**62, (2 * fused.COLUMNS,)) | 1
    assert torch.equal(fused.row_sums(matrix, factors), words._row_sums(matrix, factors)), (rows, dtype)
    assert not torch.equal(fused.row_sums(matrix, factors), words._row_sums(matrix + 1, factors))
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="torch without CUDA brings no triton")
def test_the_kernel_gives_what_torch_gives() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr


class OnGpu:
    """A device by its name alone."""

    type = "cuda"


def use(monkeypatch: pytest.MonkeyPatch, kernel: words.Kernel | None) -> words.Kernel:
    """What is used on a device for which `kernel` is offered."""
    monkeypatch.setattr(words, "_fused_kernel", lambda: kernel)
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda count, dtype, device: arange(count, dtype=dtype))
    monkeypatch.setattr(words, "_factors", lambda purpose, device: arange(words.ROW) * 2 + 1)
    return words._kernel_for.__wrapped__(OnGpu())


def test_a_kernel_that_gives_the_same_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(matrix: Tensor, factors: Tensor) -> Tensor:
        return (matrix * factors).sum(dim=1)

    assert use(monkeypatch, same) is same


def test_a_kernel_that_gives_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert use(monkeypatch, lambda matrix, factors: matrix.sum(dim=1)) is words._row_sums
    assert "are not torch's" in caplog.text


def test_a_kernel_that_cannot_be_compiled_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(matrix: Tensor, factors: Tensor) -> Tensor:
        raise RuntimeError("Failed to find C compiler")

    with caplog.at_level(logging.WARNING):
        assert use(monkeypatch, fail) is words._row_sums
    assert "Failed to find C compiler" in caplog.text


def test_without_triton_torch_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert use(monkeypatch, None) is words._row_sums
