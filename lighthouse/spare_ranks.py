"""The spare ranks on the network: streams of those that wait, and calls of those that need one.

`core/vacancies.py` decides. A spare says that it has taken the place that it was told. One whose stream ends
without that is gone: gRPC shows the death of a caller as the end of its messages, as if it had ended in good
order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio

from lighthouse import admission
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.vacancies import Decision, Filled, NoSpare, Told, Vacancies, Vacancy
from lighthouse.events import EventLog
from lighthouse.net import caller_of
from lighthouse.session import Refusal, RefusedError, ReplicaSession, invalid, read_register
from lighthouse.wire import torchft_pb2 as pb

Context = grpc.aio.ServicerContext[Any, bytes]

_NO_SPARE = Refusal(grpc.StatusCode.NOT_FOUND, "no spare rank is free (torchft-like spare starts one)")


class SpareRanks:
    """The lighthouse's desk for spare ranks; made and used on the server's loop."""

    def __init__(self, config: LighthouseConfig, events: EventLog) -> None:
        self._config = config
        self._events = events
        self._vacancies = Vacancies()
        self._numbers = itertools.count(1)
        self._sessions: dict[int, ReplicaSession] = {}
        self._callers: dict[int, asyncio.Future[str | Refusal]] = {}

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
        register = await read_register(context, pb.SpareRequest)
        if complaint := admission.about_spare(register, len(self._vacancies), self._config):
            raise invalid(complaint)
        await context.send_initial_metadata(())
        session = ReplicaSession(next(self._numbers), register.spare_id, "", context, queue_max=16)
        self._sessions[session.number] = session
        has_taken = False
        try:
            session.send(pb.SpareResponse(registered=pb.SpareRegistered()).SerializeToString())
            self._events.emit("spare", member=session.replica_id, host=register.host)
            self._apply(self._vacancies.register(session.number, register.spare_id, register.host))
            has_taken = await self._serve(session, context)
        except asyncio.CancelledError:
            if session.ended is None:
                raise
        finally:
            del self._sessions[session.number]
            session.close()
            end = self._vacancies.taken if has_taken else self._vacancies.lost
            self._apply(end(session.number))
        if session.ended is not None:
            raise RefusedError(session.ended)

    async def serve_vacancy(self, request: pb.FillVacancyRequest | None, context: Context) -> bytes:
        """Answer once a spare has taken the place, or that there is none."""
        if request is None:
            raise invalid("this is no message of the protocol")
        message, caller = request.vacancy, caller_of(context)
        if complaint := admission.about_vacancy(message, len(self._callers), self._config, caller):
            raise invalid(complaint)
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
            result = await answer
        finally:
            del self._callers[number]
            self._vacancies.withdraw(number)
        if isinstance(result, Refusal):
            raise RefusedError(result)
        return pb.FillVacancyResponse(spare_id=result).SerializeToString()

    async def _serve(self, session: ReplicaSession, context: Context) -> bool:
        """Hear what a spare says; return whether it has taken its place."""
        while True:
            request = await context.read()
            if request is grpc.aio.EOF:  # type: ignore[attr-defined]
                return False
            kind = request.WhichOneof("request") if request is not None else "bytes"
            if kind == "taken":
                return session.ended is None
            if kind != "declined":
                text = f"unexpected {kind or 'empty message'} of the spare {session.replica_id!r:.100}"
                session.ended = invalid(text).why
                return False
            self._apply(self._vacancies.declined(session.number))

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
            answer = self._callers.get(number)
            if answer is not None and not answer.done():
                answer.set_result(result)
