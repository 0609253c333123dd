"""A TCPStore of this process for members to meet in, and the address at which they reach it."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from lighthouse.address import Address
from lighthouse.listening import listen_tcp


def serve_store(host: str, timeout: timedelta) -> tuple[TCPStore, Address]:
    """Serve a store on a free port of `host` until the last reference to it is gone.

    Raises:
        BindError: `host` is not of this machine.
    """
    # This listener sees the addresses of one family; torch's own listener would ask the name server about
    # others.
    listener = listen_tcp(Address(host, 0))
    port = listener.getsockname()[1]
    server = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
    return server, Address(host, port)
