"""The rank's side of fault tolerance: the public Manager, its quorum worker, healing and reductions.

`core.step` decides what a step may do; the modules here act. They must not know how the ManagerServer speaks
to the lighthouse, only the line from a rank to its server (`manager_server.rank_link`).
"""

from torchft_like.core.catch_up import Replay
from torchft_like.core.step import WorldSizeMode
from torchft_like.manager.config import (
    CONNECT_TIMEOUT_SEC_ENV,
    MANAGER_PORT_ENV,
    QUORUM_RETRIES_ENV,
    QUORUM_TIMEOUT_SEC_ENV,
    TIMEOUT_SEC_ENV,
    get_timeout,
)
from torchft_like.manager.manager import ExceptionWithTraceback, Manager
from torchft_like.process_group.nccl import TORCH_FR_DUMP_TEMP_FILE_ENV

__all__ = [
    "CONNECT_TIMEOUT_SEC_ENV",
    "MANAGER_PORT_ENV",
    "QUORUM_RETRIES_ENV",
    "QUORUM_TIMEOUT_SEC_ENV",
    "TIMEOUT_SEC_ENV",
    "TORCH_FR_DUMP_TEMP_FILE_ENV",
    "ExceptionWithTraceback",
    "Manager",
    "Replay",
    "WorldSizeMode",
    "get_timeout",
]
