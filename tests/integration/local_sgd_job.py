"""A rank that trains with DiLoCo; faults strike between and within its syncs.

python -m tests.integration.local_sgd_job NAME INDEX FRAGMENTS DELAY ALPHA FORMAT [FAULT ...]
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch

from tests.managers import manager_alone
from torchft_like.testing.faults import Faults
from torchft_like.testing.journal import Journal
from torchft_like.testing.training import LocalModel, RelayedTransport, SyncLoop, prepare_process

STRUCK_AT_BYTES = 2000  # within the answer that has the state
LIMIT = timedelta(seconds=120)


def main() -> None:
    prepare_process()
    name, index, fragments, delay, alpha, quantize_to, *faults = sys.argv[1:]
    journal = Journal.of_this_process()
    planned = Faults(faults, journal)
    visit = planned.visit
    sync: dict[str, Any] = {"fragment_sync_delay": int(delay), "fragment_update_alpha": float(alpha)}
    model = LocalModel(name, 0, fragments=int(fragments), should_quantize=quantize_to, **sync)
    transport = RelayedTransport(planned.in_answers(STRUCK_AT_BYTES), LIMIT)
    how: dict[str, Any] = {"use_async_quorum": False, "init_sync": True, "checkpoint_transport": transport}
    manager: Any = manager_alone(name, model=model, **how)
    allreduce, should_commit = manager.allreduce, manager.should_commit

    def reduce_and_visit(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        work = allreduce(tensor, *arguments, **named)
        if tensor.dtype != torch.float64:  # as the witness's ledger is
            visit("sum")
        return work

    def visit_and_vote(*arguments: Any, **named: Any) -> Any:
        visit("vote")
        return should_commit(*arguments, **named)

    def visit_inner_step(_: str) -> None:
        """Visit "backward" between the begin and the end of a sync, "step" between two syncs."""
        visit("backward" if model.diloco.is_syncing else "step")

    manager.allreduce, manager.should_commit = reduce_and_visit, visit_and_vote
    loop = SyncLoop(model, manager, journal, int(index), 0.005, visit_inner_step)
    while True:
        loop.attempt_step()


if __name__ == "__main__":
    main()
