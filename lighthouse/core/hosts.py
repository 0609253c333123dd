"""Which hosts a replica may name as those at which it serves. It is pure: no name is looked up."""

from __future__ import annotations

import ipaddress
import re
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from lighthouse.errors import ConfigError

_NAME = re.compile(r"[a-z0-9_.*-]{1,253}")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class HostList(NamedTuple):
    """The networks, and the patterns of names, that are allowed."""

    networks: tuple[Network, ...]
    names: tuple[str, ...]

    @classmethod
    @lru_cache(maxsize=16)
    def parse(cls, text: str) -> HostList:
        """Read networks, addresses and names with `*`, separated by commas.

        Raises:
            ConfigError: a part is none of these; the message shows it.
        """
        networks: list[Network] = []
        names: list[str] = []
        for part in filter(None, (part.strip().lower() for part in text.split(","))):
            try:
                networks.append(ipaddress.ip_network(part))
            except ValueError as error:
                if "/" in part or _NAME.fullmatch(part) is None:
                    raise ConfigError(
                        f"--hosts {part!r:.100} is no network, as 10.0.0.0/8, and no name, as *.trainers.svc"
                    ) from error
                names.append(part)
        return cls(tuple(networks), tuple(names))

    def admits(self, host: str, caller: str) -> bool:
        """Return whether a host is in the list, or has the address from which its replica calls."""
        address = ip_of(host)
        if address is None:
            return any(fnmatchcase(host.lower().rstrip("."), name) for name in self.names)
        return address == ip_of(caller) or any(address in network for network in self.networks)


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a text is, None for a name. One of IPv4 that is written as one of IPv6 is
    the former.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
