"""The classes that the suite runs on: one line each in `SUBJECTS`.

A subject is built in every process of the fleet and sits on a `Seat`, which says how that class is given its
members and where its errors are found. No other module of the suite knows a class.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.managers import manager_alone
from torchft_like.manager import Manager
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FaultInjectingProcessGroup,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupWrapper,
)

from .scene import PLAIN, Kind

TIMEOUT_S = 30.0
PATIENT_MS = 5_000  # of the connections between Managers and the lighthouse
PAUSE_S = 0.02
WORLD_MAX = 4
# The members that tensors of every kind are moved between, and that compile; calls and their forms are run by
# more.
PAIR = 2


class Seat:
    """A group that the suite itself configures."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def configure(self, address: str, rank: int, world_size: int) -> None:
        """Meet the others at a store address that was never used before."""
        self.group.configure(address, rank, world_size)

    def error(self) -> Exception | None:
        """Return the error that was swallowed since `configure`."""
        return None

    def abort(self) -> None:
        """Abort the group, as its owner does when a member is lost."""
        self.group.abort("the suite says so")

    def close(self) -> None:
        """Give everything back."""
        self.group.shutdown()


class SwallowingSeat(Seat):
    """A seat of a group that keeps its errors."""

    group: ErrorSwallowingProcessGroupWrapper

    def error(self) -> Exception | None:
        """Return the error that the group has kept."""
        return self.group.error()


class ManagedSeat(Seat):
    """A group that a real Manager configures; the address is that of a real lighthouse.

    A step is open from one `configure` to the next.
    """

    def __init__(self) -> None:
        self._manager: Manager | None = None

    def configure(self, address: str, rank: int, world_size: int) -> None:
        """Take part in steps until one has all the members, and leave that one open."""
        if self._manager is None:
            self._manager = self._join(address, rank)
            self.group = ManagedProcessGroup(self._manager)
        else:
            self._manager.should_commit()
        self._manager.start_quorum()
        while self._manager.num_participants() != world_size:
            self._manager.should_commit()
            time.sleep(PAUSE_S)  # the processor is for a member that is still starting
            self._manager.start_quorum()

    def error(self) -> Exception | None:
        """Return the error that the Manager has."""
        return self._manager.errored() if self._manager is not None else None

    def abort(self) -> None:
        """Report an error to the Manager, which aborts the group."""
        assert self._manager is not None
        self._manager.report_error(RuntimeError("the suite says so"))

    def close(self) -> None:
        """Leave the job."""
        if self._manager is not None:
            self.group.unregister()
            self._manager.shutdown()
            self._manager = None

    def _join(self, address: str, rank: int) -> Manager:
        # Some cases compile code, which starves this machine for longer than the usual half of a second.
        os.environ["TORCHFT_KEEPALIVE_TIMEOUT_MS"] = str(PATIENT_MS)
        group = ProcessGroupGloo(TIMEOUT_S)
        return manager_alone(f"replica-{rank}", address, pg=group, timeout=TIMEOUT_S)


@dataclass(frozen=True)
class Subject:
    """A class under test.

    Attributes:
        name: for the test's id.
        sit: makes one, with its seat.
        worlds: the sizes that it can have; None for all.
        managed: configured by a Manager, at a lighthouse.
        device: where its tensors are.
        swallows: its errors are found at its seat.
        moves_nothing: so it accepts what torch's own cannot move.
        forwards: it hands every call on, to a group that another subject shows with every form and fault.
        wraps: it does so by a wrapper's one method for all calls, which looks at no argument.
        looks: what it does depends on the dtypes, shapes and layouts of the tensors.
    """

    name: str
    sit: Callable[[], Seat]
    worlds: tuple[int, ...] | None = None
    managed: bool = False
    device: str = "cpu"
    swallows: bool = False
    moves_nothing: bool = False
    forwards: bool = False
    wraps: bool = False
    looks: bool = True

    @property
    def exists(self) -> bool:
        """Whether this machine has the device."""
        return self.device == "cpu" or torch.cuda.is_available()

    def kinds(self, kinds: Sequence[Kind]) -> Sequence[Kind]:
        """Return those kinds of tensors that can make a difference."""
        return kinds if self.looks else [PLAIN]


SUBJECTS: tuple[Subject, ...] = (
    Subject("ProcessGroupGloo", lambda: Seat(ProcessGroupGloo(TIMEOUT_S))),
    Subject(
        "ProcessGroupWrapper",
        lambda: Seat(ProcessGroupWrapper(pg=ProcessGroupGloo(TIMEOUT_S))),
        forwards=True,
        wraps=True,
        looks=False,
    ),
    Subject(
        "ErrorSwallowing",
        lambda: SwallowingSeat(ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(TIMEOUT_S))),
        swallows=True,
        looks=False,
    ),
    Subject(
        "FaultInjecting",
        lambda: Seat(FaultInjectingProcessGroup(ProcessGroupGloo(TIMEOUT_S))),
        forwards=True,
        wraps=True,
        looks=False,
    ),
    *(
        Subject(
            name,
            lambda checks=checks: Seat(ProcessGroupGloo(TIMEOUT_S, check_collectives=checks)),  # type: ignore[misc]
            forwards=True,
            looks=False,
        )
        for name, checks in (("Unchecked", False), ("Checked", True))
    ),
    Subject("Managed", ManagedSeat, managed=True, swallows=True),
    Subject("ProcessGroupDummy", lambda: Seat(ProcessGroupDummy(0, 1)), worlds=(1,), moves_nothing=True),
    Subject("ProcessGroupBabyGloo", lambda: Seat(ProcessGroupBabyGloo(TIMEOUT_S))),
    Subject("ProcessGroupNCCL", lambda: Seat(ProcessGroupNCCL(TIMEOUT_S)), worlds=(1,), device="cuda"),
    Subject(
        "ProcessGroupBabyNCCL", lambda: Seat(ProcessGroupBabyNCCL(TIMEOUT_S)), worlds=(1,), device="cuda"
    ),
)

BY_NAME = {subject.name: subject for subject in SUBJECTS}
PRESENT = [subject for subject in SUBJECTS if subject.exists]
DOING = [subject for subject in PRESENT if not subject.forwards]
MEETING = [subject for subject in DOING if subject.worlds is None]  # the subjects that can have peers
