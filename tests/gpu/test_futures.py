"""Time limits of a stream of the device."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch

from tests.gpu.device import busy
from tests.waiting import LIMIT_S
from torchft_like.futures import context_timeout, stream_timeout


def test_work_that_is_done_in_time_is_not_reported() -> None:
    told: list[str] = []
    torch.cuda.init()  # type: ignore[no-untyped-call] # without it no device is in use
    stream_timeout(lambda: told.append("late"), timedelta(milliseconds=100))
    torch.cuda.synchronize()
    later = threading.Event()
    with context_timeout(later.set, timedelta(milliseconds=200)):
        assert later.wait(LIMIT_S)
    assert told == []


def test_work_that_takes_too_long_is_reported() -> None:
    told = threading.Event()
    busy()
    stream_timeout(told.set, timedelta(milliseconds=10))
    assert told.wait(LIMIT_S)
    torch.cuda.synchronize()
