"""What a queue is made of, and how long it waits: numbers that make no sense."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.message_queue.queues import Queues
from torchft_like.message_queue import MessageQueue


@pytest.mark.parametrize(
    "arguments",
    [
        (-1, 0),
        (1, 2),
        (5000, 1),
        (1, 1, None, 100),
        (1, 1, None, 2**41),
        (1, 1, None, 4096, 0),
        (1, 1, None, 256, 2**20 + 1),
        (1, 1, None, 1e4),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_value_errors(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"local|max_chunk"):
        MessageQueue(*arguments)


def test_ranks_and_timeouts_that_make_no_sense_are_value_errors(queues: Queues) -> None:
    with pytest.raises(ValueError, match="distinct"):
        MessageQueue(2, 2, local_reader_ranks=[1, 1])
    writer, (reader,) = queues.make()
    for timeout in (-1, -0.5, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            reader.dequeue(timeout)
        with pytest.raises(ValueError, match="timeout"):
            writer.enqueue(1, timeout)
    with pytest.raises(ValueError, match="no local reader"):
        MessageQueue.create_from_handle(writer.export_handle(), 5)
