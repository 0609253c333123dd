"""Fault-tolerant, reconfigurable process groups for PyTorch, and the Manager that keeps them together."""

from torchft_like.coordination import LighthouseClient, LighthouseServer, ManagerClient, ManagerServer
from torchft_like.data import DistributedSampler
from torchft_like.ddp import DistributedDataParallel, PureDistributedDataParallel
from torchft_like.errors import (
    AddressError,
    BindError,
    CheckpointError,
    CheckpointFormatError,
    ConfigError,
    ConnectError,
    CoordinationError,
    FaultToleranceError,
    GroupLostError,
    MaxRetriesError,
    MemberLostError,
    NotSupportedError,
    ProcessGroupAbortedError,
    ProcessGroupError,
    ProcessGroupNotConfiguredError,
    QuorumTimeoutError,
    ShutdownError,
)
from torchft_like.manager import Manager, WorldSizeMode
from torchft_like.optim import OptimizerWrapper
from torchft_like.optim import OptimizerWrapper as Optimizer
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FaultInjectingProcessGroup,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)
from torchft_like.shutdown_signals import stop_on_signals

__all__ = [
    "AddressError",
    "BindError",
    "CheckpointError",
    "CheckpointFormatError",
    "ConfigError",
    "ConnectError",
    "CoordinationError",
    "DistributedDataParallel",
    "DistributedSampler",
    "ErrorSwallowingProcessGroupWrapper",
    "FaultInjectingProcessGroup",
    "FaultToleranceError",
    "GroupLostError",
    "LighthouseClient",
    "LighthouseServer",
    "ManagedProcessGroup",
    "Manager",
    "ManagerClient",
    "ManagerServer",
    "MaxRetriesError",
    "MemberLostError",
    "NotSupportedError",
    "Optimizer",
    "OptimizerWrapper",
    "ProcessGroup",
    "ProcessGroupAbortedError",
    "ProcessGroupDummy",
    "ProcessGroupError",
    "ProcessGroupGloo",
    "ProcessGroupNotConfiguredError",
    "ProcessGroupWrapper",
    "PureDistributedDataParallel",
    "QuorumTimeoutError",
    "ShutdownError",
    "WorldSizeMode",
    "stop_on_signals",
]
