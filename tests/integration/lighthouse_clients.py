"""Clients of a lighthouse, for tests; each is a context manager, which ends it.

`python -m tests.integration.lighthouse_clients ADDRESS REPLICA_ID` is a session in a process of its
own, to be killed or stopped: it registers, joins, and prints one line for each message it gets.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from lighthouse import wire
from lighthouse.address import parse_address
from lighthouse.net import make_channel
from lighthouse.trust import authorization
from lighthouse.wire import torchft_pb2 as pb

LIMIT_S = 30.0
STREAMS = (wire.SESSION, wire.RANK_SESSION, wire.OFFER_SPARE)


class SessionClient:
    """A replica group's session, with a thread that collects the lighthouse's messages."""

    def __init__(
        self,
        address: str,
        replica_id: str,
        last: tuple[int, int, list[str]] = (0, 0, []),
        *,
        reads: bool = True,
        serves_at: str = "",
        statement: pb.Statement | None = None,
    ) -> None:
        self.replica_id = replica_id
        self._channel = make_channel(parse_address(address))
        self._requests: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._responses: queue.SimpleQueue[pb.SessionResponse | grpc.RpcError] = queue.SimpleQueue()
        method = self._channel.stream_stream(
            wire.SESSION,
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionResponse.FromString,
        )
        token = authorization()
        metadata = (("authorization", token),) if token else ()
        self._call = method(iter(self._requests.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, daemon=True)
        if reads:
            self.start_reading()
        self.send(
            register=pb.Register(
                replica_id=replica_id,
                address=serves_at,
                last_quorum_id=last[0],
                last_quorum_round=last[1],
                last_quorum_replica_ids=last[2],
                last_quorum_statement=statement,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.put(None)
        self._call.cancel()  # type: ignore[no-untyped-call]
        if self._reader.ident is not None:
            self._reader.join()
        self._channel.close()

    def start_reading(self) -> None:
        """Begin to read; until then flow control holds messages back at the lighthouse."""
        self._reader.start()

    def send(self, **request: object) -> None:
        self.say(pb.SessionRequest(**request))  # type: ignore[arg-type]

    def say(self, request: pb.SessionRequest) -> None:
        """Send a request, even of a kind that the lighthouse does not know."""
        self._requests.put(request)

    def join(self, **fields: object) -> None:
        self.send(join=pb.QuorumMember(replica_id=self.replica_id, **fields))  # type: ignore[arg-type]

    def registered(self) -> pb.JobConfig:
        return self._next("registered").registered

    def config_changed(self) -> pb.JobConfig:
        """Return the next message, which must say what is set otherwise now."""
        return self._next("config_changed").config_changed

    def quorum(self) -> pb.Quorum:
        """Return the next message, which must be a quorum."""
        return self._next("quorum").quorum

    def member_lost(self) -> pb.MemberLost:
        """Return the next message, which must be an alarm."""
        return self._next("member_lost").member_lost

    def left_out(self) -> pb.LeftOut:
        """Return the next message, which must say that a quorum was formed without this replica."""
        return self._next("left_out").left_out

    def quorum_or_loss(self) -> pb.Quorum | pb.MemberLost:
        """Return the next message, which must be one of the two."""
        response = self._responses.get(timeout=LIMIT_S)
        assert isinstance(response, pb.SessionResponse), response
        return response.quorum if response.HasField("quorum") else response.member_lost

    def end(self) -> tuple[grpc.StatusCode, str]:
        """Return how the lighthouse ended the session; messages before that are skipped."""
        while True:
            response = self._responses.get(timeout=LIMIT_S)
            if isinstance(response, grpc.RpcError):
                return response.code(), response.details() or ""

    def has_message(self) -> bool:
        return not self._responses.empty()

    def _next(self, kind: str) -> pb.SessionResponse:
        response = self._responses.get(timeout=LIMIT_S)
        assert isinstance(response, pb.SessionResponse), f"the session of {self.replica_id} ended: {response}"
        assert response.WhichOneof("response") == kind, response
        return response

    def _read(self) -> None:
        try:
            for response in self._call:
                self._responses.put(response)
        except grpc.RpcError as error:
            self._responses.put(error)


class UnaryClient:
    """A replica group that makes torchft's two unary calls, and sessions whose requests a test writes by
    hand.
    """

    def __init__(self, address: str) -> None:
        self._channel = make_channel(parse_address(address))
        self._quorum = self._channel.unary_unary(
            wire.QUORUM,
            request_serializer=pb.LighthouseQuorumRequest.SerializeToString,
            response_deserializer=pb.LighthouseQuorumResponse.FromString,
        )
        self._heartbeat = self._channel.unary_unary(
            wire.HEARTBEAT,
            request_serializer=pb.LighthouseHeartbeatRequest.SerializeToString,
            response_deserializer=pb.LighthouseHeartbeatResponse.FromString,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def join(self, replica_id: str, **fields: object) -> grpc.Future[pb.LighthouseQuorumResponse]:
        member = pb.QuorumMember(replica_id=replica_id, **fields)  # type: ignore[arg-type]
        return self._quorum.future(pb.LighthouseQuorumRequest(requester=member), timeout=LIMIT_S)

    def session(self, *requests: pb.SessionRequest | bytes) -> list[bytes]:
        """Return everything that the lighthouse answers before it ends the session; raise the error it ends
        with.
        """
        method = self._channel.stream_stream(
            wire.SESSION, request_serializer=_serialized, response_deserializer=bytes
        )
        return list(method(iter(requests), timeout=LIMIT_S))

    def heartbeat(self, replica_id: str) -> None:
        self._heartbeat(pb.LighthouseHeartbeatRequest(replica_id=replica_id), timeout=LIMIT_S)


@contextlib.contextmanager
def registered(address: str, *replica_ids: str) -> Iterator[list[SessionClient]]:
    """Yield sessions that the lighthouse has registered, in this order."""
    with contextlib.ExitStack() as stack:
        clients = []
        for replica_id in replica_ids:
            clients.append(stack.enter_context(SessionClient(address, replica_id)))
            clients[-1].registered()
        yield clients


def refusal(
    channel: grpc.Channel, method: str, said: Sequence[Any], header: str | None = None
) -> grpc.StatusCode | None:
    """Call a method as a program of a stranger does, with messages or bytes; return the status, None if it is
    served.
    """
    metadata = () if header is None else (("authorization", header),)
    data = map(_serialized, said)
    try:
        if method in STREAMS:
            list(channel.stream_stream(method, None, None)(data, timeout=LIMIT_S, metadata=metadata))
        else:
            channel.unary_unary(method, None, None)(next(data), timeout=LIMIT_S, metadata=metadata)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return None


def _serialized(request: Any) -> bytes:
    return request if isinstance(request, bytes) else bytes(request.SerializeToString())


def ids_of(quorum: pb.Quorum) -> list[str]:
    return [member.replica_id for member in quorum.participants]
