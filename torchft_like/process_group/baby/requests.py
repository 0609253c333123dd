"""The requests that a trainer has sent to a subprocess and that are not answered yet, and the operations
behind them.

The waiting threads read the answers themselves: one waiter at a time reads, for all of them, and the others
sleep until their answer has come or it is their turn to read. So an answer wakes only the thread that waits
for it. A future has a thread of its own, which waits as any other does.

A subprocess is silent when it has answered nothing at all for longer than it may take over one request.
Whether it runs is asked every LOOK_EVERY_S seconds of a wait in which no answer comes.

INVARIANT: a request is settled exactly once: by its answer, or because the subprocess is gone. Until then it
keeps its tensors alive, even if the caller has dropped its work. A reader that Ctrl-C interrupts, wherever it
is, passes the turn on; if that may have cost an answer, the subprocess is ended.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.baby.heartbeat import LOOK_EVERY_S
from torchft_like.process_group.baby.messages import (
    UNASKED,
    Channel,
    ChannelClosedError,
    ForeignMessageError,
    Message,
    Outcome,
    answer_for,
)
from torchft_like.process_group.work import FOREVER, ExplainedOperation

# How long an empty channel is watched after a limit has passed, before the subprocess counts as silent: a
# trainer that was stopped itself finds every limit passed.
LAST_CHANCE_S = 1.0
NOT_DONE = "the operation is not done after the timeout of this wait; it goes on"
_OUTCOMES = {outcome.value: outcome for outcome in Outcome}

# A function of the request, called by the thread that reads its answer or finds that none will come.
Settled = Callable[["Request"], None]
Describe = Callable[["Request"], Exception]


@dataclass(eq=False, slots=True)
class Request:
    """One request to the subprocess.

    Attributes:
        patience_s: how many seconds the subprocess may send nothing while the request is open.
        on_settled: called once, before any waiting thread goes on.
        outcome, answer: set when the request is settled; no outcome means that the subprocess is gone.
    """

    number: int
    patience_s: float = FOREVER
    on_settled: Settled | None = None
    since: float = field(default_factory=time.monotonic)
    is_settled: bool = False
    outcome: Outcome | None = None
    answer: tuple[Any, ...] = ()


# Stands for no request: it is never sent, and never settled.
NOT_SENT = Request(UNASKED)


class Requests:
    """The open requests to one subprocess.

    Attributes:
        last_words: the reason that the subprocess sent before it ended itself, or why it has to be ended.

    Args:
        channel: the channel to the subprocess; its answers are read here and nowhere else.
        on_pause: called again and again while a thread waits and no answer comes; it ends a subprocess that
          does not run.
        on_silence: called when the subprocess is silent, or its answers are of no use; it has to end the
          subprocess.
        on_closed: called when the subprocess's end of the channel is closed; it returns when the subprocess
          cannot touch a tensor any more.
    """

    def __init__(
        self,
        channel: Channel,
        on_pause: Callable[[], object],
        on_silence: Callable[[], object],
        on_closed: Callable[[], object],
    ) -> None:
        self._channel = channel
        self._on_pause = on_pause
        self._on_silence = on_silence
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._open: dict[int, Request] = {}
        self._heard = 0.0
        # When an answer came, or the subprocess was looked at, or a request was the first.
        self._quiet_since = 0.0
        self._numbers = itertools.count(UNASKED + 1)
        self._reader: int | None = None  # the thread that reads
        self._in_hand: Request | None = None  # the last one that an answer came for
        self._waiters = 0
        self._is_over = False
        self.last_words: str | None = None

    def add(self, patience_s: float, on_settled: Settled | None = None) -> Request:
        """Add a request, just before it is sent: its answer may come at once."""
        request = Request(next(self._numbers), patience_s, on_settled)
        with self._lock:
            is_over = self._is_over
            if not is_over:
                if not self._open:
                    self._quiet_since = request.since
                self._open[request.number] = request
        if is_over:
            self._settle(request)
        return request

    def wait(self, request: Request, deadline: float) -> bool:
        """Wait until the request is settled; return False if `deadline` came first."""
        while not request.is_settled:
            self._read(deadline, request)
            if not request.is_settled and time.monotonic() >= deadline:
                return False
        return True

    def look(self) -> None:
        """Read the answers that are there, without waiting."""
        while self._open and (
            self._channel.has_message() or time.monotonic() >= self._quiet_since + LOOK_EVERY_S
        ):
            if not self._read(deadline=0):
                return

    def count(self) -> int:
        return len(self._open)

    def end(self) -> None:
        """Settle all open requests, because no answer will come any more; return when no thread reads."""
        self._end()
        with self._lock:
            self._wait_in_line(lambda: self._reader is None)

    def _read(self, deadline: float, request: Request = NOT_SENT) -> bool:
        """Read one answer in turn; return False if `request` was settled, or the deadline came, first."""
        try:
            if is_mine := self._take_turn(deadline, request):
                self._read_in_turn(deadline)
                self._pass_turn()
        except BaseException:  # also Ctrl-C, between any two lines: the others wait for this thread
            if self._is_over:
                self._end()
            self._pass_turn()
            raise
        return is_mine

    def _take_turn(self, deadline: float, request: Request) -> bool:
        with self._lock:
            if not self._is_free():
                self._wait_in_line(lambda: request.is_settled or self._is_free(), deadline)
            if is_mine := self._is_free() and not request.is_settled:
                self._reader = threading.get_ident()
            return is_mine

    def _pass_turn(self) -> None:
        """Let another thread read, if it is this one's turn. A second call does no harm."""
        with self._lock:
            if self._reader == threading.get_ident():
                self._reader = None
            if self._waiters:
                self._turn.notify_all()

    def _wait_in_line(self, reached: Callable[[], bool], deadline: float = FOREVER) -> None:
        """Wait for a condition, with the lock held, among the waiters that a reader notifies."""
        self._waiters += 1
        try:
            left_s = None if deadline == FOREVER else max(0.0, deadline - time.monotonic())
            self._turn.wait_for(reached, left_s)
        finally:
            self._waiters -= 1

    def _is_free(self) -> bool:
        return self._reader is None and not self._is_over

    def _read_in_turn(self, deadline: float) -> None:
        try:
            # Not longer, as a request that is added meanwhile may have a shorter limit.
            self._read_one(min(deadline, time.monotonic() + LOOK_EVERY_S))
        except TimeoutError:
            now = time.monotonic()
            if now >= self._quiet_since + LOOK_EVERY_S:
                self._quiet_since = now
                self._on_pause()
            with self._lock:
                requests = list(self._open.values())
            limits = (max(r.since, self._heard) + r.patience_s for r in requests)
            if now >= min(limits, default=FOREVER):  # it is silent, unless an answer comes now
                self._give_last_chance()

    def _give_last_chance(self) -> None:
        try:
            self._read_one(time.monotonic() + LAST_CHANCE_S)
        except TimeoutError:
            self._heard = time.monotonic()  # the subprocess's end is the next event
            self._on_silence()

    def _read_one(self, deadline: float) -> None:
        if not self._channel.is_ready(deadline):
            raise TimeoutError("no answer until the deadline")
        try:
            self._take_answer()
        except ChannelClosedError:
            self._close()
        except ForeignMessageError as error:  # no message of the subprocess can be relied upon any more
            self._close(f"it sent {error}")
        except Exception:
            raise
        except BaseException:  # Ctrl-C, with which an answer may be lost
            if (request := self._in_hand) is not None and not request.is_settled:
                request.outcome = None
                self._open[request.number] = request
            self._close("it was ended, as an interrupt came while an answer of it was read")
            raise

    def _take_answer(self) -> None:
        number, outcome, answer = _read_answer(*self._channel.receive())
        self._heard = self._quiet_since = time.monotonic()
        if number == UNASKED:
            self.last_words = str(answer[-1])
            return
        with self._lock:
            self._in_hand = request = self._open.get(number)
            if request is None:
                return
            del self._open[number]
        request.outcome, request.answer = outcome, answer
        self._settle(request)

    def _close(self, why: str = "") -> None:
        """Settle all requests once the subprocess has ended, which it is made to if there is a reason."""
        if why:
            self.last_words = why
            self._on_silence()
        self._on_closed()
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            self._turn.notify_all()
        for request in list(self._open.values()):  # each stays among them until it is settled
            self._settle(request)
            self._open.pop(request.number, None)

    def _settle(self, request: Request) -> None:
        on_settled, request.on_settled = request.on_settled, None
        try:
            if on_settled is not None:
                on_settled(request)
        except BaseException as error:
            request.outcome, request.answer = Outcome.FAILED, answer_for(error)
            if not isinstance(error, Exception):
                raise
        finally:
            with self._lock:
                request.is_settled = True
                if self._waiters:
                    self._turn.notify_all()


