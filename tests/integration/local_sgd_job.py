"""A rank that trains with DiLoCo, and records each sync that it has carried out.

python -m tests.integration.local_sgd_job NAME FRAGMENTS DELAY ALPHA FORMAT [FAULT ...]
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from torchft_like import Manager, ProcessGroupGloo
from torchft_like.local_sgd import DiLoCo
from torchft_like.testing.faults import Faults
from torchft_like.testing.journal import Journal
from torchft_like.testing.training import digest_of, prepare_process, seed_of, tensors_in

SYNC_EVERY = 8


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

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=name,
    )
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
            visit("step" if diloco._schedule.under_way is None else "backward")
            inputs = torch.randn(16, 8, generator=generator)
            inner.zero_grad()
            nn.functional.mse_loss(net(inputs), inputs.flip(1)).backward()  # type: ignore[no-untyped-call]
            time.sleep(0.005)
            before = manager.current_step()
            inner.step()
            if manager.current_step() != before:
                shared = [t for fragment in diloco._fragments for t in tensors_in(fragment.state_dict())]
                journal.write(
                    "sync",
                    step=manager.current_step(),
                    quorum_id=manager.quorum_id,
                    participants=manager.num_participants(),
                    digest=digest_of(shared),
                )


if __name__ == "__main__":
    main()
