"""What the fingerprint of the state costs in each step, beside the step itself.

One process, no peers: what a fingerprint costs is computed before the join, and 41 bytes in it. The
state of the same model is read in several ways in turns with training steps of it, round after round,
so that whatever else this machine does hits all alike; ratios are taken within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.report import Result
from torchft_like.core.state_comparison import RankFingerprint, combine, compare
from torchft_like.divergence import StateFingerprint
from torchft_like.divergence.state_fingerprint import DEFAULT_SLICES

STEP = "training step"
DEFAULT = f"parameters, {DEFAULT_SLICES} slices"
WITH_OPTIMIZER = f"parameters and optimizer, {DEFAULT_SLICES} slices"
EVERYTHING = "parameters, 1 slice"

BATCH = 32
LAYER_WIDTHS = {"1 MB": (512, 1), "64 MB": (1024, 16), "1 GB": (4096, 16)}
MEMBERS = 1000

METHOD = [
    f"A stack of linear layers with 1 MB, 64 MB or 1 GB of float32 parameters, batch {BATCH}: forward, "
    "backward and SGD with momentum in one process on the CPU, one torch thread, no communication.",
    f"A fingerprint is one call: of the parameters alone with the default of {DEFAULT_SLICES} slices, of "
    "the momentum buffers too, and of all parameters at once. Without one nothing is computed.",
    "Step and fingerprints take turns; a sample is the mean of a turn, the ratio is the median over rounds "
    "of a fingerprint over the step of the same round.",
    f"Comparing: one quorum of {MEMBERS} members, as each rank's server does for every quorum.",
]


@dataclass(frozen=True)
class Plan:
    rounds: int = 11
    turn_s: float = 0.1


QUICK = Plan(rounds=3, turn_s=0.02)


def main(plan: Plan = Plan()) -> Result:
    torch.set_num_threads(1)
    result = Result("divergence", "What does watching for divergence cost?", METHOD)
    for case, (width, layers) in LAYER_WIDTHS.items():
        samples = _take_turns(_actions(width, layers), plan)
        for system, of_system in samples.items():
            ratio = statistics.median(a / b for a, b in zip(of_system, samples[STEP], strict=True))
            note = "" if system == STEP else f"{100 * ratio:.2g} % of the step"
            result.add(f"{case} of parameters", system, "ms", of_system, note)
    for case, values in {"all equal": [1] * MEMBERS, "one differs": [2] + [1] * (MEMBERS - 1)}.items():
        compared = _take_turns({case: _comparison(values)}, plan)[case]
        result.add(f"comparing {MEMBERS:,} members", case, "ms", compared)
    result.save()
    return result


def _actions(width: int, layers: int) -> dict[str, Callable[[], object]]:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs = torch.randn(BATCH, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return {
        STEP: step,
        DEFAULT: _taker(StateFingerprint(model.parameters())),
        WITH_OPTIMIZER: _taker(StateFingerprint(model.parameters(), [optimizer])),
        EVERYTHING: _taker(StateFingerprint(model.parameters(), slices=1)),
    }


def _taker(fingerprint: StateFingerprint) -> Callable[[], object]:
    step = iter(range(2**62))
    return lambda: fingerprint.take(next(step)).result()


@dataclass(frozen=True)
class _Member:
    replica_id: str
    fingerprint: bytes


def _comparison(values: list[int]) -> Callable[[], object]:
    said = [combine([RankFingerprint(True, b"layout 1", value).to_bytes()]) for value in values]
    members = [_Member(f"r{index}", fingerprint) for index, fingerprint in enumerate(said)]
    return lambda: compare(members)


def _take_turns(actions: dict[str, Callable[[], object]], plan: Plan) -> dict[str, list[float]]:
    """Return the milliseconds of one call of each, a sample for each round."""
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(plan.rounds + 1):
        for name, action in actions.items():
            milliseconds = _mean_ms(action, plan.turn_s)
            if number > 0:  # the first round warms up
                samples[name].append(milliseconds)
    return samples


def _mean_ms(action: Callable[[], object], turn_s: float) -> float:
    calls, start = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - start < turn_s:
        action()
        calls += 1
    return (time.perf_counter() - start) / calls * 1e3
