"""The store through which the members of a group find each other: its address, torch's client and server.

It is a TCPStore, which the Manager, a member or the user serves; `host:port/prefix` names a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lighthouse.address import Address, parse_address
from lighthouse.forks import disown
from lighthouse.listening import listen_tcp
from torchft_like.errors import AddressError

DEFAULT_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class StoreAddress:
    """The address at which the store listens, and the prefix that all keys get."""

    server: Address
    prefix: str

    def __str__(self) -> str:
        return f"{self.server}/{self.prefix}"


def parse_store_address(text: str) -> StoreAddress:
    """Read `host:port/prefix`; the prefix may contain slashes and may be empty.

    Raises:
        AddressError: the text has another form; the message shows it.
    """
    if not isinstance(text, str):
        raise AddressError(f"store address {text!r:.200} is not host:port/prefix")
    scheme, separator, rest = text.rpartition("://")
    server, _, prefix = rest.partition("/")
    try:
        return StoreAddress(parse_address(scheme + separator + server), prefix)
    except AddressError as error:
        raise AddressError(
            f"store address {text!r:.200} is not host:port/prefix (example: 127.0.0.1:29500/job)"
        ) from error


def create_store_client(store_addr: str, timeout: timedelta = DEFAULT_TIMEOUT) -> Store:
    """Make torch's client for the part of a TCPStore that `host:port/prefix` names.

    Raises:
        AddressError: the address is malformed.
        torch.distributed.DistNetworkError: no store answers there within `timeout`.
    """
    address = parse_store_address(store_addr)
    disown(address.server)
    client = TCPStore(
        host_name=address.server.host,
        port=address.server.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timeout,
    )
    return PrefixStore(address.prefix, client)


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
