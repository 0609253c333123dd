"""The coordination layer by itself: servers and clients, for programs with a protocol of their own.

The Manager uses the same. Names and arguments are torchft's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc

from lighthouse import wire
from lighthouse.address import Address, parse_address
from lighthouse.codec import fields_of
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.json_text import read_json
from lighthouse.events import printable
from lighthouse.server import Lighthouse
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.core.assignment import QuorumResult
from torchft_like.errors import ConfigError, ConnectError, QuorumTimeoutError
from torchft_like.manager.client import ManagerClient, UnaryClient
from torchft_like.manager_server.duplex import MalformedMessageError
from torchft_like.manager_server.server import ManagerServer
from torchft_like.runtime import resources
from torchft_like.runtime.durations import seconds_of
from torchft_like.runtime.event_loop import coordination_loop
from torchft_like.runtime.hosts import advertised_host

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
    "QuorumResult",
    "Timestamp",
]


EMBEDDED_JOIN_TIMEOUT_MS = 100


class LighthouseServer:
    """A lighthouse inside this process, on the coordination loop. `python -m lighthouse` is the daemon.

    Args:
        bind: `host:port`; port 0 takes a free one. Loopback by default.
        min_replicas: the smallest quorum that may form.
        settings: any other field of `lighthouse.core.config.LighthouseConfig`, which are the daemon's flags:
            `join_timeout_ms`, `heartbeat_timeout_ms` and so on. None means the default, which for
            `join_timeout_ms` is 100 here, as in torchft, and 60,000 for the daemon.

    Raises:
        ConfigError, AddressError, BindError: a setting is wrong; the message names it.
    """

    def __init__(self, bind: str = "127.0.0.1:0", min_replicas: int = 1, **settings: Any) -> None:
        given = {name: value for name, value in settings.items() if value is not None}
        given.setdefault("join_timeout_ms", EMBEDDED_JOIN_TIMEOUT_MS)
        unknown = given.keys() - LighthouseConfig.__dataclass_fields__.keys()
        if unknown:
            there_are = ", ".join(sorted(LighthouseConfig.__dataclass_fields__))
            raise ConfigError(
                f"a lighthouse has no setting {', '.join(sorted(unknown))}; there are {there_are}"
            )
        config = LighthouseConfig(min_replicas=min_replicas, **given)
        address = parse_address(bind, "bind")
        self._loop = coordination_loop()
        self._lighthouse = self._loop.run(Lighthouse.start(config, address))
        resources.track(self)

    def address(self) -> str:
        """Return `http://host:port`, for TORCHFT_LIGHTHOUSE: the host as others reach it, also if the server
        listens on all interfaces.
        """
        bound = self._lighthouse.address
        return Address(advertised_host(bound.host), bound.port).url

    def describe(self) -> str:
        """Describe the quorum's members, the awaited replicas, and why there is no quorum yet."""
        return self._loop.run(self._describe())

    async def _describe(self) -> str:
        return self._lighthouse.describe()

    def shutdown(self) -> None:
        """End all sessions and stop listening. Safe to call again."""
        self._loop.run(self._lighthouse.stop())


@dataclass(frozen=True)
class Timestamp:
    """A time since the Unix epoch."""

    seconds: int
    nanos: int


@dataclass(frozen=True)
class QuorumMember:
    """One replica group in a quorum; `data` is the JSON object with which it joined."""

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: dict[Hashable, Any] | None = None


@dataclass(frozen=True)
class Quorum:
    """The replica groups that go on together."""

    quorum_id: int
    participants: list[QuorumMember]
    created: Timestamp


class LighthouseClient(UnaryClient):
    """A client of the lighthouse at `addr` (`http://host:port`), for its unary calls.

    Raises:
        AddressError: the address is malformed.
        ConnectError: no lighthouse answered there within `connect_timeout`.
    """

    def __init__(self, addr: str, connect_timeout: timedelta = timedelta(seconds=60)) -> None:
        timeout_s = seconds_of(connect_timeout, "connect_timeout")
        super().__init__(parse_address(addr, "lighthouse address"), "lighthouse")
        ready, is_ready = grpc.channel_ready_future(self._channel), threading.Event()
        ready.add_done_callback(lambda _: is_ready.set())
        if not is_ready.wait(timeout_s):  # its own wait follows the wall clock, which may be set back
            self.close()
            raise ConnectError(
                f"no lighthouse answered at {self._address} within {timeout_s:g} s; check that "
                "`python -m lighthouse` is running there, that the address is right, and that both have "
                "TORCHFT_TLS or neither"
            )

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str | None = None,
        store_address: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        shrink_only: bool | None = None,
        data: Mapping[Hashable, Any] | None = None,
    ) -> Quorum:
        """Join and wait for a quorum.

        Args:
            replica_id: the caller's name, unique for each of its starts.
            timeout: the limit of the wait.
            address, store_address: where others reach the caller's server and store: `host:port` on its host,
              or on one of the lighthouse's `--hosts`, or nothing.
            step: how many steps the caller has committed; 0 if left out.
            world_size: the number of its ranks; 1 if left out.
            shrink_only: whether the quorum may have members of the last one only.
            data: what else the members tell each other, an object of JSON.

        Raises:
            ConfigError: `data` cannot be written as JSON, or the lighthouse refuses what is said here.
            QuorumTimeoutError: there was no quorum within `timeout`.
            ConnectError: the lighthouse cannot be reached.
        """
        member = pb.QuorumMember(
            replica_id=replica_id,
            address=address or "",
            store_address=store_address or "",
            step=step or 0,
            world_size=world_size or 1,
            shrink_only=bool(shrink_only),
            data=_to_json(data),
        )
        response = self._call(
            wire.QUORUM, pb.LighthouseQuorumRequest(requester=member), pb.LighthouseQuorumResponse, timeout
        )
        quorum = response.quorum
        return Quorum(
            quorum_id=quorum.quorum_id,
            participants=[
                QuorumMember(**{**fields_of(member, QuorumMember), "data": _data_of(member)})
                for member in quorum.participants
            ],
            created=Timestamp(quorum.created.seconds, quorum.created.nanos),
        )

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Send a heartbeat for a replica group that uses unary calls."""
        request = pb.LighthouseHeartbeatRequest(replica_id=replica_id)
        self._call(wire.HEARTBEAT, request, pb.LighthouseHeartbeatResponse, timeout)

    def _error_of(self, code: grpc.StatusCode) -> type[Exception]:
        is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED
        return QuorumTimeoutError if is_late else super()._error_of(code)


def _to_json(data: Mapping[Hashable, Any] | None) -> str:
    if data is None:
        return ""
    try:
        return json.dumps(dict(data))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a member's data must be a JSON object: {error}") from error


def _data_of(member: pb.QuorumMember) -> dict[Hashable, Any] | None:
    if not member.data:
        return None
    try:
        data = read_json(member.data)
    except ValueError as error:
        data = error
    if not isinstance(data, dict):
        name = printable(member.replica_id)
        raise MalformedMessageError(f"the data of {name} is no JSON object: {data!r:.100}")
    return data
