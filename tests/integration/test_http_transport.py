"""Healing when the source, or the way from it, fails: the receiver is told, soon and with the address."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from lighthouse.address import LOOPBACK, Address, parse_address
from lighthouse.listening import listen_tcp
from tests.integration.checkpoint_source import make_state
from torchft_like.checkpointing import HTTPTransport
from torchft_like.errors import CheckpointError, CheckpointFormatError
from torchft_like.testing.processes import Processes, RunningProcess

pytestmark = pytest.mark.integration

LIMIT = timedelta(seconds=60)
MEGABYTES = 20
STATE_BYTES = MEGABYTES * 1_000_000
ENTIRE = 0


@pytest.fixture
def receiver() -> Iterator[HTTPTransport[dict[str, Any]]]:
    transport: HTTPTransport[dict[str, Any]] = HTTPTransport(
        LIMIT, stall_timeout=timedelta(seconds=30), hostname="127.0.0.1"
    )
    yield transport
    transport.shutdown()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="module")
def healthy() -> Iterator[str]:
    """The address of a source that serves every test of this module."""
    with Processes() as starter:
        yield start_source(starter)[1]


Receiver = HTTPTransport[dict[str, Any]]


def start_source(processes: Processes, stop_after_pieces: int = ENTIRE) -> tuple[RunningProcess, str]:
    arguments = ["5", str(MEGABYTES), str(stop_after_pieces)]
    source = processes.fork("tests.integration.checkpoint_source", *arguments)
    return source, source.wait_for_output(r"offering at (\S+)\n").group(1)


def assert_received(state: dict[str, Any]) -> None:
    assert torch.equal(state["model"]["w"], make_state(MEGABYTES)["model"]["w"])  # type: ignore[index]


def test_state_crosses_processes_whole(healthy: str, receiver: Receiver) -> None:
    assert_received(receiver.recv_checkpoint(0, healthy, 5, LIMIT))


def test_a_source_killed_in_the_middle_is_noticed_and_another_one_serves(
    processes: Processes, healthy: str, receiver: Receiver, pool: ThreadPoolExecutor
) -> None:
    source, address = start_source(processes, stop_after_pieces=5)
    asked = pool.submit(receiver.recv_checkpoint, 0, address, 5, LIMIT)
    source.wait_for_output("stopped in the middle")
    source.signal(signal.SIGKILL)
    error = asked.exception(10)  # far less than the 30 s that a silent source would be given
    assert isinstance(error, CheckpointError)
    assert address in str(error)
    assert source.wait() == -signal.SIGKILL
    assert_received(receiver.recv_checkpoint(0, healthy, 5, LIMIT))


def test_a_receive_from_a_stopped_source_can_be_aborted(
    processes: Processes, receiver: Receiver, pool: ThreadPoolExecutor
) -> None:
    source, address = start_source(processes, stop_after_pieces=5)
    asked = pool.submit(receiver.recv_checkpoint, 0, address, 5, LIMIT)
    source.wait_for_output("stopped in the middle")
    source.signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        asked.result(0.5)  # it is really stuck
    receiver.abort_recv("member_lost: replica a")
    with pytest.raises(CheckpointError, match="member_lost: replica a"):
        asked.result(10)


def test_a_stopped_source_is_given_up_after_the_stall_timeout(processes: Processes) -> None:
    source, address = start_source(processes)
    source.signal(signal.SIGSTOP)
    receiver: Receiver = HTTPTransport(LIMIT, stall_timeout=timedelta(seconds=1), hostname="127.0.0.1")
    try:
        with pytest.raises(CheckpointError, match=f"{address}: no byte came for 1 s"):
            receiver.recv_checkpoint(0, address, 5, LIMIT)
    finally:
        receiver.shutdown()


@contextmanager
def proxy(target: str, distort: Callable[[bytes, int], bytes | None]) -> Iterator[str]:
    """Hands each block of the answer to `distort` with its offset; None ends the connection."""
    source = parse_address(target)
    listener = listen_tcp(Address(LOOPBACK, 0))

    def serve() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection((source.host, source.port), timeout=30) as upstream:
            upstream.sendall(client.recv(65536))
            offset = 0
            while block := upstream.recv(1 << 16):
                forwarded = distort(block, offset)
                if forwarded is None:
                    return
                try:
                    client.sendall(forwarded)
                except ConnectionError:  # the receiver has seen enough
                    return
                offset += len(block)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    finally:
        thread.join(30)
        listener.close()


@pytest.mark.parametrize("place", [1000, STATE_BYTES // 2, STATE_BYTES], ids=["first", "middle", "last"])
def test_a_flipped_bit_is_found_and_the_state_is_refused(
    healthy: str, receiver: Receiver, place: int
) -> None:
    flipped: list[int] = []

    def flip(block: bytes, offset: int) -> bytes:
        if not offset <= place < offset + len(block):
            return block
        flipped.append(place)
        at = place - offset
        return block[:at] + bytes([block[at] ^ 0x10]) + block[at + 1 :]

    with (
        proxy(healthy, flip) as through_proxy,
        pytest.raises(CheckpointFormatError, match=f"{through_proxy}: .* checksum does not match"),
    ):
        receiver.recv_checkpoint(0, through_proxy, 5, LIMIT)
    assert flipped == [place]
    assert_received(receiver.recv_checkpoint(0, healthy, 5, LIMIT))


@pytest.mark.parametrize("length", [0, 100, STATE_BYTES // 2])
def test_a_truncated_transfer_is_refused(healthy: str, receiver: Receiver, length: int) -> None:
    cut: list[int] = []

    def truncate(block: bytes, offset: int) -> bytes | None:
        if offset + len(block) <= length:
            return block
        cut.append(offset)
        return None

    with proxy(healthy, truncate) as through_proxy, pytest.raises(CheckpointError, match=through_proxy):
        receiver.recv_checkpoint(0, through_proxy, 5, LIMIT)
    assert len(cut) == 1
