"""Healing when the source, or the way from it, fails: the receiver is told, soon and with the address."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from lighthouse.address import LOOPBACK, parse_address
from tests.integration.checkpoint_source import Source, make_state
from torchft_like.checkpointing import HTTPTransport
from torchft_like.errors import CheckpointError, CheckpointFormatError
from torchft_like.testing.ranks import Rank
from torchft_like.testing.relay import Filter, Relay, at, cut, flip_bit

pytestmark = pytest.mark.integration

LIMIT = timedelta(seconds=60)
MEGABYTES = 20
STATE_BYTES = MEGABYTES * 1_000_000


@pytest.fixture
def receiver() -> Iterator[HTTPTransport[dict[str, Any]]]:
    transport: HTTPTransport[dict[str, Any]] = HTTPTransport(
        LIMIT, num_chunks=1, stall_timeout=timedelta(seconds=30), hostname=LOOPBACK
    )
    yield transport
    transport.shutdown()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def source() -> Iterator[Rank]:
    rank = Rank(Source)
    yield rank
    rank.end()


@pytest.fixture(scope="module")
def healthy() -> Iterator[str]:
    """The address of a source that serves every test of this module."""
    rank = Rank(Source)
    yield rank.ask(Source.offer, 5, MEGABYTES, None)
    rank.end()


Receiver = HTTPTransport[dict[str, Any]]


def assert_received(state: dict[str, Any]) -> None:
    assert torch.equal(state["model"]["w"], make_state(MEGABYTES)["model"]["w"])  # type: ignore[index]


def test_a_source_killed_in_the_middle_is_noticed_and_another_one_serves(
    source: Rank, healthy: str, receiver: Receiver, pool: ThreadPoolExecutor
) -> None:
    address = source.ask(Source.offer, 5, MEGABYTES, 5)
    asked = pool.submit(receiver.recv_checkpoint, 0, address, 5, LIMIT)
    assert source.ask(Source.wait_until_it_hangs)
    source.kill()
    error = asked.exception(10)  # far less than the 30 s that a silent source would be given
    assert isinstance(error, CheckpointError)
    assert address in str(error)
    assert_received(receiver.recv_checkpoint(0, healthy, 5, LIMIT))


def test_an_abort_ends_a_stopped_receive(source: Rank, receiver: Receiver, pool: ThreadPoolExecutor) -> None:
    address = source.ask(Source.offer, 5, MEGABYTES, 5)
    asked = pool.submit(receiver.recv_checkpoint, 0, address, 5, LIMIT)
    assert source.ask(Source.wait_until_it_hangs)
    source.stop()
    with pytest.raises(TimeoutError):
        asked.result(0.5)  # it is really stuck
    receiver.abort_recv("member_lost: replica a")
    with pytest.raises(CheckpointError, match="member_lost: replica a"):
        asked.result(10)


def spoilt(target: str, place: int, spoil: Filter, struck: list[int]) -> str:
    """The address of a relay that spoils an answer at this place, and notes it."""
    source = parse_address(target)

    def strike(data: bytes) -> bytes:
        struck.append(place)
        return spoil(data)

    return f"http://{LOOPBACK}:{Relay((source.host, source.port), lambda: at(place, strike)).port}"


@pytest.mark.parametrize("place", [1000, STATE_BYTES // 2, STATE_BYTES], ids=["first", "middle", "last"])
def test_a_flipped_bit_is_found_and_the_state_refused(healthy: str, receiver: Receiver, place: int) -> None:
    struck: list[int] = []
    address = spoilt(healthy, place, flip_bit, struck)
    with pytest.raises(CheckpointFormatError, match=f"{address}: .* checksum does not match"):
        receiver.recv_checkpoint(0, address, 5, LIMIT)
    assert struck == [place]
    assert_received(receiver.recv_checkpoint(0, healthy, 5, LIMIT))


@pytest.mark.parametrize("length", [0, 100, STATE_BYTES // 2])
def test_a_truncated_transfer_is_refused(healthy: str, receiver: Receiver, length: int) -> None:
    struck: list[int] = []
    address = spoilt(healthy, length, cut, struck)
    with pytest.raises(CheckpointError, match=address):
        receiver.recv_checkpoint(0, address, 5, LIMIT)
    assert struck == [length]