class RemoteOperation(ExplainedOperation):
    """An operation in a subprocess.

    It is over, and its outputs are in the caller's tensors, once `wait` has returned, the future has
    completed, or `is_completed` was true. `describe` returns the error of a request that failed, was refused,
    or lost its subprocess.
    """

    _error: Exception | None = None

    def __init__(
        self, requests: Requests, request: Request, result: list[Any], describe: Describe, tensors: Any
    ) -> None:
        super().__init__()
        self._requests = requests
        self._request = request
        self._result = result
        self._describe = describe
        self._call_tensors = tensors

    def wait_until(self, deadline: float) -> None:
        if not self._requests.wait(self._request, deadline):
            raise ProcessGroupError(NOT_DONE)
        if (error := self._error_of_request()) is not None:
            raise error.with_traceback(None)

    def is_completed(self) -> bool:
        if not self._request.is_settled:
            self._requests.look()
        return self._request.is_settled

    def exception(self) -> Exception | None:
        return self._error_of_request() if self.is_completed() else None

    def result(self) -> list[Any]:
        return self._result

    def _source_rank(self) -> int:
        """Return the rank of the sender as the subprocess answered it; -1 if it did not."""
        is_done = self.is_completed() and self._request.outcome is Outcome.DONE
        return int(self._request.answer[0]) if is_done and self._request.answer else -1

    def _error_of_request(self) -> Exception | None:
        if not self._request.is_settled or self._request.outcome is Outcome.DONE:
            return None
        if self._error is None:
            error = self._describe(self._request)
            was_refused = self._request.outcome is Outcome.REFUSED
            self._error = error if was_refused else self.explain(error) or error
        return self._error


def _read_answer(message: Message, descriptors: list[int]) -> tuple[int, Outcome, tuple[Any, ...]]:
    """Return the number of the request, how it ended, and the parts that belong to that outcome."""
    for descriptor in descriptors:  # no answer has descriptors
        os.close(descriptor)
    number, code, *parts = message
    outcome, answer = _OUTCOMES.get(code), tuple(parts)
    if outcome is Outcome.DONE and number != UNASKED:
        return number, outcome, answer
    words = 1 if number == UNASKED else 2
    if outcome is not None and len(answer) == words and all(type(part) is str for part in answer):
        return number, outcome, answer
    raise ForeignMessageError(f"a message that is no answer: {message!r:.200}")
