"""Gangs, with fairseq2's names: synchronous collectives over a set of processes, real or simulated.

They are a face of `communicator`, which moves the data; `gangs` says which rank is in which gang. Only
`managed` knows a Manager.
"""

from torchft_like.errors import GangError, StaleGangError, TopologyError
from torchft_like.gang.base import (
    Gang,
    ReduceOperation,
    all_sum,
    broadcast_flag,
    raise_operational_gang_error,
)
from torchft_like.gang.fake import FakeGang
from torchft_like.gang.gangs import (
    GangContext,
    Gangs,
    create_fake_gangs,
    create_fsdp_gangs,
    create_parallel_gangs,
    get_current_gangs,
    get_default_gangs,
    maybe_get_current_gangs,
    set_default_gangs,
    set_gangs,
)
from torchft_like.gang.group_gang import ProcessGroupGang
from torchft_like.gang.managed import ElasticGangs, ManagedGang

__all__ = [
    "ElasticGangs",
    "FakeGang",
    "Gang",
    "GangContext",
    "GangError",
    "Gangs",
    "ManagedGang",
    "ProcessGroupGang",
    "ReduceOperation",
    "StaleGangError",
    "TopologyError",
    "all_sum",
    "broadcast_flag",
    "create_fake_gangs",
    "create_fsdp_gangs",
    "create_parallel_gangs",
    "get_current_gangs",
    "get_default_gangs",
    "maybe_get_current_gangs",
    "raise_operational_gang_error",
    "set_default_gangs",
    "set_gangs",
]
