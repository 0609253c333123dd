"""The errors of the runtime. Their texts say what happened, whose fault it is and what to do.

Bad arguments are ValueError (or a subclass below that is one); everything about the job's state
derives from `FaultToleranceError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lighthouse.errors import AddressError as AddressError
from lighthouse.errors import BindError as BindError
from lighthouse.errors import ConfigError as ConfigError
from lighthouse.errors import CoordinationError as CoordinationError


class FaultToleranceError(RuntimeError):
    """Base of every error that the runtime raises about the state of the job."""


class ConnectError(FaultToleranceError, ConnectionError):
    """A service could not be reached within `connect_timeout`; the text says where, and what to check."""


class TrustError(ConnectError):
    """A service refuses this process, which has shown no token of the job, or one of a lower role."""


class QuorumTimeoutError(FaultToleranceError, TimeoutError):
    """There was no quorum within `quorum_timeout`; the text names the replicas, or service, missing."""


class GroupLostError(FaultToleranceError):
    """Another rank of this replica group is gone: restart the whole group."""


class MemberLostError(FaultToleranceError):
    """A member of the quorum died or fell silent; the step is tried again without it."""


class StepLostError(FaultToleranceError):
    """Another rank of this replica group could not finish the step; all ranks try it again."""


class MaxRetriesError(FaultToleranceError):
    """More consecutive steps failed to commit than `max_retries` allows."""


class ForeignMemberError(FaultToleranceError):
    """This replica group is not of the job to which it came: the text names the first difference.

    Its Manager has ended, and every further call raises this: mend the settings, and start the replica group
    again.
    """


class DivergenceError(FaultToleranceError):
    """Replicas hold different states after the same step, and healing cannot mend that."""


class NotSupportedError(FaultToleranceError, NotImplementedError):
    """The operation is not available here; the text says what to use instead."""


class HealthCheckError(FaultToleranceError):
    """A health check failed until the rank gave up; the text says which one, and why."""


class UnusedParametersError(FaultToleranceError):
    """A backward pass left parameters out; the step is tried again, and such ones are looked for."""


class ShutdownError(FaultToleranceError):
    """The Manager was used after `shutdown`."""


class ProcessGroupError(FaultToleranceError):
    """A process group cannot do what was asked of it."""


class ProcessGroupNotConfiguredError(ProcessGroupError):
    """A collective was called before the first `configure`."""


class SubprocessLostError(ProcessGroupError):
    """The process that runs a Baby group's backend died, or did not answer; `configure` starts another."""


class ProcessGroupAbortedError(ProcessGroupError):
    """The group was aborted; `configure` makes it usable again."""


class CollectiveRefusedError(ProcessGroupError):
    """A collective did not start: no tensor was touched, and the group stays usable."""


class CollectiveMismatchError(CollectiveRefusedError):
    """The ranks mean different things by one collective; every rank gets this error, with the same text.

    Attributes:
        aspect: what differs: operation, root, reduce op, dtype, shape, device or number of tensors.
        calls: what each rank passed, by rank.
    """

    def __init__(self, aspect: str, calls: Mapping[int, str]) -> None:
        super().__init__(aspect, calls)
        self.aspect = aspect
        self.calls = calls

    def __str__(self) -> str:
        return f"the ranks do not agree on the {self.aspect}: {_by_rank(self.calls)}"


class CollectiveTimeoutError(ProcessGroupError, TimeoutError):
    """Ranks did not come to a collective in time; `configure` makes the group usable again.

    Attributes:
        seconds: how long the others waited.
        missing: the ranks that did not come.
        waiting: the calls in which each of the others waits, by rank.
    """

    def __init__(self, seconds: float, missing: Sequence[int], waiting: Mapping[int, Sequence[str]]) -> None:
        super().__init__()
        # As arguments of OSError they would be an errno and a file.
        self.args: tuple[Any, ...] = seconds, missing, waiting
        self.seconds = seconds
        self.missing: tuple[int, ...] = tuple(missing)
        self.waiting = waiting

    def __str__(self) -> str:
        absent = f"{_ranks(self.missing)} did not come" if self.missing else "who did not come is not known"
        return f"timed out after {self.seconds:g} s: {absent}; {_waiting(self.waiting)}"


