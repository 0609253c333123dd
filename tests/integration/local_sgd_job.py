"""A rank that trains with DiLoCo, and records each sync that it has carried out.

python -m tests.integration.local_sgd_job NAME FRAGMENTS DELAY ALPHA FORMAT [FAULT ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch import nn

from torchft_like import Manager, ProcessGroupGloo
from torchft_like.digest import state_digest
from torchft_like.local_sgd import DiLoCo
from torchft_like.testing.faults import Faults
from torchft_like.testing.journal import Journal
from torchft_like.testing.relay import at
from torchft_like.testing.training import RelayedTransport, prepare_process, seed_of

SYNC_EVERY = 8
STRUCK_AT_BYTES = 2000  # within the answer that has the state


def main() -> None:
    prepare_process()
    name, fragments, delay, alpha, quantize_to, *faults = sys.argv[1:]
    journal = Journal.of_this_process()
    visit = Faults(faults, journal).visit
    torch.manual_seed(seed_of(name, "parameters"))
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(int(fragments))))
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    outers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(layer.parameters(), lr=0.7, momentum=0.9, nesterov=True) for layer in net
    ]

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["inner"])

    limit = timedelta(seconds=120)

    def visit_heal(data: bytes) -> bytes:
        visit("heal")
        return data

    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=name,
        checkpoint_transport=RelayedTransport(
            lambda: at(STRUCK_AT_BYTES, visit_heal), timedelta(seconds=120)
        ),
    )
    manager.allreduce = _and_then(manager.allreduce, lambda: visit("sum"))
    manager.should_commit = _after(lambda: visit("vote"), manager.should_commit)
    diloco = DiLoCo(
        manager,
        list(net),
        inner,
        outers,
        sync_every=SYNC_EVERY,
        should_quantize=quantize_to,
        fragment_sync_delay=int(delay),
        fragment_update_alpha=float(alpha),
    )
    generator = torch.Generator().manual_seed(seed_of(name, "data"))
    with manager, diloco:
        while True:
            # "backward" is between the begin and the end of a sync, "step" between two syncs.
            visit("backward" if diloco.is_syncing else "step")
            inputs = torch.randn(16, 8, generator=generator)
            inner.zero_grad()
            nn.functional.mse_loss(net(inputs), inputs.flip(1)).backward()  # type: ignore[no-untyped-call]
            time.sleep(0.005)
            before = manager.current_step()
            inner.step()
            if manager.current_step() != before:
                journal.write(
                    "sync",
                    step=manager.current_step(),
                    quorum_id=manager.quorum_id,
                    participants=manager.num_participants(),
                    digest=state_digest({"fragments": diloco.global_states()}),
                )


def _and_then(method: Callable[..., Any], visit: Callable[[], None]) -> Callable[..., Any]:
    @wraps(method)
    def call_and_visit(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        visit()
        return result

    return call_and_visit


def _after(visit: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def visit_and_call(*arguments: Any, **named: Any) -> Any:
        visit()
        return method(*arguments, **named)

    return visit_and_call


if __name__ == "__main__":
    main()
