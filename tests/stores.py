"""Stores that tests serve."""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import TCPStore


def serve_store() -> TCPStore:
    """Return a store on loopback.

    With a listener of ours it sees IPv4 addresses; of its own IPv6-mapped ones it asks the name server about
    every client, and stands still until that answers.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
