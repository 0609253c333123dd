"""Replica groups and spares as Ray tasks: where a rank dies a spare takes its place, and no other rank ends.

    python examples/launchers/ray_ranks.py --groups 2 --ranks 2 --spares 1 examples/train_hsdp.py --steps 1000

Each rank is a task, which runs the script in a process of its own. Ray does not try it again (max_retries=0),
and does not end the others: of the groups it knows only where to place them. Ray Train, which knows more,
starts all workers of a replica group again when one has failed.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torchft_like import LighthouseServer


@ray.remote(max_retries=0)  # type: ignore[untyped-decorator]
def run(script: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a script in a process of its own; return its exit status."""
    return subprocess.call([sys.executable, *script], env={**os.environ, **variables})


@ray.remote(max_retries=0)  # type: ignore[untyped-decorator]
def free_address() -> tuple[str, int]:
    """Return this host and a port of it that is free now."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        return ray.util.get_node_ip_address(), taken.getsockname()[1]


def main() -> int:
    """Return 0 if a rank of each group has returned 0: it does that only together with all others."""
    options = parse_args()
    ray.init(ignore_reinit_error=True)
    lighthouse = LighthouseServer(
        bind=f"{ray.util.get_node_ip_address()}:0", min_replicas=1, join_timeout_ms=10_000
    )
    of_job = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "NUM_REPLICA_GROUPS": str(options.groups)}
    needs = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    try:
        spares = [
            run.options(**needs).remote(options.script, {**of_job, "TORCHFT_SPARE": "rank"})
            for _ in range(options.spares)
        ]
        groups = [
            start_group(options, needs, {**of_job, "REPLICA_GROUP_ID": str(number)})
            for number in range(options.groups)
        ]
        statuses = [ray.get(ranks) for ranks in groups]
        for spare in spares:
            ray.cancel(spare, force=True)
    finally:
        lighthouse.shutdown()
    print(f"exit status by rank of each group: {statuses}", flush=True)
    return 0 if all(0 in of_group for of_group in statuses) else 1


def start_group(
    options: argparse.Namespace, needs: Mapping[str, float], variables: Mapping[str, str]
) -> list[ray.ObjectRef]:
    """Start the ranks of a replica group, as near to each other as there is room."""
    room = {"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})}
    place = placement_group([room] * options.ranks, strategy="PACK")
    host, port = ray.get(
        free_address.options(num_cpus=options.cpus, scheduling_strategy=on(place, 0)).remote()
    )
    store = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(options.ranks)}
    return [
        run.options(**needs, scheduling_strategy=on(place, rank)).remote(
            options.script, {**variables, **store, "RANK": str(rank)}
        )
        for rank in range(options.ranks)
    ]


def on(place: PlacementGroup, rank: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=rank)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run a script as replica groups and spares of a Ray cluster.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--groups", type=int, default=2, help="replica groups")
    parser.add_argument("--ranks", type=int, default=2, help="of each replica group")
    parser.add_argument("--spares", type=int, default=1, help="processes that wait for a place")
    parser.add_argument("--cpus", type=float, default=1, help="of each rank")
    parser.add_argument("--gpus", type=float, default=0, help="of each rank")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the ranks' script, and its arguments")
    options = parser.parse_args()
    if not options.script or min(options.groups, options.ranks) < 1:
        parser.error("a script, and --groups and --ranks of 1 or more, are needed")
    return options


if __name__ == "__main__":
    sys.exit(main())
