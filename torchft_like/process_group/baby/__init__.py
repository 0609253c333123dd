"""Process groups whose backend runs in a subprocess that can be killed.

`backend` is the parent's side and `child` the subprocess's; tensors pass as shared memory (`cpu_sharing`,
`cuda_exporter`, `cuda_importer`), requests over one socket (`channel`). Nothing here knows the Manager.
"""

from torchft_like.process_group.baby.group import (
    ProcessGroupBaby,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
)

__all__ = ["ProcessGroupBaby", "ProcessGroupBabyGloo", "ProcessGroupBabyNCCL"]
