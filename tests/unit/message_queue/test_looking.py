"""Readers that have no time to wait, and look again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lighthouse.address import LOOPBACK
from tests.unit.message_queue.queues import LIMIT_S, Queues, wait_for
from torchft_like.errors import QueueTimeoutError, QueueWriterLostError
from torchft_like.message_queue import MessageQueue

NEAR_AND_FAR = pytest.mark.parametrize("remote", [(), (0,)], ids=["local", "remote"])


def is_answered(call: Callable[..., object]) -> Callable[[], bool]:
    """Whether it has no need to wait."""

    def look() -> bool:
        try:
            call(timeout=0)
        except QueueTimeoutError:
            return False
        return True

    return look


@NEAR_AND_FAR
def test_a_reader_that_only_looks_joins_and_reads(queues: Queues, remote: Sequence[int]) -> None:
    writer = queues.keep(MessageQueue(1, 1 - len(remote), connect_ip=LOOPBACK))
    reader = queues.join(writer, 0)
    joining = queues.run(writer.wait_until_ready, LIMIT_S)
    wait_for(is_answered(reader.wait_until_ready))
    joining.result(LIMIT_S)
    writer.enqueue("a", LIMIT_S)
    wait_for(is_answered(reader.dequeue))


@NEAR_AND_FAR
def test_a_reader_that_only_looks_hears_that_the_writer_is_lost(
    queues: Queues, remote: Sequence[int]
) -> None:
    writer, (reader,) = queues.make(1, remote=remote)
    writer.enqueue("read before that", LIMIT_S)
    writer._end._is_broken = True  # type: ignore[attr-defined]
    if writer._end._remote is not None:  # type: ignore[attr-defined]
        writer._end._remote._readers.clear()  # type: ignore[attr-defined]
    writer.shutdown()  # without a word, as one that is killed
    wait_for(is_answered(reader.dequeue))
    with pytest.raises(QueueWriterLostError):
        wait_for(is_answered(reader.dequeue))