class PeerLostError(ProcessGroupError):
    """Ranks for which others wait have left the group, or died; `configure` without them goes on.

    Attributes:
        lost: the ranks that are gone.
        waiting: the calls in which each of the others waits, by rank.
    """

    def __init__(self, lost: Sequence[int], waiting: Mapping[int, Sequence[str]]) -> None:
        super().__init__(lost, waiting)
        self.lost: tuple[int, ...] = tuple(lost)
        self.waiting = waiting

    def __str__(self) -> str:
        return f"{_ranks(self.lost)} closed the connection; {_waiting(self.waiting)}"


class SessionsTakenError(FaultToleranceError):
    """A parameter server has no session left for this client; it may have one later."""


class GangError(FaultToleranceError):
    """The members of a gang could not communicate; the cause says why."""


class StaleGangError(GangError):
    """A gang was used whose members have met anew since it was made; derive it again from its parent."""


class TopologyError(FaultToleranceError, ValueError):
    """The size of a gang does not factor as a topology requires; the text says which sizes would do."""


class OperationalError(FaultToleranceError):
    """The job cannot go on, and its own code is not why; the cause says what has failed."""


class InvalidOperationError(FaultToleranceError):
    """The operation was done already, or comes too late."""


class GroupCoordinatorError(FaultToleranceError):
    """The members of a coordinator could not communicate, or it is over; the cause says why."""


class StaleEpochError(GroupCoordinatorError):
    """An operation belongs to the former members of an elastic coordinator, which have changed since."""


class ChangeRolledBackError(GroupCoordinatorError):
    """A change of members failed, on all of them, and the members before it go on; the text says why."""


class ChangeInDoubtError(GroupCoordinatorError):
    """This member does not know whether a change succeeded: it has no members until the next change."""


class StillUnderWayError(GroupCoordinatorError, TimeoutError):
    """A wait for an asynchronous operation ended before the operation: wait again, or give the group up."""


class QueueError(FaultToleranceError):
    """A message queue cannot do what was asked of it."""


class QueueClosedError(QueueError):
    """The queue was shut down; a reader gets this once it has read everything that was written."""


class QueueWriterLostError(QueueError):
    """The writer died, or dropped this reader, without shutting the queue down: make a new queue."""


class QueueReadersLostError(QueueError):
    """Every reader of the queue is gone: no reader would get the message."""


class QueueCorruptError(QueueError):
    """The bytes in the queue are not those of its writer; this reader has left it."""


class QueueTimeoutError(QueueError, TimeoutError):
    """Nothing was written, or nothing read, in time; the call can be repeated, and nothing is lost.

    Attributes:
        seconds: how long the caller waited.
        ranks: the readers that it waited for; empty for a wait for the writer.
    """

    def __init__(self, seconds: float, what: str, ranks: Sequence[int] = ()) -> None:
        super().__init__()
        # As arguments of OSError they would be an errno and a file.
        self.args: tuple[Any, ...] = seconds, what, ranks
        self.seconds = seconds
        self.what = what
        self.ranks: tuple[int, ...] = tuple(ranks)

    def __str__(self) -> str:
        return f"timed out after {self.seconds:g} s: {self.what}"


class QueueMemoryError(QueueError, MemoryError):
    """The machine, this control group, or this process under its limits, does not have enough free memory.

    Attributes:
        needed, available: the needed and the available bytes.
    """

    def __init__(self, purpose: str, needed: int, available: int) -> None:
        super().__init__(purpose, needed, available)
        self.purpose = purpose
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        missing = max(self.needed - self.available, 0)
        lack = f"{missing} are missing" if missing else "this process may not take them (ulimit -v, -f)"
        return (
            f"{self.purpose} needs {self.needed} bytes of memory and {self.available} are available: {lack}. "
            "Free some, raise the limit, ask for less (max_chunks, max_chunk_bytes)"
        )


