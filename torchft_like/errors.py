"""The errors of the runtime: what happened, whose fault it is, what to do.

Bad arguments are ValueError (or a subclass below that is one); everything about the job's state
derives from `FaultToleranceError`.
"""

from __future__ import annotations

from lighthouse.errors import AddressError, BindError, ConfigError, CoordinationError

__all__ = [
    "AddressError",
    "BindError",
    "CheckpointError",
    "CheckpointFormatError",
    "ConfigError",
    "ConnectError",
    "CoordinationError",
    "FaultToleranceError",
    "GroupLostError",
    "MaxRetriesError",
    "MemberLostError",
    "NotSupportedError",
    "ProcessGroupAbortedError",
    "ProcessGroupError",
    "ProcessGroupNotConfiguredError",
    "QuorumTimeoutError",
    "ShutdownError",
]


class FaultToleranceError(RuntimeError):
    """Base of every error that the runtime raises about the state of the job."""


class ConnectError(FaultToleranceError, ConnectionError):
    """A service could not be reached within `connect_timeout`; names the address and what to check."""


class QuorumTimeoutError(FaultToleranceError, TimeoutError):
    """No quorum within `quorum_timeout`; says who was missing or that the lighthouse was away."""


class GroupLostError(FaultToleranceError):
    """Another rank of this replica group is gone: restart the whole group."""


class MemberLostError(FaultToleranceError):
    """A member of the quorum died or fell silent; the step is tried again without it."""


class MaxRetriesError(FaultToleranceError):
    """More consecutive steps failed to commit than `max_retries` allows."""


class NotSupportedError(FaultToleranceError, NotImplementedError):
    """The operation is not available here; says what to use instead."""


class ShutdownError(FaultToleranceError):
    """The Manager was used after `shutdown`."""


class ProcessGroupError(FaultToleranceError):
    """A process group cannot do what was asked of it."""


class ProcessGroupNotConfiguredError(ProcessGroupError):
    """A collective was called before the first `configure`."""


class ProcessGroupAbortedError(ProcessGroupError):
    """The group was aborted; `configure` makes it usable again."""


class CheckpointError(FaultToleranceError):
    """State could not be sent or fetched; another source or a later quorum may succeed."""


class CheckpointFormatError(CheckpointError, ValueError):
    """State is of a type that cannot be transferred, or what arrived is corrupt."""
