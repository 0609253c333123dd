"""Where what is read arrives."""

from __future__ import annotations

import pytest
import torch

from tests.unit.message_queue.queues import LIMIT_S, Queues
from tests.unit.message_queue.test_queue import same


@pytest.mark.parametrize("remote", [(), (0,)], ids=["local", "remote"])
def test_tensors_arrive_on_the_cpu_whatever_the_default_device_is(
    queues: Queues, remote: tuple[int, ...]
) -> None:
    writer, (reader,) = queues.make(remote=remote)
    sent = [torch.arange(3), torch.empty(0, 3), b"c" * 5000]
    with torch.device("meta"):
        writer.enqueue(sent, LIMIT_S)
        found = reader.dequeue(LIMIT_S)
    assert same(found, sent)
    assert [tensor.device.type for tensor in found[:2]] == ["cpu", "cpu"]  # type: ignore[index]