class QueueDescriptorsError(QueueError):
    """This process, or the machine, has no file descriptor left for the operation; nothing was written."""


class CheckpointError(FaultToleranceError):
    """State could not be sent or fetched; another source or a later quorum may succeed."""


class CheckpointTimeoutError(CheckpointError, TimeoutError):
    """The state did not arrive in time, or nothing of it for so long that its source counts as dead."""


class CheckpointFormatError(CheckpointError, ValueError):
    """The state is of a type that cannot be transferred, or what arrived is corrupt."""


class ForeignStateError(ForeignMemberError, CheckpointFormatError):
    """A peer's state is of another form than this replica's, or weighs too much to be such a state.

    No part of it was loaded.
    """


class PlainDataError(ValueError):
    """A value cannot be sent, or received bytes are no value; the text names the part and the cure."""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _by_rank(texts: Mapping[int, str]) -> str:
    """Describe texts by rank; ranks with the same text are listed together."""
    alike: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        alike.setdefault(text, []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in alike.items())


def _waiting(waiting: Mapping[int, Sequence[str]]) -> str:
    return f"waiting: {_by_rank({rank: ', '.join(texts) for rank, texts in waiting.items()}) or 'nobody'}"


OWN_FAILURE_MAX = 400  # characters of an error that go to the lighthouse
# Words in the errors of Gloo, NCCL, torch and its stores, all RuntimeErrors: where something took too long,
# where a call was wrong, which Gloo has found before it sent anything, where memory has run out, or where a
# peer or its host is why.
_TIMED_OUT = "timed out"
_OF_CALLS = ("cannot use reduceop",)
_OF_MEMORY = ("allocate memory", "out of memory")
_OF_PEERS = ("connect", "peer", "pipe", "socket", "remote", "store", _TIMED_OUT, "timeout")


def is_refusal(error: Exception) -> bool:
    """Return whether an error, perhaps one of a backend, says that a call was wrong, and changed nothing."""
    is_typed = isinstance(error, CollectiveRefusedError | NotImplementedError | TypeError | ValueError)
    return is_typed or any(word in str(error).lower() for word in _OF_CALLS)


def is_lack_of_memory(error: Exception) -> bool:
    """Return whether an error says that memory has run out, of the host or of a device."""
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in _OF_MEMORY)


def is_timeout(error: Exception) -> bool:
    """Return whether an error, perhaps one of a backend, says that something took too long."""
    return isinstance(error, TimeoutError) or _TIMED_OUT in str(error).lower()


def is_own_error(error: BaseException) -> bool:
    """Return whether an error comes from this process, its device or its host alone, and is not what the end
    or the silence of a peer looks like from here.

    A rank that has errors of its own, again and again, is left out of quorums for a while, so that the others
    can go on (`lighthouse/core/left_out.py`). An error that is taken for the rank's own, and is not, costs
    that rank a second. One that is, and is not taken for it, costs the others their steps for as long as it
    lasts.
    """
    if isinstance(error, SubprocessLostError):  # this rank's subprocess
        return True
    if isinstance(error, FaultToleranceError | ConnectionError | TimeoutError):
        return error.__cause__ is not None and is_own_error(error.__cause__)
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        return not any(word in text for word in _OF_PEERS)
    return True


def lost_by(error: BaseException, what: str) -> Exception:
    """Return the error with which a step is lost whose part `what` ended with this one. KeyboardInterrupt and
    SystemExit are for the script, and not for the threads that wait for the step.
    """
    return error if isinstance(error, Exception) else StepLostError(f"{what} was interrupted: {error!r}")


def describe_own_error(error: BaseException) -> str:
    """Return an error in words, as it goes to the lighthouse."""
    return f"{type(error).__name__}: {error}"[:OWN_FAILURE_MAX]
