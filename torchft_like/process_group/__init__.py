"""Process groups whose members can change, and which can be aborted at any moment.

Every class is made from one table of collectives (`collectives`) and belongs to one configuration at a time
(`configuration`); `gloo`, `nccl` and `baby` are backends, `wrapper` and `swallowing` go around
them. Nothing here knows a quorum or a lighthouse.
"""

from torchft_like.process_group.baby.group import (
    ProcessGroupBaby,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupBabyXCCL,
    ProcessGroupXCCL,
)
from torchft_like.process_group.base import ProcessGroup
from torchft_like.process_group.buckets import adopt_reducers
from torchft_like.process_group.gloo import ProcessGroupGloo
from torchft_like.process_group.handles import ReconfigureOptions, reconfigure_with_store
from torchft_like.process_group.mesh import ManagedDeviceMesh, extend_device_mesh, ft_init_device_mesh
from torchft_like.process_group.nccl import (
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR,
    TORCHFT_TRIGGER_FR_ON_ABORT,
    ProcessGroupNCCL,
    trigger_nccl_fr_trace_through_pipe,
)
from torchft_like.process_group.store import create_store_client
from torchft_like.process_group.swallowing import ErrorSwallowingProcessGroupWrapper, ManagedProcessGroup
from torchft_like.process_group.torch_interface import adopt_functions
from torchft_like.process_group.wrapper import (
    FakeProcessGroupWrapper,
    FaultInjectingProcessGroup,
    ProcessGroupDummy,
    ProcessGroupWrapper,
)

__all__ = [
    "TORCHFT_TRIGGER_FR_ON_ABORT",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "FaultInjectingProcessGroup",
    "ManagedDeviceMesh",
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
    "ReconfigureOptions",
    "create_store_client",
    "extend_device_mesh",
    "ft_init_device_mesh",
    "reconfigure_with_store",
    "trigger_nccl_fr_trace_through_pipe",
]

adopt_functions()  # torch's functions would not know our groups otherwise
adopt_reducers()
