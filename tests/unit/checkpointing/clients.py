"""Plain sockets that speak to a checkpoint server."""

from __future__ import annotations

import socket

from lighthouse.address import LOOPBACK


def request(port: int, path: str, fetch: str = "", key: str = "") -> socket.socket:
    """Return a connection on which the request has been sent, which tells of a fetch: its id, and the bytes
    that are left; and shows the key of a quorum.
    """
    client = socket.create_connection((LOOPBACK, port), timeout=30)
    client.sendall(asking(path, fetch, key))
    return client


def asking(path: str, fetch: str = "", key: str = "") -> bytes:
    told = f"Checkpoint-Fetch: {fetch}\r\n" if fetch else ""
    told += f"Quorum-Key: {key}\r\n" if key else ""
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n{told}\r\n".encode()


def drain(client: socket.socket) -> int:
    """Return how many more bytes come until the connection ends, in good order or not."""
    count = 0
    try:
        while received := client.recv(1 << 20):
            count += len(received)
    except ConnectionError:
        pass
    return count
