"""What a group coordinator adds to its process group: dicts beside one tensor, uneven sizes beside even ones.

All contestants of a case live in the same processes and take turns, round after round, so that whatever
else this machine does hits all of them alike; ratios are taken within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from benchmarks.group_store import serve_store
from benchmarks.report import Bar, Result
from torchft_like.group_coordinator import GroupCoordinator
from torchft_like.process_group import ProcessGroupGloo
from torchft_like.testing.ranks import running

RANKS = (2, 4)
TIMEOUT_S = 120.0
REPLY_SECONDS_MAX = 300.0
DICT_BYTES, DICT_TENSORS = 64 << 20, 20
ROWS, COLUMNS = 4096, 1024  # of float32: 16 MB in all
WEIGHTS = {"uneven": (3, 1, 2, 0), "all on one rank": (1, 0, 0, 0)}

ONE_TENSOR, DICT, IN_PLACE = "one tensor", f"dict of {DICT_TENSORS}", "one tensor, in place"
EVEN, RAW = "even", "even, torch's Gloo"
SMALL = "broadcast of {'a': 1}"

METHOD = [
    "2 and 4 processes on one machine, one torch thread each, over one ProcessGroupGloo. A sample is one "
    "call, on rank 0, from the end of a barrier to the end of the next: until all ranks are done.",
    f"Dict: {DICT_TENSORS} tensors of float32, {DICT_BYTES >> 20} MB in all. One tensor: as many bytes, in a "
    "tensor that the receivers allocate, as they have to for a dict; in place: into one that is there.",
    f"Even: {ROWS * COLUMNS * 4 >> 20} MB in all, the same share on each rank. Uneven: shares of 3:1 for 2 "
    "ranks and 3:1:2:0 for 4. torch's Gloo: its all-gather and reduce-scatter, into tensors that are there.",
    "The ratios are of the same round.",
]


@dataclass(frozen=True)
class Plan:
    rounds: int = 25


QUICK = Plan(rounds=3)

Act = Callable[[], object]
Cases = dict[str, dict[str, Act]]


def main(plan: Plan = Plan()) -> Result:
    result = Result("group_coordinator", "What do the calls of a group coordinator cost?", METHOD)
    for ranks in RANKS:
        for case, samples in _times(ranks, plan).items():
            for system, of_system in samples.items():
                result.add(f"{case}, {ranks} ranks", system, "ms", of_system)
            base = next(iter(samples))
            for system, of_system in samples.items():
                if system != base:
                    over = [a / b for a, b in zip(of_system, samples[base], strict=True)]
                    result.add(f"{case}, {ranks} ranks, over {base}", system, "x", over)
    _judge(result)
    result.save()
    return result


def _judge(result: Result) -> None:
    for ranks in RANKS:
        what = f"broadcast_tensor_dict of {DICT_TENSORS} tensors, 64 MB, over one tensor, {ranks} ranks"
        case = f"broadcast 64 MB, {ranks} ranks, over {ONE_TENSOR}"
        result.bars.append(Bar(what, result.median(case, DICT), 1.15, "x"))
        for name in ("all_gatherv", "reduce_scatterv"):
            over = result.median(f"{name} 16 MB, {ranks} ranks, over {EVEN}", "uneven")
            result.bars.append(Bar(f"{name}, uneven, 16 MB, over even, {ranks} ranks", over, 1.3, "x"))


def _times(ranks: int, plan: Plan) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of each system in each case, a sample for each round."""
    store = serve_store()
    with running(ranks, REPLY_SECONDS_MAX) as members:
        samples: dict[str, dict[str, list[float]]] = members.ask(_measure, store.port, ranks, plan)[0]
        return samples


def _measure(
    here: SimpleNamespace, rank: int, port: int, ranks: int, plan: Plan
) -> dict[str, dict[str, list[float]]]:
    torch.set_num_threads(1)
    group = ProcessGroupGloo(TIMEOUT_S, check_collectives=False)
    group.configure(f"127.0.0.1:{port}/coordinator", rank, ranks)
    cases = {**_broadcasts(group), **_sized(group)}
    samples = {case: {system: list[float]() for system in systems} for case, systems in cases.items()}
    for number in range(plan.rounds + 1):
        for case, systems in cases.items():
            for system, act in systems.items():
                group.barrier().wait()
                start = time.perf_counter()
                act()
                group.barrier().wait()
                if number > 0:  # the first round warms up
                    samples[case][system].append((time.perf_counter() - start) * 1e3)
    here.group, here.cases = group, cases  # a rank that lets go of its groups breaks the others' connections
    return samples


def _broadcasts(group: ProcessGroupGloo) -> Cases:
    coordinator = GroupCoordinator.from_groups(group)
    elements = DICT_BYTES // 4
    there = torch.ones(elements)
    tensors = {f"tensor {n}": torch.ones(elements // DICT_TENSORS) for n in range(DICT_TENSORS)}
    is_source = group.rank() == 0

    def one(target: Callable[[], torch.Tensor]) -> object:
        return group.broadcast_one(there if is_source else target(), 0).wait()

    return {
        "broadcast 64 MB": {
            ONE_TENSOR: lambda: one(lambda: torch.empty(elements)),
            DICT: lambda: coordinator.broadcast_tensor_dict(tensors if is_source else None),
            IN_PLACE: lambda: one(lambda: there),
        },
        "small calls": {
            "allreduce of 4 B": lambda: group.allreduce([torch.ones(1)]).wait(),
            "all_reduce of 4 B": lambda: coordinator.all_reduce(torch.ones(1)),
            SMALL: lambda: coordinator.broadcast_object({"a": 1} if is_source else None),
            "barrier": coordinator.barrier,
        },
    }


def _sized(group: ProcessGroupGloo) -> Cases:
    coordinator, rank, ranks = GroupCoordinator.from_groups(group), group.rank(), group.size()
    share = ROWS // ranks
    mine, whole = torch.ones(share, COLUMNS), torch.ones(ROWS, COLUMNS)
    into_whole, into_share = torch.empty(ROWS, COLUMNS), torch.empty(share, COLUMNS)
    gathers: dict[str, Act] = {
        EVEN: lambda: coordinator.all_gather(mine, 0),
        RAW: lambda: group._allgather_base(into_whole, mine).wait(),
    }
    scatters: dict[str, Act] = {
        EVEN: lambda: coordinator.reduce_scatter(whole, 0),
        RAW: lambda: group._reduce_scatter_base(into_share, whole).wait(),  # type: ignore[call-arg]
    }
    for name, weights in WEIGHTS.items():
        sizes = _shared_out(ROWS, weights[:ranks])
        own = torch.ones(sizes[rank], COLUMNS)
        gathers[name] = lambda own=own: coordinator.all_gatherv(own)  # type: ignore[misc]
        scatters[name] = lambda sizes=sizes: coordinator.reduce_scatterv(whole, 0, sizes)  # type: ignore[misc]
    return {"all_gatherv 16 MB": gathers, "reduce_scatterv 16 MB": scatters}


def _shared_out(rows: int, weights: tuple[int, ...]) -> list[int]:
    sizes = [rows * weight // sum(weights) for weight in weights]
    sizes[0] += rows - sum(sizes)
    return sizes
