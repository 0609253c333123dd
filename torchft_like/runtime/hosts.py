"""The address of this machine that other hosts reach."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import socket
import struct
from pathlib import Path

from lighthouse.address import LOOPBACK, Address, is_loopback, parse_host
from lighthouse.errors import AddressError
from lighthouse.listening import ANYWHERE, why_unbindable

HOSTNAME_ENV = "TORCHFT_HOSTNAME"
INTERFACE_ENV = "GLOO_SOCKET_IFNAME"  # torch's own
_SIOCGIFADDR = 0x8915  # Linux: ask for the address of an interface
_EVERY_INTERFACE = ("", "::", "0.0.0.0")


def local_host_towards(host: str, port: int = 9, what: str = "host") -> str:
    """Return the local IP address from which this machine reaches `host`; a loopback address for a loopback
    host.

    A name of this host may be loopback here and nowhere else, as Debian has it (127.0.1.1). What an operator
    gives such a name is for other hosts, too: the address that is returned is that of the default route, or
    of the first interface, and loopback only where there is no other.

    Nothing is sent: connecting a UDP socket only asks the kernel for the route.

    Raises:
        AddressError: the name does not resolve or there is no route; the message says `what` named it.
    """
    own = source_towards(host, port, what)
    return (_outer_address() or own) if is_loopback(own) and not is_loopback(host) else own


def source_towards(host: str, port: int = 9, what: str = "host") -> str:
    """Return the local IP address that the kernel uses towards `host`, loopback for a name that is loopback
    here.

    Raises:
        AddressError: as from `local_host_towards`.
    """
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise AddressError(
            f"no route to {what} {host!r}: {error.strerror or error}; check the name and the network"
        ) from error


def _outer_address() -> str:
    for anywhere in ANYWHERE.values():
        with contextlib.suppress(AddressError):
            return source_towards(anywhere)
    for _, name in socket.if_nameindex():
        with contextlib.suppress(AddressError):
            if not is_loopback(address := host_named(name)):
                return address
    return ""


def interfaces() -> str:
    """Return the names of this host's interfaces, for an error."""
    return ", ".join(sorted(name for _, name in socket.if_nameindex()))


def host_named(name: str) -> str:
    """Return the address of the interface of this name, or the name itself if there is no such interface.

    Raises:
        AddressError: the interface has no IPv4 address.
    """
    if name not in {interface for _, interface in socket.if_nameindex()}:
        return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("40s", name.encode()))
        except OSError as error:
            raise AddressError(
                f"interface {name} has no IPv4 address ({error.strerror}): name an address instead"
            ) from error
    return socket.inet_ntoa(found[20:24])


def own_host(towards: Address | None = None, *, others_ask: bool = False) -> str:
    """Return the address at which other hosts reach this one; loopback where its own name does not resolve.

    Args:
        towards: if given, the address of the interface that leads there is returned. Otherwise the one that
          the host's name resolves to, as in Gloo, or the name that its operator has given (TORCHFT_HOSTNAME).
        others_ask: whether other hosts are known to come, for whom that name is not loopback.

    Raises:
        AddressError: the name that the operator has given does not resolve.
    """
    if towards is None and (given := os.environ.get(HOSTNAME_ENV)):
        return local_host_towards(given_host(given, HOSTNAME_ENV))
    try:
        if towards is not None:
            return local_host_towards(towards.host, towards.port)
        return (local_host_towards if others_ask else source_towards)(socket.gethostname())
    except AddressError:
        return LOOPBACK


_led_out: list[str] = []  # the interfaces that `lead_torch_out` has chosen


def lead_torch_out(meeting: Address) -> None:
    """Have torch's own Gloo groups of this process listen where the other hosts that meet there reach them.

    torch takes the address of the host's own name, which may be loopback here alone, as Debian has it: a rank
    of another host would connect to itself, fail, and leave this one waiting. What an operator has set stays.
    """
    own = local_host_towards(meeting.host, meeting.port)
    if os.environ.get(INTERFACE_ENV) or is_loopback(own) or not is_loopback(_named_host()):
        return
    for _, name in socket.if_nameindex():
        with contextlib.suppress(AddressError):
            if host_named(name) == own:
                _led_out.append(name)
                os.environ[INTERFACE_ENV] = name


def _named_host() -> str:
    try:
        return source_towards(socket.gethostname())
    except AddressError:
        return LOOPBACK


def gloo_interface() -> str:
    """Return the interface that an operator has named for Gloo; empty without one."""
    first = os.environ.get(INTERFACE_ENV, "").split(",")[0]
    return "" if first in _led_out else first


def given_host(name: str, what: str) -> str:
    """Return the host that is called so: a name or an address of this host, or one of its interfaces.

    Raises:
        AddressError: no process of this host can listen there; the text names `what` gave it.
    """
    try:
        host = parse_host(host_named(name), what)
        reason = why_unbindable(Address(host, 0))
    except AddressError as error:
        host, reason = name, str(error)
    if reason is not None:
        raise AddressError(
            f"{what} is {name!r:.200}, where nothing on this host can listen ({reason}): give a name or an "
            f"address of this host, or one of its interfaces, {interfaces()}"
        )
    return host


def advertised_host(bound: str) -> str:
    """Return the host under which others reach a server that listens on `bound`.

    Of a server on all interfaces it is what the operator has given (TORCHFT_HOSTNAME), or else the address
    that this host's name resolves to; the name itself where that is loopback, since other hosts may resolve
    it otherwise; loopback where it does not resolve.

    Raises:
        AddressError: as from `host_named`.
    """
    if bound not in _EVERY_INTERFACE:
        return bound
    if given := os.environ.get(HOSTNAME_ENV):
        return host_named(given)
    name = socket.gethostname()
    try:
        own = source_towards(name)
    except AddressError:
        return LOOPBACK
    return name if is_loopback(own) else own


@functools.cache
def own_place() -> bytes:
    """Return the place of this process: the start of its kernel, its network namespace, its user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}".encode()
