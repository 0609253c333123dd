"""A replica that trains with DiLoCo of torchft or torchft_like, for `local_steps`.

It runs as a script in either package's environment. Its one command, {"do": "take", "steps": n, "beside": b},
is answered with the seconds of n inner steps within
DiLoCo's `with` block, and the number of committed syncs. With "beside" it has those of as many steps outside
of the block, too, which take turns with the others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from benchmarks.commands import serve
from benchmarks.group_store import serve_store

LAYERS, BATCH_ROWS = 8, 32


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU()) for _ in range(LAYERS)))
    size = LAYERS // args.fragments
    fragments: list[nn.Module] = [net[n * size : (n + 1) * size] for n in range(args.fragments)]
    inner = torch.optim.AdamW(net.parameters(), lr=1e-4)
    outers = [torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments]

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["inner"])

    with manager_of(args, load, lambda: {"net": net.state_dict(), "inner": inner.state_dict()}) as manager:
        local_sgd = importlib.import_module(f"{args.package}.local_sgd")
        diloco = local_sgd.DiLoCo(
            manager,
            fragments,
            inner,
            outers,
            sync_every=args.sync_every,
            use_bucketization=True,
            fragment_sync_delay=args.delay,
        )
        inputs = torch.randn(BATCH_ROWS, args.width)

        def step() -> float:
            began = time.perf_counter()
            inner.zero_grad()
            nn.functional.mse_loss(net(inputs), inputs).backward()  # type: ignore[no-untyped-call]
            inner.step()
            return time.perf_counter() - began

        class Replica:
            """Carries out the commands of the parent."""

            def take(self, steps: int, beside: bool) -> dict[str, Any]:
                seconds, outside = [], []
                for _ in range(steps):
                    if beside:
                        outside.append(step())
                    with diloco:
                        seconds.append(step())
                return {"seconds": seconds, "outside": outside, "syncs": manager.current_step()}

        serve(Replica())


@contextlib.contextmanager
def manager_of(args: argparse.Namespace, load: Any, save: Any) -> Any:
    package = importlib.import_module(args.package)
    groups = importlib.import_module(f"{args.package}.process_group")
    limit = timedelta(seconds=60)
    store = serve_store()
    manager = package.Manager(
        pg=groups.ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=args.replicas,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=f"replica-{args.rank}",
        hostname="127.0.0.1",
    )
    try:
        yield manager
    finally:
        manager.shutdown(wait=False)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", choices=["torchft", "torchft_like"], required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--width", type=int, default=1024, help="of the layers")
    parser.add_argument("--sync-every", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
