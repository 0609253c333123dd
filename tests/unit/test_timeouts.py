"""What a timeout may be is one rule for all public calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.futures import Future

from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.checkpointing.pg_transport import PGTransport
from torchft_like.communicator.communicator import CoordinatorOptions
from torchft_like.communicator.handle import Handle
from torchft_like.errors import CheckpointError, ConfigError
from torchft_like.futures import context_timeout, future_timeout, future_wait, stream_timeout
from torchft_like.in_process import health
from torchft_like.message_queue import MessageQueue
from torchft_like.process_group import ProcessGroupDummy, ProcessGroupGloo, create_store_client
from torchft_like.process_group.handles import reconfigure_with_store
from torchft_like.process_group.work import FinishedOperation
from torchft_like.runtime.durations import as_timedelta

NONE_OF_THEM = [-1, -1.5, timedelta(seconds=-1), math.inf, math.nan, timedelta.max, "5", True]
PLACE = "127.0.0.1:1/nowhere"  # nobody listens there


@pytest.fixture
def until_end() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def shut(thing: Any, until_end: ExitStack) -> Any:
    until_end.callback(thing.shutdown)
    return thing


Call = Callable[[Any, ExitStack], object]
# By name: calls with a timeout that must be above 0, and such that take 0, too.
POSITIVE: dict[str, Call] = {
    "gloo": lambda t, _: ProcessGroupGloo(t),
    "gloo.set_timeout": lambda t, _: ProcessGroupGloo().set_timeout(t),
    "dummy.set_timeout": lambda t, _: ProcessGroupDummy(0, 1).set_timeout(t),
    "options": lambda t, _: CoordinatorOptions(t),
    "store": lambda t, _: create_store_client(PLACE, t),
    "reconfigure_with_store": lambda t, _: reconfigure_with_store(ProcessGroupGloo(), PLACE, 0, 1, t),
    "http": lambda t, end: shut(HTTPTransport(t), end),
    "http stall": lambda t, end: shut(HTTPTransport(1, stall_timeout=t), end),
    "http recv": lambda t, end: shut(HTTPTransport(1), end).recv_checkpoint(0, "127.0.0.1:1", 1, t),
    "pg": lambda t, _: PGTransport(ProcessGroupDummy(0, 1), t, "cpu"),
    "pg recv": lambda t, _: PGTransport(ProcessGroupDummy(0, 1), 1, "cpu").recv_checkpoint(0, "", 1, t),
    "lighthouse check": lambda t, _: health.lighthouse("127.0.0.1:1", t),
}
FROM_0: dict[str, Call] = {
    "work": lambda t, _: FinishedOperation([]).wait(t),
    "handle": lambda t, _: Handle("a call", lambda: None).wait(t),
    "future_wait": lambda t, _: future_wait(done(), t),
    "future_timeout": lambda t, _: future_timeout(done(), t),
    "context_timeout": lambda t, end: end.enter_context(context_timeout(lambda: None, t)),
    "stream_timeout": lambda t, _: stream_timeout(lambda: None, t),
    "enqueue": lambda t, end: shut(MessageQueue(0, 0), end).enqueue(1, t),
    "queue shutdown": lambda t, _: MessageQueue(0, 0).shutdown(t),
}


def done() -> Future[int]:
    future: Future[int] = Future()
    future.set_result(1)
    return future


@pytest.mark.parametrize("call", [*POSITIVE.values(), *FROM_0.values()], ids=[*POSITIVE, *FROM_0])
def test_what_is_no_duration_is_a_config_error(call: Call, until_end: ExitStack) -> None:
    for wrong in NONE_OF_THEM:
        with pytest.raises(ConfigError, match="number of seconds or a timedelta"):
            call(wrong, until_end)


@pytest.mark.parametrize("call", POSITIVE.values(), ids=POSITIVE)
def test_a_limit_is_above_0(call: Call, until_end: ExitStack) -> None:
    for wrong in (0, 0.0, timedelta(0)):
        with pytest.raises(ConfigError, match="a positive number"):
            call(wrong, until_end)


def test_a_limit_that_backends_would_take_for_none_is_a_millisecond() -> None:
    assert as_timedelta(1e-9) == as_timedelta(timedelta(microseconds=1)) == timedelta(milliseconds=1)
    assert ProcessGroupGloo(0.0001).timeout == timedelta(milliseconds=1)


@pytest.mark.parametrize("timeout", [None, 1, 0.5, timedelta(seconds=1)], ids=str)
def test_a_transport_takes_seconds_a_timedelta_or_its_own_limit(timeout: Any, until_end: ExitStack) -> None:
    transport = shut(HTTPTransport[Any](1, hostname="127.0.0.1"), until_end)
    transport.send_checkpoint([1], 5, {"w": torch.ones(2)}, timeout)
    assert transport.recv_checkpoint(0, transport.metadata(), 5, timeout)["w"].tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointError):
        transport.recv_checkpoint(0, "127.0.0.1:1", 5, timeout)
