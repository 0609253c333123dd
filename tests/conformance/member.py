"""A process of the fleet: it runs cases on our groups and on torch's own, and tells the differences.

It lives as long as the test session and does one thing after the other.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.standby import stand_by

from . import registry
from .scene import (
    FOR_OURS_ONLY,
    PLAIN,
    Case,
    Form,
    Kind,
    Outcome,
    Scene,
    difference,
    is_like,
    is_only_clearer,
    outcome_of,
)
from .subjects import BY_NAME, Seat

STORE_TIMEOUT_S = 60.0


class Member:
    """The commands that a process of the fleet carries out."""

    def __init__(self) -> None:
        stand_by()
        os.environ.pop("TORCHFT_CHECK_COLLECTIVES", None)  # a subject says itself if it is no default
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # deprecated names are called on purpose
        self.seats: dict[str, Seat] = {}
        self.places: dict[str, tuple[int, int]] = {}
        self.references: dict[int, Any] = {}
        self.expected: dict[tuple[Case, Kind, str, int], Outcome] = {}
        self.aside = ThreadPoolExecutor(1)
        self.begun: Future[Outcome] = Future()

    def meet(self, port: int, index: int, world_max: int) -> None:
        """Make torch's own groups: the default one, and a group of the first members for each smaller
        size.
        """
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=PrefixStore("plain", store), rank=index, world_size=world_max)
        for world in range(1, world_max):
            self.references[world] = dist.new_group(list(range(world)), backend="gloo")
        self.references[world_max] = dist.group.WORLD

    def configure(self, subject: str, address: str, rank: int, world: int) -> None:
        """Give a subject its members, and make the subject the first time."""
        seat = self.seats.get(subject) or BY_NAME[subject].sit()
        seat.configure(address, rank, world)
        if subject not in self.seats:
            seat.group.register(subject)
        self.seats[subject] = seat
        self.places[subject] = rank, world

    def close(self, subject: str) -> None:
        """Leave a subject's group."""
        if (seat := self.seats.pop(subject, None)) is not None:
            seat.close()

    def run(self, subject: str, case: str, forms: Sequence[Form]) -> tuple[int, list[str], bool]:
        """Run a case on both groups in one form after the other, until an error spoils the subject on a rank.

        Returns:
            How many forms were run, the differences in words, and whether the subject is spoilt.
        """
        found: list[str] = []
        for count, (kind, mode) in enumerate(forms, 1):
            text = self._difference(subject, case, kind, mode)
            found += [] if text is None else [f"{kind}, {mode}: {text}"]
            if self._is_spoilt_for_any(subject):
                return count, found, True
        return len(forms), found, False

    def _difference(self, subject: str, case: str, kind: Kind, mode: str) -> str | None:
        seat, function = self.seats[subject], registry.case(case)
        expected = self._expected(subject, registry.model(subject, case), kind, mode)
        found = outcome_of(function, self._scene(subject, seat.group, kind, mode), seat.error)
        return self._compare(subject, case, found, expected)

    def _expected(self, subject: str, case: Case, kind: Kind, mode: str) -> list[Outcome]:
        """Return the outcome of torch's own group; for layouts that it cannot handle, that of plain tensors,
        too.
        """
        plain = replace(kind, layout="plain")
        kinds = [plain] if kind.layout in ("plain", *FOR_OURS_ONLY) else [plain, kind]
        return [self._of_torch(subject, case, each, mode) for each in kinds]

    def _of_torch(self, subject: str, case: Case, kind: Kind, mode: str) -> Outcome:
        """Return the outcome of torch's own group; it is asked once, as it is the same for every subject."""
        key = case, kind, mode, self.places[subject][1]
        if key not in self.expected:
            scene = self._scene(subject, self.reference(subject), kind, mode)
            self.expected[key] = outcome_of(case, scene, lambda: None).without_traceback()
        return self.expected[key]

    def begin(self, subject: str, case: str) -> None:
        """Run a case on a subject alone, on another thread; `result` tells how it ended."""
        seat, scene = self.seats[subject], self._scene(subject, self.seats[subject].group, PLAIN, "wait")
        self.begun = self.aside.submit(outcome_of, registry.case(case), scene, seat.error)

    def is_over(self) -> bool:
        """Return whether the case that was begun has ended."""
        return self.begun.done()

    def result(self) -> str | None:
        """Return the class of the error with which the case that was begun has ended; None without an
        error.
        """
        error = self.begun.result(STORE_TIMEOUT_S).error
        return None if error is None else type(error).__name__

    def abort(self, subject: str) -> bool:
        """Abort the group, as its owner does when a member is lost; return whether the case was over."""
        was_over = self.is_over()
        self.seats[subject].abort()
        return was_over

    def reference(self, subject: str) -> Any:
        """Return torch's own group of the subject's present members."""
        return self.references.get(self.places[subject][1])

    def _scene(self, subject: str, group: Any, kind: Kind, mode: str) -> Scene:
        rank, world = self.places[subject]
        is_reference = group is self.reference(subject)
        device = "cpu" if is_reference else BY_NAME[subject].device
        return Scene(group, rank, world, kind, mode, device, is_reference)

    def _compare(self, subject: str, case: str, found: Outcome, expected: list[Outcome]) -> str | None:
        if (refusal := registry.refusal(subject, case)) is not None:
            return None if isinstance(found.error, refusal) else f"it is not refused: {found}"
        if expected[0].error is not None and BY_NAME[subject].moves_nothing:
            return None
        if is_only_clearer(found, expected[0]):
            return None
        if found.error is not None and any(is_like(found.error, outcome.error) for outcome in expected):
            return None
        return difference(found, expected[0])

    def _is_spoilt_for_any(self, subject: str) -> bool:
        """Whether an error has spoilt the subject on any rank: then none of them goes on with it."""
        seat = self.seats[subject]
        spoilt = torch.tensor(int(seat.error() is not None or seat.group.errored() is not None))
        dist.all_reduce(spoilt, dist.ReduceOp.MAX, group=self.reference(subject))
        return bool(spoilt)
