"""The trainer's side of shared CPU tensors: what is said to the subprocess before a request."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from torchft_like.process_group.baby.messages import ToChild
from torchft_like.process_group.baby.tensor_sharing import CpuExporter, Staging


def test_preambles_come_in_order_and_each_once() -> None:
    staging = Staging()
    exporter = CpuExporter(staging)
    blocks = [exporter.stage(torch.zeros(size))[0] for size in (10, 1_000_000)]
    preambles = list(exporter.preambles())
    assert [(message[0], message[2]) for message, _ in preambles] == [
        (ToChild.MAP, block.segment.number) for block in blocks
    ]
    staging.close()


def test_an_exporter_that_is_closed_while_a_preamble_is_sent_lets_the_sender_finish() -> None:
    staging = Staging()
    exporter = CpuExporter(staging)
    for size in (10, 1_000_000):
        exporter.stage(torch.zeros(size))
    preambles = exporter.preambles()
    _, (descriptor,) = next(preambles)
    exporter.close()
    staging.close()
    gc.collect()
    os.fstat(descriptor)  # it may be on its way
    assert next(preambles, None) is None
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
