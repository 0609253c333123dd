"""Healthy clients that must notice nothing: they go round and round beside whatever a test does to a server.

Each runs on a thread of its own and keeps how long its rounds took; an error in one fails the test.
"""

from __future__ import annotations

import itertools
import queue
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Self

import grpc
import torch

from lighthouse import wire
from lighthouse.address import parse_address
from lighthouse.net import make_channel
from lighthouse.wire import torchft_pb2 as pb
from tests.integration.lighthouse_clients import LIMIT_S, SessionClient, ids_of
from torchft_like.checkpointing.http_transport import HTTPTransport

REPLICAS = 3
STEP = 7


class Beside:
    """A thread that calls `turn` again and again until the block ends."""

    def __init__(self, turn: Callable[[], None]) -> None:
        self._turn = turn
        self._grown = threading.Condition()
        self._times_s: list[float] = []
        self._error: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="beside")
        self._stack = ExitStack()  # what ends with the block

    def __enter__(self) -> Self:
        self._thread.start()
        self.goes_on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            self._is_over = True
            self._thread.join()
            if error is None and self._error is not None:
                raise self._error

    def goes_on(self, rounds: int = 20) -> None:
        """Wait for some more rounds; raise the error of a round that went wrong."""
        with self._grown:
            target = len(self._times_s) + rounds
            done = self._grown.wait_for(lambda: self._error or len(self._times_s) >= target, LIMIT_S)
        if self._error is not None:
            raise AssertionError("a healthy client noticed") from self._error
        assert done, f"{len(self._times_s)} rounds, {target} were awaited"

    def take_times(self) -> str:
        """Return in words how long the rounds since the last call took."""
        with self._grown:
            times_s, self._times_s = sorted(self._times_s), []
        if not times_s:
            return "no rounds"
        p50, p99, top = statistics.median(times_s), times_s[int(len(times_s) * 0.99)], times_s[-1]
        return f"{len(times_s)} rounds, p50 {p50 * 1e3:.2f} p99 {p99 * 1e3:.2f} max {top * 1e3:.2f} ms"

    def _run(self) -> None:
        try:
            while not self._is_over:
                began = time.monotonic()
                self._turn()
                with self._grown:
                    self._times_s.append(time.monotonic() - began)
                    self._grown.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised in the test
            with self._grown:
                self._error = error
                self._grown.notify_all()


class HealthyReplicas(Beside):
    """Three replica groups in one quorum, whose id must stay: no replica was lost, and none came between.

    Their names are new: the lighthouse may not have heard yet that those of an earlier block are gone.
    """

    _numbers = itertools.count()

    def __init__(self, lighthouse: str) -> None:
        super().__init__(self._join)
        self._names = sorted(f"healthy-{next(self._numbers)}" for _ in range(REPLICAS))
        self._clients = [
            self._stack.enter_context(SessionClient(lighthouse, replica_id)) for replica_id in self._names
        ]
        for client in self._clients:
            client.registered()
        self._ids: set[int] = set()

    def _join(self) -> None:
        for client in self._clients:
            client.join()
        for client in self._clients:
            quorum = client.quorum()
            assert ids_of(quorum) == self._names
            self._ids.add(quorum.quorum_id)
        assert len(self._ids) == 1, "the quorum broke"


class RankPair:
    """The two ranks of a replica group, which vote; their group is lost once they hang up."""

    def __init__(self, manager: str) -> None:
        self._channel = make_channel(parse_address(manager))
        self._ranks = [RankClient(self._channel, rank) for rank in (0, 1)]
        for rank in self._ranks:
            assert rank.answer().WhichOneof("response") == "registered"
        self._step = 0

    def close(self) -> None:
        for rank in self._ranks:
            rank.hang_up()
        self._channel.close()

    def vote(self) -> None:
        """Let both ranks vote on one step, for the same verdict."""
        self._step += 1
        for rank in self._ranks:
            rank.say(vote=pb.ShouldCommitRequest(step=self._step, should_commit=True))
        for rank in self._ranks:
            verdict = rank.answer().vote
            assert (verdict.step, verdict.should_commit) == (self._step, True)


class HealthyHeals(Beside):
    """A replica that heals again and again."""

    def __init__(self, checkpoint: str) -> None:
        super().__init__(self._fetch)
        self._checkpoint = checkpoint
        self._transport: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(
            timedelta(seconds=LIMIT_S), hostname="127.0.0.1"
        )
        self._stack.callback(self._transport.shutdown)

    def _fetch(self) -> None:
        state = self._transport.recv_checkpoint(0, self._checkpoint, STEP, timedelta(seconds=LIMIT_S))
        assert torch.equal(state["w"], torch.arange(1000.0))


class RankClient:
    """A rank's session with a ManagerServer, which it tells with each message how many have come."""

    def __init__(self, channel: grpc.Channel, group_rank: int) -> None:
        self._said: queue.SimpleQueue[pb.RankSessionRequest | bytes | None] = queue.SimpleQueue()
        method = channel.stream_stream(
            wire.RANK_SESSION,
            request_serializer=lambda request: (
                request if isinstance(request, bytes) else request.SerializeToString()
            ),
            response_deserializer=pb.RankSessionResponse.FromString,
        )
        self._call = method(iter(self._said.get, None))
        self._received = 0
        self.say(register=pb.RankRegister(group_rank=group_rank))

    def say(self, **request: object) -> None:
        self._said.put(pb.RankSessionRequest(received=self._received, **request))  # type: ignore[arg-type]

    def say_bytes(self, data: bytes) -> None:
        self._said.put(data)

    def answer(self) -> pb.RankSessionResponse:
        """Return the next answer; raise the error with which the session ended."""
        response: pb.RankSessionResponse = next(iter(self._call))
        self._received += response.WhichOneof("response") not in (None, "registered")
        return response

    def hang_up(self) -> None:
        self._said.put(None)
        self._call.cancel()  # type: ignore[no-untyped-call]
