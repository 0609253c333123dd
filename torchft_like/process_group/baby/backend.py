"""A backend in a subprocess, seen from the trainer.

It turns calls of collectives into requests, and takes care that the subprocess sees the tensors. What
happens to an answer is the business of `requests` and `work`; how a subprocess comes to be, of
`nursery`.

INVARIANT: to end the subprocess is to end every operation. Nothing of it can touch a tensor after its
end of the channel is closed, because the kernel takes a dying process's memory away first.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from torchft_like.errors import SubprocessLostError
from torchft_like.process_group.baby import outcomes
from torchft_like.process_group.baby.arguments import encode
from torchft_like.process_group.baby.channel import ChannelClosedError, Message
from torchft_like.process_group.baby.memory import (
    Block,
    Exports,
    Segment,
    Staging,
    TensorSpec,
    tensor_at,
)
from torchft_like.process_group.baby.nursery import Child
from torchft_like.process_group.baby.protocol import UNASKED, Outcome, ToChild
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.baby.work import BabyWork
from torchft_like.process_group.collectives import BY_NAME, Call, Collective, tensors_of
from torchft_like.process_group.generation import AbortSignal, Membership

# How much later than an operation's own timeout its subprocess counts as silent.
SILENCE_S = 5.0
GONE_S_MAX = 10.0


class RemoteBackend:
    """See generation.Backend.

    Args:
        child: the subprocess, which from now on belongs to this object.
        staging: room for tensors that do not live in shared memory.
        abort: ends the subprocess when it is set.
    """

    def __init__(self, child: Child, staging: Staging, abort: AbortSignal) -> None:
        self._child = child
        self._staging = staging
        self._abort = abort
        self._exports = Exports()
        self._requests = Requests(child.channel, self._end_silent)
        self._sending = threading.Lock()  # a request comes after the segments that it needs
        self._mapped: set[int] = set()
        self._timeout_s = 0.0
        self._why_ended: str | None = None
        self._offered: frozenset[str] = frozenset()
        abort.add(child.kill)

    def begin(self, backend: str, membership: Membership) -> None:
        """Have the subprocess make its backend.

        Args:
            backend: `module:class` of a ReconfigurableProcessGroup.
            membership: what it is made for.

        Raises:
            ProcessGroupError: it could not; the text says why.
        """
        self._timeout_s = membership.timeout.total_seconds()
        request = self._requests.add(self._deadline(None))
        parts = (
            dict(os.environ),
            backend,
            str(membership.store),
            membership.rank,
            membership.world_size,
            self._timeout_s,
        )
        self._send((ToChild.BEGIN.value, request.number, *parts), request.deadline)
        self._requests.wait(request, request.deadline + GONE_S_MAX)
        if request.outcome is not Outcome.DONE:
            raise self.describe(request)
        self._offered = frozenset(request.answer[0])

    @property
    def inner(self) -> object:
        """What has the collectives as methods."""
        return self

    def targets(self) -> tuple[object, ...]:
        """See generation.Backend."""
        return (self,)

    def __getattr__(self, name: str) -> Callable[..., Work | None]:
        collective = BY_NAME.get(name)
        if collective is None or collective.name not in self._offered:
            raise AttributeError(f"the backend in the subprocess has no {name}")
        return functools.partial(self._run, collective)

    def set_timeout(self, timeout: timedelta) -> None:
        """See generation.Backend."""
        self._timeout_s = timeout.total_seconds()
        self._send((ToChild.SET_TIMEOUT.value, UNASKED, self._timeout_s), self._deadline(None))

    def break_off(self) -> None:
        """See generation.Backend."""
        self._end("it was ended because an operation had failed")

    def is_still(self) -> bool:
        """See generation.Backend."""
        return self._child.has_ended()

    def close(self) -> None:
        """See generation.Backend."""
        self._abort.remove(self._child.kill)
        self._child.kill()
        self._child.wait_ended(GONE_S_MAX)
        self._requests.end()
        self._child.close()

    @property
    def pid(self) -> int:
        """The subprocess."""
        return self._child.pid

    def num_active_work(self) -> int:
        """How many operations are not over."""
        self._requests.look()
        return self._requests.count()

    def describe(self, request: Request) -> Exception:
        """See work.Failures."""
        if request.outcome is not None:
            return outcomes.error_from(request.answer)
        self._why_ended = why = self._why_ended or self._child.how_ended()
        return SubprocessLostError(
            f"the backend's subprocess {self._child.pid} is gone: {why}; configure() starts another"
        )

    def _run(self, collective: Collective, *args: Any, **kwargs: Any) -> Work | None:
        call = collective.bind(args, kwargs)
        tensors = _Tensors(call, self._exports, self._staging)
        try:
            plain = [encode(value, tensors.locate) for value in args]
            named = {name: encode(value, tensors.locate) for name, value in kwargs.items()}
        except BaseException:
            self._staging.give_back(tensors.blocks)
            raise
        request = self._requests.add(self._deadline(call), tensors.settle)
        message = (ToChild.RUN.value, request.number, collective.name, plain, named)
        self._send(message, request.deadline, tensors.segments)
        work = BabyWork(self._requests, request, call.result, self)
        if not collective.blocking:
            return work
        work.wait()
        return None

    def _send(self, message: Message, deadline: float, segments: Iterable[Segment] = ()) -> None:
        try:
            with self._sending:
                for segment in segments:
                    if segment.number not in self._mapped:
                        self._map(segment, deadline)
                for number in self._exports.take_dead():
                    self._mapped.discard(number)
                    self._child.channel.send((ToChild.UNMAP.value, UNASKED, number), (), deadline)
                self._child.channel.send(message, (), deadline)
        except ChannelClosedError:
            pass  # whoever reads the channel finds that out, too, and settles the request
        except TimeoutError:
            self._end_silent()

    def _map(self, segment: Segment, deadline: float) -> None:
        header = (ToChild.MAP.value, UNASKED, segment.number, segment.nbytes)
        self._child.channel.send(header, [segment.descriptor], deadline)
        self._mapped.add(segment.number)

    def _deadline(self, call: Call | None) -> float:
        timeout_s = self._timeout_s
        for value in (*call.args, *call.kwargs.values()) if call is not None else ():
            own = getattr(value, "timeout", value)
            if isinstance(own, timedelta) and own > timedelta(0):
                timeout_s = own.total_seconds()
        return time.monotonic() + timeout_s + SILENCE_S

    def _end_silent(self) -> None:
        self._end(f"it did not answer within {SILENCE_S:g} s of the operation's timeout, and was ended")

    def _end(self, why: str) -> None:
        if not self._child.has_ended():
            self._why_ended = self._why_ended or why
            self._child.kill()


class _Tensors:
    """The tensors of one call: where the subprocess finds them, and what is to be copied back."""

    def __init__(self, call: Call, exports: Exports, staging: Staging) -> None:
        self._call = call
        self._exports = exports
        self._staging = staging
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.blocks: list[Block] = []
        self.segments: list[Segment] = []

    def locate(self, tensor: Tensor) -> TensorSpec:
        """The segment, and the place in it, that holds the tensor for the subprocess."""
        found = self._exports.find(tensor)
        segment, spec = found if found is not None else self._stage(tensor)
        self.segments.append(segment)
        return spec

    def settle(self, request: Request) -> None:
        """The request is over: what the subprocess has written goes where the caller expects it."""
        if request.outcome is Outcome.DONE and self._copies:
            try:
                with torch.no_grad():
                    for tensor, staged in self._copies:
                        tensor.copy_(staged)
            except RuntimeError as error:
                request.outcome, request.answer = Outcome.REFUSED, outcomes.answer_for(error)
        self._staging.give_back(self.blocks)

    def _stage(self, tensor: Tensor) -> tuple[Segment, TensorSpec]:
        block, spec = self._staging.stage(tensor)
        self.blocks.append(block)
        staged = tensor_at(block.storage, spec)
        if any(tensor is own for own in tensors_of(self._call.inputs)):
            with torch.no_grad():
                staged.copy_(tensor)
        if any(tensor is own for own in tensors_of(self._call.outputs)):
            self._copies.append((tensor, staged))
        return block.segment, spec
