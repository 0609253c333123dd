"""The trainer's side of shared CPU tensors: what is said to the subprocess before a request."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch

from torchft_like.process_group.baby.messages import ToChild
from torchft_like.process_group.baby.tensor_sharing import CpuExporter, Staging
from torchft_like.process_group.collectives import BY_NAME


class Recorder:
    """What an exporter sends, with the inodes of the descriptors, which have to be open then."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.inodes: list[int] = []

    def __call__(self, message: tuple[Any, ...], descriptors: tuple[int, ...]) -> None:
        self.sent.append((message[0], message[2]))
        self.inodes += [os.fstat(descriptor).st_ino for descriptor in descriptors]


def test_a_segment_is_mapped_once_and_while_its_descriptor_is_open() -> None:
    staging = Staging()
    exporter = CpuExporter(staging)
    exporter.send = recorder = Recorder()
    blocks = [exporter.stage(torch.zeros(size))[0] for size in (10, 1_000_000, 10)]
    assert recorder.sent == [(ToChild.MAP, block.segment.number) for block in blocks[:2]]
    assert len(set(recorder.inodes)) == 2
    staging.close()


def test_memory_that_is_gone_is_unmapped_before_the_next_call() -> None:
    exporter = CpuExporter(Staging())
    exporter.send = recorder = Recorder()
    tensor = torch.zeros(10).share_memory_()  # type: ignore[no-untyped-call]
    exporter.find(tensor)
    ((_, number),) = recorder.sent
    del tensor
    gc.collect()
    exporter.export(BY_NAME["barrier"].bind((), {}))
    assert recorder.sent[1:] == [(ToChild.UNMAP, number)]
