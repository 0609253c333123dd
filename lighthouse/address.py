"""Hosts and ports, and how they are written."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from lighthouse.core.hosts import ip_of
from lighthouse.errors import AddressError
from lighthouse.tls import TLS_ENV

LOOPBACK = "127.0.0.1"
# By RFC 6761, and as distributions have it in /etc/hosts.
_LOOPBACK_NAME = re.compile(
    r"((.+\.)?localhost|localhost[46]?\.localdomain[46]?|localhost[46]|ip6-(localhost|loopback))\.?",
    re.IGNORECASE,
)


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is that of the loopback interface, which no other reaches."""
    if (address := ip_of(host)) is None:
        return _LOOPBACK_NAME.fullmatch(host) is not None
    return address.is_loopback


@dataclass(frozen=True)
class Address:
    """A host and a port. `str()` gives host:port, with brackets around an IPv6 host."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address as a URL in torchft's form: http://host:port."""
        return f"http://{self}"


# Only what the resolver accepts: for anything else it raises errors of its own, of several types.
_HOST = r"(?=[^:]{1,253}(?::|\Z))(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?"
_V6 = r"(?:[0-9A-Fa-f]{0,4}:){2,8}(?:[0-9A-Fa-f]{0,4}|[0-9]{1,3}(?:\.[0-9]{1,3}){3})(?:%[A-Za-z0-9_-]{1,32})?"
_ADDRESS = re.compile(
    rf"(?:(?P<scheme>https?)://)?(?:\[(?P<v6>{_V6})\]|(?P<host>{_HOST})):(?P<port>[0-9]{{1,5}})/?"
)


def parse_address(text: str, what: str = "address") -> Address:
    """Read `host:port`, `[v6]:port` or `http://host:port`.

    Raises:
        AddressError: the text has another form, or asks for TLS, and this process has no certificate; the
            message shows it and names `what`.
    """
    match = _ADDRESS.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or int(match["port"]) > 65535:
        raise AddressError(f"{what} {text!r:.200} is not host:port (examples: 127.0.0.1:29510, [::1]:29510)")
    if match["scheme"] == "https" and not os.environ.get(TLS_ENV):
        raise AddressError(
            f"{what} {text!r:.200} asks for TLS, and this process has no certificate: set {TLS_ENV} "
            "(`torchft-like keys` makes what it names), or write http:// if the network is closed"
        )
    return Address(match["v6"] or match["host"], int(match["port"]))


def parse_host(text: str, what: str = "host") -> str:
    """Read the name or the IP address of a host. An IPv6 address may stand in brackets or without them.

    Raises:
        AddressError: the text is neither; the message shows it and names `what`.
    """
    if isinstance(text, str) and re.fullmatch(rf"{_HOST}|{_V6}", text):
        return text
    raise AddressError(f"{what} {text!r:.200} is not the name of a host or its IP address")
