"""The trainer's side of a backend in a subprocess.

It turns calls of collectives into requests. An `Exporter` lets the subprocess see the tensors, `requests` and
`work` handle the answers, and `fork_pool` starts the subprocesses.

INVARIANT: to end the subprocess is to end every operation. No request counts as over before the process is
gone, memory, devices and all; what a process that does not die may touch is never used again.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work

from torchft_like.errors import SubprocessLostError
from torchft_like.process_group.baby import outcomes
from torchft_like.process_group.baby.arguments import encode_call
from torchft_like.process_group.baby.channel import FOREVER, ChannelClosedError, Message
from torchft_like.process_group.baby.fork_pool import Child
from torchft_like.process_group.baby.protocol import UNASKED, Outcome, ToChild
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.baby.tensor_sharing import CallTensors, Exporter
from torchft_like.process_group.collectives import BY_NAME, Call, Collective, refuse_overlap
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import GroupMembers
from torchft_like.process_group.work import OperationWork
from torchft_like.runtime.spin_wait import growing_pauses

# How much longer than an operation may take its subprocess may send nothing.
SILENCE_S = 5.0
GONE_S_MAX = 10.0


@dataclass(frozen=True)
class Recipe:
    """The classes that run in the subprocess, each as `module:class`.

    Attributes:
        group: a ReconfigurableProcessGroup, whose backend the subprocess makes.
        importer: the counterpart of the exporter.
    """

    group: str
    importer: str


class RemoteBackend:
    """A `generation.Backend` whose collectives run in a subprocess.

    Args:
        child: the subprocess, which belongs to this object from now on.
        exporter: lets the subprocess see the tensors; only this object uses it.
        abort: the signal that ends the subprocess.
    """

    rest_s_max = None

    def __init__(self, child: Child, exporter: Exporter, abort: AbortSignal) -> None:
        self._child = child
        self._exporter = exporter
        self._abort = abort
        self._requests = Requests(child.channel, self._end_silent, self._await_end)
        self._sending = threading.Lock()  # a request follows the preambles that it needs
        self._timeout_s = 0.0
        self._why_ended: str | None = None
        self._offered: frozenset[str] = frozenset()
        self._ending = threading.Lock()
        self._cut_off: int | None = None
        abort.add(self._kill)

    def begin(self, recipe: Recipe, members: GroupMembers) -> None:
        """Make the subprocess create its backend.

        Raises:
            ProcessGroupError: the subprocess could not; the text says why.
        """
        self._timeout_s = members.timeout.total_seconds()
        place = (str(members.store), members.rank, members.world_size, self._timeout_s)
        how = (recipe.group, recipe.importer, self._exporter.greeting())
        with self._sending:
            request = self._requests.add(self._patience_s(None))
            self._send((ToChild.BEGIN.value, request.number, dict(os.environ), *how, *place))
        self._requests.wait(request, FOREVER)
        if request.outcome is not Outcome.DONE:
            raise self.describe(request)
        offered, greeting = request.answer
        self._exporter.greeted(greeting)
        self._offered = frozenset(offered)

    @property
    def inner(self) -> object:
        """The object that has the collectives as methods."""
        return self

    def targets(self) -> tuple[object, ...]:
        return (self,)

    def __getattr__(self, name: str) -> Callable[..., Work | None]:
        collective = BY_NAME.get(name)
        if collective is None or collective.name not in self._offered:
            raise AttributeError(f"the backend in the subprocess has no {name}")
        return functools.partial(self._run, collective)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        with self._sending:
            self._send((ToChild.SET_TIMEOUT.value, UNASKED, self._timeout_s))

    def break_off(self) -> None:
        self._end("it was ended because an operation had failed")

    def is_still(self) -> bool:
        return self._child.has_ended()

    def close(self) -> None:
        self._abort.remove(self._kill)
        self._kill()
        self._await_end()
        self._requests.end()
        self._exporter.close()
        self._child.close()

    @property
    def pid(self) -> int:
        """The process id of the subprocess."""
        return self._child.pid

    def num_active_work(self) -> int:
        """Return how many operations are not over."""
        self._requests.look()
        return self._requests.count()

    def wait_over(self) -> None:
        """Wait until no operation is under way, or the subprocess is gone.

        Raises:
            RuntimeError: the device has failed.
        """
        pauses = growing_pauses()
        while not self._child.has_ended() and self._is_busy():
            time.sleep(next(pauses))

    def _is_busy(self) -> bool:
        if self.num_active_work():
            return True
        with self._sending:
            return self._exporter.is_busy()

    def lost(self) -> Exception | None:
        """Return the error that the subprocess is gone, if it is."""
        return self._gone() if self._child.has_ended() else None

    def cut_off(self) -> int:
        """Return how many operations were not over when this side killed the subprocess."""
        with self._ending:
            return self._cut_off or 0

    def describe(self, request: Request) -> Exception:
        return self._gone() if request.outcome is None else outcomes.error_from(request.answer)

    def _run(self, collective: Collective, *args: Any, **kwargs: Any) -> Work | None:
        call = collective.bind(args, kwargs)
        refuse_overlap(call)  # the subprocess may work on copies, in which an overlap would be lost
        with self._sending:
            call_tensors = self._exporter.export(call)
            details = self._encoded(call, call_tensors)
            request = self._requests.add(self._patience_s(call), call_tensors.settle)
            self._send((ToChild.RUN.value, request.number, *details))
        operation = call_tensors.operation(self._requests, request, call.result, self)
        if not collective.blocking:
            return OperationWork(operation)
        operation.wait()
        return None

    def _encoded(self, call: Call, call_tensors: CallTensors) -> tuple[Any, ...]:
        try:
            data = encode_call(call.collective.name, call.args, call.kwargs, call_tensors.locate)
            context = call_tensors.context()
            return (data,) if context is None else (data, context)
        except BaseException:
            call_tensors.settle(Request(UNASKED))
            raise

    def _send(self, message: Message) -> None:
        """Send a message, after the preambles that it needs.

        A message that is sent in part makes the channel useless: the subprocess is ended, and the requests
        with it.
        """
        deadline = time.monotonic() + self._timeout_s + SILENCE_S
        channel = self._child.channel
        try:
            while (preamble := self._exporter.next_preamble()) is not None:
                channel.send(*preamble, deadline, self._requests.look)
                self._exporter.preamble_sent()
            channel.send(message, (), deadline, self._requests.look)
        except ChannelClosedError:
            pass  # the thread that reads the channel finds that out, too, and settles the request
        except TimeoutError:
            self._end_silent()
        except BaseException as error:
            self._end(f"a message to it could not be sent ({error!r}), and it was ended")
            raise

    def _patience_s(self, call: Call | None) -> float:
        """Return for how long the subprocess may send nothing: longer than the operation may take."""
        own = None if call is None else call.timeout
        return (self._timeout_s if own is None else own.total_seconds()) + SILENCE_S

    def _end_silent(self) -> None:
        self._end(f"it said nothing for {SILENCE_S:g} s longer than an operation may take, and was ended")

    def _end(self, why: str) -> None:
        if not self._child.has_ended():
            self._why_ended = self._why_ended or why
            self._kill()

    def _kill(self) -> None:
        with self._ending:
            if self._cut_off is None:
                self._cut_off = self._exporter.cut_off() + self._requests.count()
        self._child.kill()

    def _await_end(self) -> None:
        """Wait until nothing of the subprocess can touch a tensor, after its channel is closed or it was
        killed.
        """
        if not self._child.wait_ended(GONE_S_MAX):
            self._exporter.abandon()

    def _gone(self) -> SubprocessLostError:
        why = self._why_ended or self._requests.last_words or self._child.how_ended()
        self._why_ended = why
        return SubprocessLostError(
            f"the backend's subprocess {self._child.pid} is gone: {why}; configure() starts another"
        )
