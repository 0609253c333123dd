"""Blocking clients of unary calls; that of a ManagerServer has torchft's method names."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import grpc

from lighthouse import wire
from lighthouse.address import Address, parse_address
from lighthouse.net import DISTRUST, make_channel, unary
from lighthouse.tls import process_identity
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.core.assignment import QuorumResult
from torchft_like.errors import ConfigError, ConnectError, TrustError
from torchft_like.manager_server.rank_link import quorum_result_from_wire
from torchft_like.runtime.durations import seconds_of

REFUSED = grpc.StatusCode.INVALID_ARGUMENT  # what the caller says makes no sense to the server


class UnaryClient:
    """A blocking client of one server; each call connects if necessary.

    Args:
        address: of the server.
        server: its name in errors, which end with the `hint`.
    """

    def __init__(self, address: Address, server: str, hint: str = "") -> None:
        self._address = address
        self._server = f"{server} at {address}"
        self._hint = hint
        self._connect()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _connect(self) -> None:
        self._identity, self._channel = process_identity(), make_channel(self._address)

    def _call(self, method: str, request: Any, response_type: Any, timeout: timedelta) -> Any:
        if process_identity() is not self._identity:  # else gRPC would show the old certificate
            self._connect()
        call = unary(self._channel, method, type(request), response_type)
        try:
            return call(request, timeout=seconds_of(timeout, "timeout"))
        except grpc.RpcError as error:
            reason = error.details() or error.code().name
            verb, hint = ("refused", "") if error.code() is REFUSED else ("did not answer", self._hint)
            text = f"{self._server} {verb} {method.rsplit('/', 1)[1]}: {reason}{hint}"
            raise self._error_of(error.code())(text) from error

    def _error_of(self, code: grpc.StatusCode) -> type[Exception]:
        if code is REFUSED:
            return ConfigError
        return TrustError if code in DISTRUST else ConnectError


class ManagerClient(UnaryClient):
    """A client of the ManagerServer at `addr` (`http://host:port`), for its unary calls.

    Every call connects if necessary, and raises ConnectError when the server cannot be reached or does not
    answer in time.

    Args:
        connect_timeout: without effect, as each call has a timeout of its own; torchft's client connects in
          its constructor.
    """

    def __init__(self, addr: str, connect_timeout: timedelta = timedelta(seconds=60)) -> None:
        seconds_of(connect_timeout, "connect_timeout")
        address = parse_address(addr, "ManagerServer address")
        super().__init__(address, "ManagerServer", "; its replica group may be gone")

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        timeout: timedelta,
        commit_failures: int = 0,
        init_sync: bool = True,
        reconfigure_handle: str = "",
    ) -> QuorumResult:
        """Join with one rank, and wait for the quorum."""
        request = pb.ManagerQuorumRequest(
            group_rank=group_rank,
            step=step,
            checkpoint_metadata=checkpoint_metadata,
            shrink_only=shrink_only,
            commit_failures=commit_failures,
            init_sync=init_sync,
            reconfigure_handle=reconfigure_handle,
        )
        response = self._call(wire.MANAGER_QUORUM, request, pb.ManagerQuorumResponse, timeout)
        return quorum_result_from_wire(response)

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """Return where the state of that group rank can be fetched."""
        request = pb.CheckpointMetadataRequest(rank=rank)
        response = self._call(wire.CHECKPOINT_METADATA, request, pb.CheckpointMetadataResponse, timeout)
        return str(response.checkpoint_metadata)

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """Vote with one rank, and wait for the group's verdict."""
        request = pb.ShouldCommitRequest(group_rank=group_rank, step=step, should_commit=should_commit)
        response = self._call(wire.SHOULD_COMMIT, request, pb.ShouldCommitResponse, timeout)
        return bool(response.should_commit)
