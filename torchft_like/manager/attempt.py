"""One attempt at a step, shared by the threads that take part in it.

The coordination loop delivers the quorum, the quorum worker prepares the process group, the training
thread waits at two gates in this order:

    agreed      the quorum is known
    configured  collectives may be issued (or the attempt has failed)

An attempt that cannot go on opens all gates at once, with an error for the threads that wait.

One in a quorum that stands knows its quorum from the beginning, and opens the second gate when the training
thread comes to it. Until then it may be turned into one that asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torchft_like import devices
from torchft_like.checkpointing.copy_ahead import CopyAhead
from torchft_like.checkpointing.transport import Source
from torchft_like.collectives import ErrorFeedback
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.replica_group import Verdict
from torchft_like.core.step import Plan
from torchft_like.divergence.state_fingerprint import PendingFingerprint
from torchft_like.errors import QuorumTimeoutError

if TYPE_CHECKING:  # reductions know attempts
    from torchft_like.manager.managed_work import Pending, Report


class Attempt:
    """The shared state of one attempt. One thread writes each field, most of them before a gate opens."""

    def __init__(self, allow_heal: bool, quorum_timeout_s: float) -> None:
        self.allow_heal = allow_heal
        self.began: float = time.monotonic()
        self.result: QuorumResult | None = None
        # It is made in a quorum that stands, and collectives were not issued yet.
        self.is_standing: bool = False
        self.is_unasked: bool = False  # its quorum is that of an earlier attempt
        self.ask: Callable[[], None] = lambda: None  # asks for a quorum, once it is known how
        self.why_unasked: Callable[[], str] = str  # why there is no quorum, if other ranks are why
        self.leave: Callable[[], None] | None = None  # has all ranks of the group leave without one
        self.pending_collectives: Pending = {}
        self.error_feedbacks: list[ErrorFeedback] = []  # of what was quantized in it
        self.fingerprint: PendingFingerprint | None = None  # of the state with which the step began
        self.comparison: torch.Tensor | None = None  # of the members' fingerprints, once it was issued
        self.report: Report | None = None  # called with errors of the collectives
        self.error: Exception | None = None
        self.verdict: Verdict | None = None
        self.sources: list[Source] = []  # where peers' states can be fetched, once that is known
        self.ahead: CopyAhead | None = None  # of this rank's own state, which it is to serve
        self.is_exchanging = False  # the training thread waits for a peer's state, or sends its own
        # It has exchanged state, as the group's other ranks do, and one of those may take longer.
        self.has_exchanged = False
        # It waits for the device, on which collectives may wait for peers.
        self.is_synchronizing: bool = False
        self.is_deciding: bool = False  # it has voted, and ranks that have not may wait for peers
        # What it waits for comes when a link works again, or a rank answers, which is no reason to give up.
        self.is_patient = False
        self._plan: Plan | None = None
        self.quorum_timeout_s = quorum_timeout_s
        self._agreed = threading.Event()
        self._configured = threading.Event()
        self.is_configured: bool = False  # the event's value, which is read before every collective
        self._decided = threading.Event()
        self.device: int | None = torch.accelerator.current_device_index() if devices.is_in_use() else None

    @property
    def is_agreed(self) -> bool:
        """Whether the quorum is known."""
        return self.result is not None

    @property
    def is_overdue(self) -> bool:
        """Whether the timeout has passed without a quorum."""
        is_late = time.monotonic() > self.began + self.quorum_timeout_s
        return is_late and not self.is_agreed and not self.is_patient

    def stand(self, result: QuorumResult) -> None:
        """Make the attempt in a quorum that stands."""
        self.is_standing = self.is_unasked = True
        self.agree(result)

    def unstand(self) -> None:
        """Wait for another quorum, which is asked for now."""
        self.is_standing = self.is_unasked = self.is_configured = False
        self.result, self.report = None, None
        self._agreed.clear()
        self._configured.clear()
        self.began = time.monotonic()

    def agree(self, result: QuorumResult, plan: Plan | None = None) -> None:
        """Record the quorum, and what has to be done before it can be used."""
        self.result, self._plan = result, plan
        self._agreed.set()

    def take_plan(self) -> Plan | None:
        """Return what has to be done before the quorum can be used, to the first caller only."""
        plan, self._plan = self._plan, None
        return plan

    def drop_ahead(self) -> None:
        """Copy no more of the own state ahead: it was served, or will not be."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.stop()

    def open_configured(self) -> None:
        """Let collectives be issued: nothing more happens in the background."""
        self.is_standing = False
        self.is_configured = True
        self._configured.set()

    def give_up(self) -> None:
        """Wait for the quorum no more: the step goes on to its end without one, and is not committed."""
        self._agreed.set()
        self.open_configured()

    def decide(self, verdict: Verdict) -> None:
        """Record the group's verdict."""
        self.verdict = verdict
        self._decided.set()

    def reopen(self) -> None:
        """Let the ranks vote once more, unless the attempt has ended."""
        self.verdict = None
        self._decided.clear()
        if self.error is not None:
            self._decided.set()

    def fail(self, error: Exception) -> None:
        """End the attempt with an error, which every waiting thread gets."""
        self.error = self.error or error
        for gate in (self._agreed, self._configured, self._decided):
            gate.set()

    def wait_configured(self, describe: Callable[[], str]) -> None:
        """Wait until collectives may be issued.

        Raises:
            QuorumTimeoutError: there is no quorum within the timeout; `describe` returns the circumstances.
        """
        if not self.is_configured:
            remaining_s = self.began + self.quorum_timeout_s - time.monotonic()
            while not self._agreed.wait(max(0.0, remaining_s)):
                if not self.is_patient:
                    raise QuorumTimeoutError(f"no quorum within {self.quorum_timeout_s:g} s: {describe()}")
                remaining_s = self.quorum_timeout_s
            self._configured.wait()
        self.raise_error()

    def synchronize(self) -> None:
        """Wait for the device, if this process uses one."""
        if devices.is_in_use():
            self.is_synchronizing = True
            try:
                torch.accelerator.synchronize()
            finally:
                self.is_synchronizing = False

    def wait_decided(self, timeout_s: float) -> Verdict | None:
        """Wait for the group's verdict and return it; None if there is none within the timeout."""
        self.is_deciding = True
        try:
            while not self._decided.wait(timeout_s) and self.is_patient:
                pass
        finally:
            self.is_deciding = False
        if self.verdict is None:
            self.raise_error()
        return self.verdict

    def raise_error(self) -> None:
        """Raise the error that ended the attempt, if there is one."""
        if self.error is not None:
            raise self.error
