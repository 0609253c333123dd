"""The relay spoils the answers of a server as it is told, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from torchft_like.testing.relay import Filter, Relay, at, cut, flip_bit

ANSWER = bytes(range(256)) * 1024
LIMIT_S = 60.0


@contextlib.contextmanager
def server() -> Iterator[tuple[str, int]]:
    """Sends ANSWER to whoever says something, and hangs up."""

    def serve() -> None:
        with contextlib.suppress(OSError):  # the end of the test
            while True:
                peer, _ = listener.accept()
                with peer:
                    peer.recv(1)
                    with contextlib.suppress(OSError):  # the relay may hang up in the middle
                        peer.sendall(ANSWER)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def fetch(port: int) -> bytes:
    received = b""
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as client:
        client.sendall(b"?")
        with contextlib.suppress(ConnectionError):
            while data := client.recv(1 << 16):
                received += data
    return received


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (bytes, ANSWER),
        (flip_bit, ANSWER[:70_000] + bytes([ANSWER[70_000] ^ 1]) + ANSWER[70_001:]),
    ],
    ids=["nothing", "bit-flip"],
)
def test_an_answer_arrives_as_the_relay_was_told(act: Filter, expected: bytes) -> None:
    with server() as target:
        relay = Relay(target, lambda: at(70_000, act))
        assert fetch(relay.port) == expected


def test_an_answer_is_cut_before_its_place() -> None:
    with server() as target:
        relay = Relay(target, lambda: at(70_000, cut))
        received = fetch(relay.port)
        assert len(received) < 70_001
        assert ANSWER.startswith(received)
