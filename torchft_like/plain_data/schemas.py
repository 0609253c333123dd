"""The schemas of coordinators, gangs, queues, Baby groups and checkpoint transports: types and limits, as
data.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from torchft_like.plain_data import schema as wire
from torchft_like.plain_data import writing
from torchft_like.plain_data.schema import (
    Limits,
    Schema,
    Shard,
)
from torchft_like.plain_data.writing import Writer

SIMPLE: Mapping[type, Writer] = {
    type(None): writing.write_none,
    bool: writing.write_bool,
    int: writing.write_int,
    float: writing.write_float,
    str: writing.write_str,
    bytes: writing.write_bytes,
    list: writing.write_items,
    tuple: writing.write_items,
    dict: writing.write_dict,
}
_WITH_LEAVES: Mapping[type, Writer] = {
    **SIMPLE,
    Tensor: writing.write_tensor,
    torch.nn.Parameter: writing.write_tensor,
    np.ndarray: writing.write_array,
}

# The calls that Baby groups send to their subprocess: everything is in the structure.
CALLS = Schema(
    writers=SIMPLE,
    other=writing.refuse,
    keys=wire.PLAIN_KEYS,
    tags_end=wire.LEAF_STR,
    allowed="None, bool, int, float, str, bytes, list, tuple, dict",
    inline_bytes_max=wire.STRUCTURE_BYTES_MAX,
)

# The messages of coordinators, gangs and message queues.
MESSAGES = Schema(
    writers=_WITH_LEAVES,
    other=writing.refuse,
    keys=wire.PLAIN_KEYS | {bytes, tuple},
    tags_end=wire.SAME_TENSOR,
    allowed=wire.ALLOWED,
    keeps_devices=True,
)

# The state of a training script; `checkpointing` adds DTensors, which are written as shards.
STATES = Schema(
    writers={
        **_WITH_LEAVES,
        complex: writing.write_complex,
        OrderedDict: writing.write_ordered_dict,
        Counter: writing.write_counter,
        torch.Size: writing.write_size,
        torch.dtype: writing.write_dtype,
        torch.device: writing.write_device,
        Shard: writing.write_shard,
    },
    other=writing.write_other_state,
    keys=wire.PLAIN_KEYS | {tuple},
    tags_end=wire.TAGS_END,
    allowed=(
        "None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, Counter, torch.Size, "
        "torch.dtype, torch.device, plain dense tensors, DTensors, numpy arrays and scalars of numbers"
    ),
    root="the state",
    limits=Limits(values=4_000_000, leaves=1_000_000, leaf_bytes=2**62),
    joins_views=True,
)
