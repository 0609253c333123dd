"""The address of this machine that other hosts reach."""

from __future__ import annotations

import socket

from lighthouse.address import LOOPBACK, Address
from lighthouse.errors import AddressError


def local_host_towards(host: str, port: int = 9) -> str:
    """Return the local IP address from which this machine reaches `host`; a loopback address for a loopback
    host.

    Nothing is sent: connecting a UDP socket only asks the kernel for the route.

    Raises:
        AddressError: the name does not resolve or there is no route.
    """
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise AddressError(
            f"no route to host {host!r}: {error.strerror or error}; check the name and the network"
        ) from error


def own_host(towards: Address | None = None) -> str:
    """Return the address at which other hosts reach this one; loopback where its own name does not resolve.

    Args:
        towards: if given, the address of the interface that leads there is returned. Otherwise the one that
          the host's name resolves to, as in Gloo.
    """
    try:
        if towards is not None:
            return local_host_towards(towards.host, towards.port)
        return local_host_towards(socket.gethostname())
    except AddressError:
        return LOOPBACK
