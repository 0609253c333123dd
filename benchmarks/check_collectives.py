"""What the check of collectives costs: an allreduce with it and without, beside torch's own check.

All systems' groups live in the same processes and take turns, round after round, so that whatever else
this machine does hits all of them alike; differences are taken within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore, _ProcessGroupWrapper

from benchmarks.group_store import serve_store
from benchmarks.report import Result
from torchft_like.process_group import ProcessGroupGloo as ReconfigurableGloo
from torchft_like.process_group.checking import Check
from torchft_like.testing.ranks import running

UNCHECKED, NEW, CHECKED = "unchecked", "new calls (default)", "all calls"
OURS: dict[str, Check] = {UNCHECKED: False, NEW: "new", CHECKED: True}
TORCH, TORCH_DETAIL = "torch's Gloo", "torch's Gloo, DETAIL"
BYTES = {"4 B": 4, "1 MB": 1 << 20}
RANKS = (2, 4)
TIMEOUT_S = 60.0
REPLY_SECONDS_MAX = 120.0

METHOD = [
    "2 and 4 processes on one machine, one torch thread each; allreduce of float32, each waited for before "
    "the next. A sample is the mean of a round's calls on rank 0.",
    "The groups of all systems live side by side in the same processes and take turns. What is added, and "
    "the ratio, are those of the same round.",
    "A configuration is `configure` of a group that has met before, and three allreduces of different sizes "
    "after it, which are all new; rank 0's time, in turns.",
    "torch's Gloo, DETAIL is what TORCH_DISTRIBUTED_DEBUG=DETAIL puts around a group.",
]


@dataclass(frozen=True)
class Plan:
    rounds: int = 11
    calls: int = 100
    configurations: int = 31


QUICK = Plan(rounds=3, calls=50, configurations=5)
FIRST_SIZES = (1, 100, 10_000)

Samples = dict[str, list[float]]
Allreduce = Callable[[torch.Tensor], object]


def main(plan: Plan = Plan()) -> Result:
    result = Result("check_collectives", "What does the check of collectives cost?", METHOD)
    for ranks in RANKS:
        for case, size in BYTES.items():
            samples = call_times(ranks, size, plan)
            for system, of_system in samples.items():
                result.add(f"allreduce {case}, {ranks} ranks", system, "µs", of_system)
            _add_differences(result, f"added, {case}, {ranks} ranks", "µs", samples)
        samples = configuration_times(ranks, plan)
        for system, of_system in samples.items():
            result.add(f"a configuration, {ranks} ranks", system, "ms", of_system)
        _add_differences(result, f"added, a configuration, {ranks} ranks", "ms", samples)
    result.save()
    return result


def call_times(ranks: int, size: int, plan: Plan = QUICK) -> Samples:
    """Return the microseconds of an allreduce of `size` bytes for each system, a sample for each round."""
    return _asked(ranks, _measure_calls, size, plan)


def configuration_times(ranks: int, plan: Plan = QUICK) -> Samples:
    """Return the milliseconds of a configuration and its first collectives, for each way to check."""
    return _asked(ranks, _measure_configurations, plan)


def _asked(ranks: int, act: Callable[..., Samples], *details: object) -> Samples:
    """Return what rank 0 of `ranks` processes has measured."""
    store = serve_store()
    with running(ranks, REPLY_SECONDS_MAX) as members:
        samples: Samples = members.ask(act, store.port, ranks, *details)[0]
        return samples


def _add_differences(result: Result, case: str, unit: str, samples: Samples) -> None:
    for with_check, without in ((NEW, UNCHECKED), (CHECKED, UNCHECKED), (TORCH_DETAIL, TORCH)):
        if with_check in samples:
            pairs = list(zip(samples[with_check], samples[without], strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            result.add(case, with_check, unit, [a - b for a, b in pairs], f"{ratio:.2f} x")


def _measure_configurations(here: SimpleNamespace, rank: int, port: int, ranks: int, plan: Plan) -> Samples:
    torch.set_num_threads(1)
    groups = {name: ReconfigurableGloo(TIMEOUT_S, check_collectives=check) for name, check in OURS.items()}
    samples: Samples = {name: [] for name in groups}
    for number in range(plan.configurations + 1):
        for name, group in groups.items():
            start = time.perf_counter()
            group.configure(f"127.0.0.1:{port}/{name}{number}", rank, ranks)
            for size in FIRST_SIZES:
                group.allreduce([torch.ones(size)]).wait()
            if number > 0:  # the first one warms up
                samples[name].append((time.perf_counter() - start) * 1e3)
    here.groups = groups
    return samples


def _measure_calls(here: SimpleNamespace, rank: int, port: int, ranks: int, size: int, plan: Plan) -> Samples:
    torch.set_num_threads(1)
    systems = _systems(port, rank, ranks)
    tensor = torch.ones(size // 4)
    samples: Samples = {name: [] for name in systems}
    for number in range(plan.rounds + 1):
        for name, allreduce in systems.items():
            start = time.perf_counter()
            for _ in range(plan.calls):
                allreduce(tensor)
            if number > 0:  # the first round warms up
                samples[name].append((time.perf_counter() - start) / plan.calls * 1e6)
    here.systems = systems  # a rank that lets go of its groups breaks the others' connections
    return samples


def _systems(port: int, rank: int, ranks: int) -> dict[str, Allreduce]:
    systems: dict[str, Allreduce] = {}
    for name, check in OURS.items():
        group = ReconfigurableGloo(TIMEOUT_S, check_collectives=check)
        group.configure(f"127.0.0.1:{port}/{name}", rank, ranks)
        systems[name] = lambda tensor, group=group: group.allreduce([tensor]).wait()  # type: ignore[misc]
    store = TCPStore("127.0.0.1", port, is_master=False)
    plain, inner, helper = (
        ProcessGroupGloo(PrefixStore(f"torch{n}", store), rank, ranks, timedelta(seconds=TIMEOUT_S))
        for n in range(3)
    )
    systems[TORCH] = lambda tensor: plain.allreduce([tensor]).wait()  # type: ignore[attr-defined]
    detail = _ProcessGroupWrapper(inner, helper)
    systems[TORCH_DETAIL] = lambda tensor: detail.allreduce([tensor]).wait()  # type: ignore[attr-defined]
    return systems
