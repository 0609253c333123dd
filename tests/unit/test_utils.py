"""torchft's helpers for streams, where there is no accelerator."""

from __future__ import annotations

import pytest
import torch

from torchft_like.utils import get_stream_context, synchronize


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_without_an_accelerator_there_is_nothing_to_wait_for() -> None:
    with get_stream_context(None):
        synchronize()
