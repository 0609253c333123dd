"""A fork's life: the trainer tells it which backend to create, and then which collectives to run.

It runs on three kinds of threads. One echoes the trainer's pings. The first one reads requests and starts
operations in the order in which they come, and never sleeps until one is over. The backend's thread that
finishes an operation sends the answer; where a backend finishes only operations that are waited for, a thread
that waits for the operation sends it. Operations that are over soon are answered by the first thread: to run
Python on the backend's thread takes longer than an operation on a few bytes.

The fork ends when the trainer's end of the channel is closed, when the trainer is gone, and when its fork
server is gone. It never runs the trainer's code, and never Python's cleanup at exit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from torchft_like.process_group.baby.heartbeat import echo
from torchft_like.process_group.baby.messages import (
    UNASKED,
    Channel,
    ChannelClosedError,
    Outcome,
    ToChild,
    answer_for,
    decode,
    decode_call,
)
from torchft_like.process_group.baby.tensor_sharing import Importer
from torchft_like.process_group.collectives import BY_NAME, POINT_TO_POINT
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import Backend
from torchft_like.process_group.store import GroupMembers, parse_store_address
from torchft_like.runtime.spin_wait import AdaptiveSpin

WATCHED_MAX = 16  # operations that are watched, of many that are asked for at once


def serve(channel: Channel, heartbeat: socket.socket, trainer: int) -> None:
    """Serve a trainer, whose pidfd is `trainer`, until it has gone; on `heartbeat` it sends its pings."""
    watch = threading.Thread(target=echo, args=(heartbeat, trainer), name="torchft-baby-watch", daemon=True)
    watch.start()
    try:
        _Server(channel).run()
    except ChannelClosedError:
        pass
    except BaseException as error:  # the trainer is told, and the fork ends
        with contextlib.suppress(ChannelClosedError):
            channel.send((UNASKED, Outcome.FAILED.value, f"it failed with {error!r}"))
        raise


class _Server:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._methods: Mapping[str, Callable[..., Work | None]] = {}
        self._backend: Backend
        self._importer: Importer  # from BEGIN on, as the backend
        self._watched: list[tuple[int, Work]] = []
        self._spin = AdaptiveSpin()
        self._abort = AbortSignal()
        self._abort.add(self._end)

    def run(self) -> None:
        """Serve requests until the trainer's end is closed, which raises ChannelClosedError."""
        handlers: dict[int, Callable[..., None]] = {
            ToChild.RUN.value: self._run,
            ToChild.MAP.value: self._map,
            ToChild.UNMAP.value: lambda _, number: self._importer.unmap(number),
            ToChild.SET_TIMEOUT.value: lambda _, timeout_s: self._backend.set_timeout(
                timedelta(seconds=timeout_s)
            ),
            ToChild.BEGIN.value: self._begin,
            ToChild.WARM_UP.value: self._warm_up,
        }
        while True:
            self._answer_what_is_over_soon()
            (kind, request, *body), descriptors = self._channel.receive()
            handlers[kind](request, *body, *((descriptors,) if kind == ToChild.MAP else ()))

    def _begin(
        self, request: int, environment: dict[str, str], group: str, importer: str, *more: Any
    ) -> None:
        _adopt(environment)
        greeting, store, rank, world_size, timeout_s = more
        timeout = timedelta(seconds=timeout_s)
        try:
            self._importer = _load(importer)(greeting)
            members = GroupMembers(parse_store_address(store), rank, world_size, timeout)
            self._backend = _load(group)(timeout)._create(members, self._abort)
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            self._answer(request, Outcome.FAILED, *answer_for(error))
            return
        self._methods = self._backend.methods()
        self._answer(request, Outcome.DONE, list(self._methods), self._importer.greeting())

    def _warm_up(self, _: int, environment: dict[str, str], device: int) -> None:
        _adopt(environment)
        torch.cuda.set_device(device)
        torch.ones(1, device="cuda")

    def _map(self, _: int, number: int, *details: Any) -> None:
        *how, descriptors = details
        self._importer.map(number, tuple(how), descriptors)

    def _run(self, request: int, call: bytes, context: bytes | None = None) -> None:
        importer = self._importer
        name, args, kwargs = decode_call(call)
        has_started = False
        try:
            # Entered first, because it may free events of the trainer's even if the call is refused.
            with importer.entered(context):
                arguments = [decode(value, importer.tensor) for value in args]
                named = {key: decode(value, importer.tensor) for key, value in kwargs.items()}
                start = functools.partial(self._methods[name], *arguments, **named)
                if BY_NAME[name].blocking:
                    self._wait_aside(request, start)
                    return
                work = start()
                has_started = True
                answer = importer.answer_when_started(work)
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            outcome = Outcome.FAILED if has_started else Outcome.REFUSED
            self._answer(request, outcome, *answer_for(error))
            return
        if answer is not None:
            self._answer(request, Outcome.DONE, *answer)
        elif work is not None and name in POINT_TO_POINT:
            self._wait_aside(request, work.wait, work)
        elif work is not None and len(self._watched) < WATCHED_MAX:
            self._watched.append((request, work))
        elif work is not None:
            self._leave_to_backend(request, work)

    def _answer_what_is_over_soon(self) -> None:
        """Answer operations as they end, until a request comes; leave the rest to the backend's threads."""
        while self._watched:
            started = time.monotonic()
            has_news = self._spin.watch(
                lambda: any(work.is_completed() for _, work in self._watched) or self._channel.is_ready(),
                math.inf,
            )
            self._spin.learn(time.monotonic() - started)
            watched, self._watched = self._watched, []
            for request, work in watched:
                if work.is_completed():
                    self._wait(request, work.wait)
                elif has_news:
                    self._watched.append((request, work))
                else:
                    self._leave_to_backend(request, work)
            if len(self._watched) == len(watched):
                return

    def _leave_to_backend(self, request: int, work: Work) -> None:
        work.get_future().add_done_callback(lambda done: self._wait(request, done.value))

    def _wait_aside(self, request: int, wait: Callable[[], object], work: Work | None = None) -> None:
        """Wait on a new thread: one of many receives must not keep a send from being answered."""
        threading.Thread(target=self._wait, args=(request, wait, work), daemon=True).start()

    def _wait(self, request: int, wait: Callable[[], object], work: Work | None = None) -> None:
        try:
            wait()
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            self._answer(request, Outcome.FAILED, *answer_for(error))
        else:
            source: tuple[int, ...] = ()
            if work is not None:
                with contextlib.suppress(RuntimeError):  # only receives from any source know it
                    source = (work._source_rank(),)
            self._answer(request, Outcome.DONE, *source)

    def _end(self) -> None:
        """Tell the trainer why the backend gave up, and end the process with all that the backend does."""
        self._answer(UNASKED, Outcome.FAILED, str(self._abort.reason))
        os._exit(1)

    def _answer(self, request: int, outcome: Outcome, *parts: Any) -> None:
        with contextlib.suppress(ChannelClosedError):  # the thread that reads the channel finds that out, too
            self._channel.send((request, outcome.value, *parts))


def _adopt(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
