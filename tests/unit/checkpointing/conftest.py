"""Transports and threads of one process, which end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from lighthouse.address import LOOPBACK
from torchft_like.checkpointing import HTTPTransport

LIMIT = timedelta(seconds=60)
Make = Callable[..., HTTPTransport[Any]]


@pytest.fixture
def transports() -> Iterator[Make]:
    """Yield a function that makes transports."""
    made: list[HTTPTransport[Any]] = []

    def make(**options: Any) -> HTTPTransport[Any]:
        made.append(HTTPTransport(**{"timeout": LIMIT, "hostname": LOOPBACK, **options}))
        return made[-1]

    yield make
    for transport in made:
        transport.shutdown()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor
