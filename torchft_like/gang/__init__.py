"""Gangs, with fairseq2's names: synchronous collectives over a set of processes, real or simulated.

They are a face of `communicator`, which moves the data; `gangs` says who is in which gang. Only `managed`
knows a Manager.
"""

from torchft_like.errors import GangError as GangError
from torchft_like.errors import StaleGangError as StaleGangError
from torchft_like.errors import TopologyError as TopologyError
from torchft_like.gang.arguments import ReduceOperation as ReduceOperation
from torchft_like.gang.base import (
    Gang as Gang,
)
from torchft_like.gang.base import (
    all_sum as all_sum,
)
from torchft_like.gang.base import (
    broadcast_flag as broadcast_flag,
)
from torchft_like.gang.base import (
    raise_operational_gang_error as raise_operational_gang_error,
)
from torchft_like.gang.fake import FakeGang as FakeGang
from torchft_like.gang.gangs import (
    GangContext as GangContext,
)
from torchft_like.gang.gangs import (
    Gangs as Gangs,
)
from torchft_like.gang.gangs import (
    create_fake_gangs as create_fake_gangs,
)
from torchft_like.gang.gangs import (
    create_fsdp_gangs as create_fsdp_gangs,
)
from torchft_like.gang.gangs import (
    create_parallel_gangs as create_parallel_gangs,
)
from torchft_like.gang.gangs import (
    get_current_gangs as get_current_gangs,
)
from torchft_like.gang.gangs import (
    get_default_gangs as get_default_gangs,
)
from torchft_like.gang.gangs import (
    maybe_get_current_gangs as maybe_get_current_gangs,
)
from torchft_like.gang.gangs import (
    set_default_gangs as set_default_gangs,
)
from torchft_like.gang.gangs import (
    set_gangs as set_gangs,
)
from torchft_like.gang.group_gang import ProcessGroupGang as ProcessGroupGang
from torchft_like.gang.managed import ElasticGangs as ElasticGangs
from torchft_like.gang.managed import ManagedGang as ManagedGang
