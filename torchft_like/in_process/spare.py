"""Spare ranks, as trainers see them: a process that waits for a place, and ranks that ask for one.

Both talk to the lighthouse (`lighthouse/core/vacancies.py`), which says which spare takes which place and no
more. A spare goes on waiting, and a rank goes on asking, while the lighthouse is away.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import grpc
import grpc.aio

from lighthouse import wire
from lighthouse.address import Address, parse_address
from lighthouse.net import DISTRUST, make_aio_channel, unary
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.core.restarts import SPARE_ENV, SPARE_RANK, RankProcess
from torchft_like.errors import AddressError, BindError, ConfigError, ConnectError, GroupLostError
from torchft_like.manager.config import LIGHTHOUSE_ENV, OF_TORCHRUN
from torchft_like.manager_server.duplex import DuplexCall, MalformedMessageError
from torchft_like.runtime.durations import seconds_of
from torchft_like.runtime.event_loop import coordination_loop

T = TypeVar("T")
AskForSpare = Callable[[RankProcess, RankProcess, int], "Future[str]"]
SpareCall = DuplexCall[pb.SpareRequest, pb.SpareResponse]

HANDED_OVER = ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS")  # torchft's names
RETRY_S = 0.25
AWAY_S = 10.0  # for which a rank that would not wait for a spare waits for a lighthouse that was away

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """A rank's place that is vacant.

    Attributes:
        group_id: the prefix under which the ranks of the group meet.
        store: where they do.
        attempt: their last try, which has ended.
        environment: variables that its ranks hand over.
    """

    group_id: str
    rank: int
    world_size: int
    store: Address
    attempt: int
    environment: Mapping[str, str]


class SpareDesk:
    """Where the ranks of this process's groups ask for spares.

    Args:
        spare_wait: how long they wait for a spare to come, where none is there; None not at all.
        handed_over: the names of environment variables that a spare takes over.

    Raises:
        ConfigError: one of them is wrong.
    """

    def __init__(
        self, spare_wait: timedelta | float | None = None, handed_over: Sequence[str] = HANDED_OVER
    ) -> None:
        if isinstance(handed_over, str) or not all(isinstance(name, str) for name in handed_over):
            raise ConfigError(f"handed_over is {handed_over!r:.100}: it takes names of environment variables")
        self._wait_s = None if spare_wait is None else seconds_of(spare_wait, "spare_wait")
        self.handed_over: tuple[str, ...] = tuple(handed_over)

    @property
    def wait_s(self) -> float:
        """How long it may take to know whether a spare comes, in seconds."""
        return self._wait_s if self._wait_s is not None else AWAY_S

    def asks_for(self, group_id: str, world_size: int, environ: Mapping[str, str]) -> AskForSpare:
        """Return the function with which the ranks of a group of this size ask for spares.

        Args:
            environ: the variables of which some are handed over. A spare on its way to the group, which may
              ask for another one, has none of the group's in its own environment yet.
        """
        names = {*OF_TORCHRUN, *self.handed_over}
        environment = {name: environ[name] for name in names if name in environ}

        def ask(lost: RankProcess, meets_in: RankProcess, attempt: int) -> Future[str]:
            vacancy = pb.Vacancy(
                group_id=group_id,
                group_rank=lost.rank,
                world_size=world_size,
                host=lost.host,
                store_address=meets_in.address,
                attempt=attempt,
                environment=environment,
            )
            return asyncio.run_coroutine_threadsafe(self._ask(vacancy), coordination_loop().loop)

        return ask

    async def _ask(self, vacancy: pb.Vacancy) -> str:
        """Ask for a spare; return why none comes, "" if one has."""
        try:
            address = lighthouse_of(os.environ)
        except (AddressError, ConfigError) as error:
            return f"no spare can be asked for: {error}"
        request = pb.FillVacancyRequest(vacancy=vacancy, waits=self._wait_s is not None)
        ends_at, reason = time.monotonic() + self.wait_s, "no answer"
        while (left_s := ends_at - time.monotonic()) > 0:
            try:
                async with make_aio_channel(address) as channel:
                    call = unary(channel, wire.FILL_VACANCY, pb.FillVacancyRequest, pb.FillVacancyResponse)
                    answer = await call(request, timeout=left_s if request.waits else None)
                _logger.warning("%s takes the place of rank %d", answer.spare_id, vacancy.group_rank)
                return ""
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    break
                request.waits = True  # spares come back to it, too, and maybe after this rank
            await asyncio.sleep(RETRY_S)
        if self._wait_s is not None and time.monotonic() >= ends_at:
            return f"no spare rank has come within spare_wait, {self.wait_s:g} s"
        return reason


def is_spare(environ: Mapping[str, str]) -> bool:
    """Return whether this process is to wait for the place of a rank (TORCHFT_SPARE=rank)."""
    return environ.get(SPARE_ENV) == SPARE_RANK


def lighthouse_of(environ: Mapping[str, str]) -> Address:
    """Return the lighthouse's address.

    Raises:
        ConfigError, AddressError: the environment does not name it, or not well.
    """
    if not (text := environ.get(LIGHTHOUSE_ENV)):
        raise ConfigError(
            f"set {LIGHTHOUSE_ENV} on all ranks, and for all spares, to the lighthouse's address"
        )
    return parse_address(text, LIGHTHOUSE_ENV)


def take_place(address: Address, connect_s: float, take: Callable[[Place], T]) -> T:
    """Wait as a spare for a place; return what `take` returns for the first one that it can take.

    Args:
        connect_s: how long a lighthouse that has never answered is looked for, in seconds.
        take: called in this thread, so that a signal which ends the wait ends it, too, and the place is free.

    Raises:
        ConnectError: no lighthouse has answered, or it refuses this process.
    """
    loop, ends_at, was_there = coordination_loop(), time.monotonic() + connect_s, False
    spare_id = f"{socket.gethostname()}:{uuid.uuid4()}"
    while True:
        call = loop.run(_offer(address))
        register = pb.SpareRegister(spare_id=spare_id, host=socket.gethostname())
        says: pb.SpareRequest | None = pb.SpareRequest(register=register)
        try:
            while (response := loop.run(_next(call, says), cancels=True)) is not None:
                was_there, says = True, None
                if response.WhichOneof("response") != "vacancy":
                    _logger.info("%s waits for a place", spare_id)
                    continue
                try:
                    taken = take(_place_of(response.vacancy))
                except (GroupLostError, AddressError, BindError) as error:  # the place is to blame
                    rank = response.vacancy.group_rank
                    _logger.warning("the place of rank %d is not taken: %s", rank, error)
                    says = pb.SpareRequest(declined=pb.Declined(reason=str(error)[:1000]))
                    continue
                loop.run(call.finish(pb.SpareRequest(taken=pb.Taken())))
                return taken
            reason = "it has ended the stream"
        except (grpc.aio.AioRpcError, MalformedMessageError) as error:
            reason = str(error)
            if isinstance(error, grpc.aio.AioRpcError):
                reason = error.details() or error.code().name
                if error.code() in (*DISTRUST, grpc.StatusCode.UNIMPLEMENTED):
                    raise ConnectError(f"the lighthouse at {address} takes no spare: {reason}") from None
        finally:
            loop.run(call.close())
        if not was_there and time.monotonic() > ends_at:
            raise ConnectError(f"no lighthouse has answered at {address} within {connect_s:g} s: {reason}")
        time.sleep(RETRY_S)


async def _offer(address: Address) -> SpareCall:
    return DuplexCall(address, wire.OFFER_SPARE, pb.SpareRequest, pb.SpareResponse)


async def _next(call: SpareCall, says: pb.SpareRequest | None) -> pb.SpareResponse | None:
    if says is not None:
        call.send(says)
    return await call.read()


def warm_up() -> None:
    """Load what torch loads for the first optimizer and the first step, and the rest of this package."""
    import torch  # noqa: PLC0415 - for its side effects

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    (parameter * parameter).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _place_of(vacancy: pb.Vacancy) -> Place:
    try:
        store = parse_address(vacancy.store_address, "the store of a vacant place")
    except AddressError as error:
        raise GroupLostError(str(error)) from error
    return Place(
        group_id=vacancy.group_id,
        rank=vacancy.group_rank,
        world_size=vacancy.world_size,
        store=store,
        attempt=vacancy.attempt,
        environment=dict(vacancy.environment),
    )
