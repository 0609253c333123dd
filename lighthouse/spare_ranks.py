"""The spare ranks on the network: streams of those that wait, and calls of those that need one.

`core/vacancies.py` decides. A spare says that it has taken the place that it was told. One whose stream ends
without that is gone: gRPC shows the death of a caller as the end of its messages, as if it had ended in good
order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import grpc
import grpc.aio

from lighthouse import admission
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.vacancies import Decision, Filled, NoSpare, Told, Vacancies, Vacancy
from lighthouse.events import EventLog
from lighthouse.net import caller_of
from lighthouse.session import Context, Refusal, Session, check, invalid, read_register, settle
from lighthouse.wire import torchft_pb2 as pb

_NO_SPARE = Refusal(grpc.StatusCode.NOT_FOUND, "no spare rank is free (torchft-like spare starts one)")


class SpareRanks:
    """The lighthouse's desk for spare ranks; made and used on the server's loop."""

    def __init__(self, config: LighthouseConfig, events: EventLog) -> None:
        self._config = config
        self._events = events
        self._vacancies = Vacancies()
        self._numbers = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._callers: dict[int, asyncio.Future[str]] = {}

    def names(self) -> list[str]:
        """Return the names of the spare ranks that wait for a place."""
        return [spare.spare_id for spare in self._vacancies]

    def end(self, why: Refusal) -> None:
        """End every stream and call."""
        for session in self._sessions.values():
            session.end(why)
        self._answer(list(self._callers), why)

    async def serve_spare(self, _requests: object, context: Context) -> None:
        """Serve the stream of one spare, until it has taken a place, or is gone."""
        register: pb.SpareRegister = (await read_register(context, pb.SpareRequest)).register
        check(admission.about_spare(register, len(self._vacancies), self._config))
        number, session = next(self._numbers), Session(context, queue_max=16)
        has_taken = False
        try:
            async with session:
                self._sessions[number] = session
                session.send(pb.SpareResponse(registered=pb.SpareRegistered()).SerializeToString())
                self._events.emit("spare", member=register.spare_id, host=register.host)
                self._apply(self._vacancies.register(number, register.spare_id, register.host))
                has_taken = await self._serve(number, session)
        finally:
            self._sessions.pop(number, None)
            end = self._vacancies.taken if has_taken else self._vacancies.lost
            self._apply(end(number))

    async def serve_vacancy(self, request: pb.FillVacancyRequest, context: Context) -> bytes:
        """Answer once a spare has taken the place, or that there is none."""
        message, caller = request.vacancy, caller_of(context)
        check(admission.about_vacancy(message, len(self._callers), self._config, caller))
        vacancy = Vacancy(
            message.group_id,
            message.group_rank,
            message.host,
            f"{message.store_address} {message.attempt}",
            pb.SpareResponse(vacancy=message).SerializeToString(),
        )
        number = next(self._numbers)
        answer = self._callers[number] = asyncio.get_running_loop().create_future()
        try:
            self._apply(self._vacancies.ask(number, vacancy, waits=request.waits))
            return pb.FillVacancyResponse(spare_id=await answer).SerializeToString()
        finally:
            del self._callers[number]
            self._vacancies.withdraw(number)

    async def _serve(self, number: int, session: Session) -> bool:
        """Hear what a spare says; return whether it has taken its place."""
        while (request := await session.read()) is not None:
            kind = request.WhichOneof("request")
            if kind == "taken":
                return session.ended is None
            if kind != "declined":
                raise invalid(f"unexpected {kind or 'empty message'} of a spare")
            self._apply(self._vacancies.declined(number))
        return False

    def _apply(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Told):
                if (session := self._sessions.get(decision.session)) is not None:
                    session.send(decision.vacancy.message)
            elif isinstance(decision, Filled):
                self._answer(decision.callers, decision.spare_id)
                group, rank = decision.vacancy.key
                self._events.emit("replaced", member=decision.spare_id, group=group, rank=rank)
            elif isinstance(decision, NoSpare):
                self._answer(decision.callers, _NO_SPARE)

    def _answer(self, callers: Iterable[int], result: str | Refusal) -> None:
        for number in callers:
            if (answer := self._callers.get(number)) is not None:
                settle(answer, result)
