"""Fault-tolerant, reconfigurable process groups for PyTorch, and the Manager that keeps them together.

Modules that load torch or gRPC are loaded when they are first used: commands answer `--help` at once, and a
program that uses only process groups does not pay for gRPC, nor does the subprocess of a Baby group.
"""

import importlib
from typing import TYPE_CHECKING

from torchft_like._installation import __version__
from torchft_like.backends import register_with_torch
from torchft_like.errors import (
    AddressError,
    BindError,
    CheckpointError,
    CheckpointFormatError,
    ConfigError,
    ConnectError,
    CoordinationError,
    DivergenceError,
    FaultToleranceError,
    GroupLostError,
    HealthCheckError,
    MaxRetriesError,
    MemberLostError,
    NotSupportedError,
    ProcessGroupAbortedError,
    ProcessGroupError,
    ProcessGroupNotConfiguredError,
    QuorumTimeoutError,
    ShutdownError,
    StepLostError,
    SubprocessLostError,
)
from torchft_like.shutdown_signals import stop_on_signals

if TYPE_CHECKING:
    from torchft_like.coordination import LighthouseClient, LighthouseServer, ManagerClient, ManagerServer
    from torchft_like.data import DistributedSampler, GlobalBatches, GlobalBatchLoader
    from torchft_like.ddp import DistributedDataParallel, PureDistributedDataParallel
    from torchft_like.in_process import Restart, restartable
    from torchft_like.manager import Manager, WorldSizeMode
    from torchft_like.optim import OptimizerWrapper
    from torchft_like.optim import OptimizerWrapper as Optimizer
    from torchft_like.process_group import (
        ErrorSwallowingProcessGroupWrapper,
        FaultInjectingProcessGroup,
        ManagedProcessGroup,
        ProcessGroup,
        ProcessGroupBaby,
        ProcessGroupBabyGloo,
        ProcessGroupBabyNCCL,
        ProcessGroupBabyXCCL,
        ProcessGroupDummy,
        ProcessGroupGloo,
        ProcessGroupNCCL,
        ProcessGroupWrapper,
        ProcessGroupXCCL,
    )

_NAMES = {
    "coordination": ("LighthouseClient", "LighthouseServer", "ManagerClient", "ManagerServer"),
    "data": ("DistributedSampler", "GlobalBatches", "GlobalBatchLoader"),
    "ddp": ("DistributedDataParallel", "PureDistributedDataParallel"),
    "in_process": ("Restart", "restartable"),
    "manager": ("Manager", "WorldSizeMode"),
    "optim": ("OptimizerWrapper",),
    "process_group": (
        "ErrorSwallowingProcessGroupWrapper",
        "FaultInjectingProcessGroup",
        "ManagedProcessGroup",
        "ProcessGroup",
        "ProcessGroupBaby",
        "ProcessGroupBabyGloo",
        "ProcessGroupBabyNCCL",
        "ProcessGroupBabyXCCL",
        "ProcessGroupDummy",
        "ProcessGroupGloo",
        "ProcessGroupNCCL",
        "ProcessGroupWrapper",
        "ProcessGroupXCCL",
    ),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_ALIASES = {"Optimizer": "OptimizerWrapper"}

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
    "DivergenceError",
    "ErrorSwallowingProcessGroupWrapper",
    "FaultInjectingProcessGroup",
    "FaultToleranceError",
    "GlobalBatchLoader",
    "GlobalBatches",
    "GroupLostError",
    "HealthCheckError",
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
    "ProcessGroupBaby",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupDummy",
    "ProcessGroupError",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupNotConfiguredError",
    "ProcessGroupWrapper",
    "ProcessGroupXCCL",
    "PureDistributedDataParallel",
    "QuorumTimeoutError",
    "Restart",
    "ShutdownError",
    "StepLostError",
    "SubprocessLostError",
    "WorldSizeMode",
    "__version__",
    "restartable",
    "stop_on_signals",
]


def __getattr__(name: str) -> object:
    if name in _NAMES:
        return importlib.import_module(f"{__name__}.{name}")
    name = _ALIASES.get(name, name)
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_NAMES})


register_with_torch()
