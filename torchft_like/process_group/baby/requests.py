"""What a trainer has asked of a subprocess and not been answered yet.

Whoever waits reads the answers himself: one waiter at a time reads, for everybody, and the others
sleep until theirs has come or it is their turn to read. So an answer wakes one thread, the one that
wants it. Only a request that somebody follows by a future needs a thread that nobody waits in; it
is started when the first one does.

INVARIANT: a request is settled exactly once: by its answer, or because the subprocess is gone. Until
then it keeps its tensors alive, whatever became of the work that the user holds.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchft_like.process_group.baby.channel import FOREVER, Channel, ChannelClosedError
from torchft_like.process_group.baby.protocol import UNASKED, Outcome

# Called with the request, by whichever thread reads its answer, or finds that none will come.
Settled = Callable[["Request"], None]


@dataclass(eq=False)
class Request:
    """One request.

    Attributes:
        number: of the request in messages.
        deadline: when the subprocess counts as silent (of `time.monotonic`).
        on_settled: called once, before anybody who waits goes on.
        outcome, answer: set when it is settled; no outcome means that the subprocess is gone.
    """

    number: int
    deadline: float = FOREVER
    on_settled: Settled | None = None
    is_settled: bool = False
    outcome: Outcome | None = None
    answer: tuple[Any, ...] = ()
    followers: list[Settled] = field(default_factory=list)


class Requests:
    """Those to one subprocess.

    Attributes:
        last_words: what the subprocess said without being asked, before it ended itself.

    Args:
        channel: to the subprocess; its answers are read here and nowhere else.
        on_silence: called when a request's deadline has passed without an answer; has to end the
            subprocess.
    """

    def __init__(self, channel: Channel, on_silence: Callable[[], None]) -> None:
        self._channel = channel
        self._on_silence = on_silence
        self._turn = threading.Condition(threading.Lock())
        self._open: dict[int, Request] = {}
        self._numbers = itertools.count(UNASKED + 1)
        self._is_being_read = False
        self._waiters = 0
        self._followed = 0
        self._follower: threading.Thread | None = None
        self._due: deque[tuple[Settled, Request]] = deque()
        self._is_over = False
        self.last_words: str | None = None

    def add(self, deadline: float, on_settled: Settled | None = None) -> Request:
        """A new request, before it is sent: its answer may come at once."""
        request = Request(next(self._numbers), deadline, on_settled)
        with self._turn:
            is_over = self._is_over
            if not is_over:
                self._open[request.number] = request
        if is_over:
            self._settle(request)
        return request

    def withdraw(self, request: Request) -> None:
        """It will not be sent."""
        with self._turn:
            was_open = self._open.pop(request.number, None) is not None
        if was_open:
            self._settle(request)

    def wait(self, request: Request, deadline: float) -> bool:
        """Until the request is settled; False if `deadline` came first."""
        while not request.is_settled:
            limit = min(deadline, request.deadline)
            if self._take_turn(lambda: request.is_settled, limit):
                try:
                    self._read_one(limit)
                except TimeoutError:
                    pass
                finally:
                    self._pass_turn()
            if request.is_settled:
                break
            if self._is_silent(request):
                self._on_silence()
            elif time.monotonic() >= deadline:
                return False
        return True

    def follow(self, request: Request, settled: Settled) -> None:
        """Have `settled` called, once, when the request is settled; at once if it is."""
        with self._turn:
            is_settled = request.is_settled
            if not is_settled:
                request.followers.append(settled)
                self._followed += 1
                if self._follower is None:
                    self._follower = threading.Thread(target=self._read_for_followers, daemon=True)
                    self._follower.name = "torchft-baby-answers"
                    self._follower.start()
                self._turn.notify_all()
        if is_settled:
            settled(request)

    def look(self) -> None:
        """Take the answers that are there, without waiting."""
        while self._open and self._channel.has_message() and self._take_turn(lambda: False, deadline=0):
            try:
                self._read_one(deadline=0)
            finally:
                self._pass_turn()

    def count(self) -> int:
        """How many are not settled."""
        return len(self._open)

    def end(self) -> None:
        """Nothing will be answered any more: settle what is open. Nobody reads after this."""
        self._end()
        self._tell_followers()
        with self._turn:
            self._turn.wait_for(lambda: not self._is_being_read)

    def _take_turn(self, is_enough: Callable[[], bool], deadline: float) -> bool:
        """Become the one that reads; False if `is_enough`, or the deadline has come."""
        with self._turn:
            if not self._is_free():
                self._waiters += 1
                try:
                    self._turn.wait_for(lambda: is_enough() or self._is_free(), _seconds(deadline))
                finally:
                    self._waiters -= 1
            self._is_being_read |= (is_mine := self._is_free() and not is_enough())
            return is_mine

    def _is_free(self) -> bool:
        return not self._is_being_read and not self._is_over

    def _pass_turn(self) -> None:
        with self._turn:
            self._is_being_read = False
            if self._waiters or self._followed:
                self._turn.notify_all()
        self._tell_followers()

    def _read_one(self, deadline: float) -> None:
        try:
            (number, outcome, *answer), _ = self._channel.receive(deadline)
        except ChannelClosedError:
            self._end()
            return
        with self._turn:
            request = self._open.pop(number, None)
        if number == UNASKED:
            self.last_words = str(answer[-1])
        elif request is not None:
            request.outcome, request.answer = Outcome(outcome), tuple(answer)
            self._settle(request)

    def _end(self) -> None:
        with self._turn:
            self._is_over = True
            left, self._open = list(self._open.values()), {}
            self._turn.notify_all()
        for request in left:
            self._settle(request)

    def _settle(self, request: Request) -> None:
        if request.on_settled is not None:
            request.on_settled(request)
            request.on_settled = None
        with self._turn:
            request.is_settled = True
            self._followed -= len(request.followers)
            self._due.extend((settled, request) for settled in request.followers)
            request.followers.clear()
            if self._waiters:
                self._turn.notify_all()

    def _tell_followers(self) -> None:
        """Not during one's turn to read: what is called may wait for another request."""
        while True:
            try:
                settled, request = self._due.popleft()
            except IndexError:
                return
            settled(request)

    def _read_for_followers(self) -> None:
        while self._take_turn_for_followers():
            try:
                self._read_one(min((r.deadline for r in self._open_now() if r.followers), default=FOREVER))
            except TimeoutError:
                silent = [request for request in self._open_now() if self._is_silent(request)]
                if silent:
                    self._on_silence()
            finally:
                self._pass_turn()

    def _take_turn_for_followers(self) -> bool:
        """Sleep until somebody follows a request and nobody reads; False at the end."""
        with self._turn:
            self._turn.wait_for(lambda: self._is_over or (self._followed > 0 and self._is_free()))
            if self._is_over:
                return False
            self._is_being_read = True
            return True

    def _open_now(self) -> list[Request]:
        with self._turn:
            return list(self._open.values())

    def _is_silent(self, request: Request) -> bool:
        """Whether the subprocess has not answered in time; says so once."""
        if time.monotonic() < request.deadline:
            return False
        request.deadline = FOREVER  # the end of the subprocess will settle it
        return True


def _seconds(deadline: float) -> float | None:
    return None if deadline == FOREVER else max(0.0, deadline - time.monotonic())
