"""Fault-tolerant, reconfigurable process groups for PyTorch, and the Manager that keeps them together.

Modules that load torch or gRPC are loaded when they are first used: commands answer `--help` at once, and a
program that uses only process groups does not pay for gRPC, nor does the subprocess of a Baby group.
"""

import importlib
from typing import TYPE_CHECKING

from torchft_like._installation import __version__ as __version__
from torchft_like.backends import register_with_torch
from torchft_like.shutdown_signals import stop_on_signals as stop_on_signals

if TYPE_CHECKING:
    from torchft_like.coordination import LighthouseClient as LighthouseClient
    from torchft_like.coordination import LighthouseServer as LighthouseServer
    from torchft_like.coordination import ManagerClient as ManagerClient
    from torchft_like.coordination import ManagerServer as ManagerServer
    from torchft_like.data import DistributedSampler as DistributedSampler
    from torchft_like.data import GlobalBatches as GlobalBatches
    from torchft_like.data import GlobalBatchLoader as GlobalBatchLoader
    from torchft_like.ddp import DistributedDataParallel as DistributedDataParallel
    from torchft_like.ddp import PureDistributedDataParallel as PureDistributedDataParallel
    from torchft_like.errors import AddressError as AddressError
    from torchft_like.errors import BindError as BindError
    from torchft_like.errors import CheckpointError as CheckpointError
    from torchft_like.errors import CheckpointFormatError as CheckpointFormatError
    from torchft_like.errors import ConfigError as ConfigError
    from torchft_like.errors import ConnectError as ConnectError
    from torchft_like.errors import CoordinationError as CoordinationError
    from torchft_like.errors import DivergenceError as DivergenceError
    from torchft_like.errors import FaultToleranceError as FaultToleranceError
    from torchft_like.errors import GroupLostError as GroupLostError
    from torchft_like.errors import HealthCheckError as HealthCheckError
    from torchft_like.errors import MaxRetriesError as MaxRetriesError
    from torchft_like.errors import MemberLostError as MemberLostError
    from torchft_like.errors import NotSupportedError as NotSupportedError
    from torchft_like.errors import ProcessGroupAbortedError as ProcessGroupAbortedError
    from torchft_like.errors import ProcessGroupError as ProcessGroupError
    from torchft_like.errors import ProcessGroupNotConfiguredError as ProcessGroupNotConfiguredError
    from torchft_like.errors import QuorumTimeoutError as QuorumTimeoutError
    from torchft_like.errors import ShutdownError as ShutdownError
    from torchft_like.errors import StepLostError as StepLostError
    from torchft_like.errors import SubprocessLostError as SubprocessLostError
    from torchft_like.in_process import Restart as Restart
    from torchft_like.in_process import restartable as restartable
    from torchft_like.local_sgd import DiLoCo as DiLoCo
    from torchft_like.local_sgd import LocalSGD as LocalSGD
    from torchft_like.manager import Manager as Manager
    from torchft_like.manager import WorldSizeMode as WorldSizeMode
    from torchft_like.optim import OptimizerWrapper as OptimizerWrapper
    from torchft_like.process_group import (
        ErrorSwallowingProcessGroupWrapper as ErrorSwallowingProcessGroupWrapper,
    )
    from torchft_like.process_group import FaultInjectingProcessGroup as FaultInjectingProcessGroup
    from torchft_like.process_group import ManagedProcessGroup as ManagedProcessGroup
    from torchft_like.process_group import ProcessGroup as ProcessGroup
    from torchft_like.process_group import ProcessGroupBaby as ProcessGroupBaby
    from torchft_like.process_group import ProcessGroupBabyGloo as ProcessGroupBabyGloo
    from torchft_like.process_group import ProcessGroupBabyNCCL as ProcessGroupBabyNCCL
    from torchft_like.process_group import ProcessGroupBabyXCCL as ProcessGroupBabyXCCL
    from torchft_like.process_group import ProcessGroupDummy as ProcessGroupDummy
    from torchft_like.process_group import ProcessGroupGloo as ProcessGroupGloo
    from torchft_like.process_group import ProcessGroupNCCL as ProcessGroupNCCL
    from torchft_like.process_group import ProcessGroupWrapper as ProcessGroupWrapper
    from torchft_like.process_group import ProcessGroupXCCL as ProcessGroupXCCL

    Optimizer = OptimizerWrapper

# By module: its names, which are loaded with it.
_NAMES = {
    "coordination": "LighthouseClient LighthouseServer ManagerClient ManagerServer",
    "data": "DistributedSampler GlobalBatches GlobalBatchLoader",
    "ddp": "DistributedDataParallel PureDistributedDataParallel",
    "errors": (
        "AddressError BindError CheckpointError CheckpointFormatError ConfigError ConnectError "
        "CoordinationError DivergenceError FaultToleranceError GroupLostError HealthCheckError "
        "MaxRetriesError MemberLostError NotSupportedError ProcessGroupAbortedError ProcessGroupError "
        "ProcessGroupNotConfiguredError QuorumTimeoutError ShutdownError StepLostError "
        "SubprocessLostError"
    ),
    "in_process": "Restart restartable",
    "local_sgd": "DiLoCo LocalSGD",
    "manager": "Manager WorldSizeMode",
    "optim": "OptimizerWrapper",
    "process_group": (
        "ErrorSwallowingProcessGroupWrapper FaultInjectingProcessGroup ManagedProcessGroup ProcessGroup "
        "ProcessGroupBaby ProcessGroupBabyGloo ProcessGroupBabyNCCL ProcessGroupBabyXCCL "
        "ProcessGroupDummy ProcessGroupGloo ProcessGroupNCCL ProcessGroupWrapper ProcessGroupXCCL"
    ),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_ALIASES = {"Optimizer": "OptimizerWrapper"}

if not TYPE_CHECKING:  # a checker would see two names of the list, and take any other for an object
    __all__ = ["__version__", "stop_on_signals", *_HOME, *_ALIASES]  # noqa: PLE0604 - they are strings

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
