"""Plain sockets that speak to a checkpoint server."""

from __future__ import annotations

import socket

from lighthouse.address import LOOPBACK


def request(port: int, path: str) -> socket.socket:
    """Return a connection on which the request has been sent."""
    client = socket.create_connection((LOOPBACK, port), timeout=30)
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return client


def drain(client: socket.socket) -> int:
    """Return how many more bytes come until the connection ends, in good order or not."""
    count = 0
    try:
        while received := client.recv(1 << 20):
            count += len(received)
    except ConnectionError:
        pass
    return count
