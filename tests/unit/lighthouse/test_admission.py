"""What is let in is as long as docs/security.md says, and no longer."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from lighthouse import admission
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.membership import QuorumNumber
from lighthouse.errors import ConfigError
from lighthouse.wire import torchft_pb2 as pb

LIMIT = admission.believable(0, QuorumNumber(1, 1))


def about_links(*ids: str) -> str | None:
    return admission.about_links(pb.BrokenLinks(unreachable_replica_ids=ids))


def about_register(**fields: object) -> str | None:
    register = pb.Register(replica_id="a", **fields)  # type: ignore[arg-type]
    return admission.about_register(register, LighthouseConfig(), LIMIT)


def about_replica_at(address: str, hosts: str = "", caller: str = "10.0.0.7") -> str | None:
    register = pb.Register(replica_id="a", address=address)
    return admission.about_register(register, LighthouseConfig(hosts=hosts), LIMIT, caller)


@pytest.mark.parametrize(
    "address", ["ftp://h:1", "http://h", "http://a b:1", "h:99999", "file:///etc/passwd"]
)
def test_an_address_that_is_none_of_a_server_is_refused(address: str) -> None:
    assert "is not host:port" in (about_replica_at(address) or "")


@pytest.mark.parametrize(
    ("address", "hosts", "is_admitted"),
    [
        ("http://169.254.169.254:80", "", True),
        ("http://10.0.0.7:29511", "192.168.0.0/16", True),
        ("http://169.254.169.254:80", "192.168.0.0/16", False),
        ("tls://192.168.3.4:29500", "192.168.0.0/16", True),
        ("http://[::ffff:192.168.3.4]:29500", "192.168.0.0/16", True),
        ("node-3.trainers.svc:29500", "192.168.0.0/16, *.Trainers.svc", True),
        ("node-3.elsewhere.svc:29500", "192.168.0.0/16, *.trainers.svc", False),
    ],
)
def test_a_host_is_the_callers_or_in_the_list_without_a_look_up(
    address: str, hosts: str, is_admitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ask in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo"):
        monkeypatch.delattr(socket, ask)
    assert (about_replica_at(address, hosts) is None) == is_admitted


@pytest.mark.parametrize("hosts", ["10.0.0.0/33", "a b", "10.0.0.1/8"])
def test_a_list_of_hosts_that_cannot_be_read_is_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        LighthouseConfig(hosts=hosts)


@pytest.mark.parametrize(
    ("most", "check"),
    [
        (4096, lambda length: admission.about_replica("x" * length)),
        (4096, lambda length: about_replica_at("127.0.0.1:29510".rjust(length))),
        (64, lambda count: about_links(*["x"] * count)),
        (16_384, lambda length: about_links(*["x" * 256] * 63, "x" * (length - 63 * 256))),
        (10**15, admission.about_step),
        (100 * 365 * 24 * 60 * 60 * 1000, lambda number: about_register(last_quorum_id=number)),
    ],
    ids=["replica id", "address", "links", "names of links", "step", "quorum id"],
)
def test_one_more_than_the_limit_is_refused(most: int, check: Callable[[int], str | None]) -> None:
    assert check(most) is None
    assert check(most + 1) is not None
