"""What DiLoCo costs in loss, and saves in bytes, against averaging gradients in every step.

Four replicas train a small GPT on the same tokens in each way. A replica is a process of its own, with a
Manager over Gloo and a real lighthouse; `low_communication_worker` is its program.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass

from benchmarks.processes import Fleet, FleetProcess, Record
from benchmarks.report import Bar, Result
from tools.environments import ROOT
from torchft_like import LighthouseServer

REPLICAS = 4
SYNC_EVERY = 50
DDP = "DDP"
# By name: what `--quantize` says, and `--error-feedback`.
DILOCO = {
    "DiLoCo": ("", False),
    "DiLoCo, int8": ("int8", False),
    "DiLoCo, fp8": ("fp8", False),
    "DiLoCo, int8 with error feedback": ("int8", True),
}
CURVE_EVERY = SYNC_EVERY  # after a sync all replicas have the same parameters
LOSS = "loss after the last step, on text that nobody trained on"
BYTES = "bytes that a replica sends in the whole run"
LOSS_RATIO_MAX, QUANTIZED_LOSS_RATIO_MAX = 1.02, 1.025
BYTES_RATIO_MAX, QUANTIZED_BYTES_RATIO_MAX = 1 / 50, 1 / 180
WORKER = [sys.executable, "-m", "benchmarks.low_communication_worker"]
WITH_EXAMPLES = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
SECONDS_MAX = 900.0
PATIENCE_MS = 60_000  # no replica is given up because it is starved

METHOD = [
    f"{REPLICAS} replicas, a process with one torch thread each, train a GPT of 0.14 million parameters on "
    "the source text of Python's standard library: 8 windows of 64 bytes in a step of a replica, AdamW with "
    "1e-3, warmed up over 20 steps and cooled down along a cosine. All ways begin with the same model, which "
    "was pretrained in one process for 700 steps of 16 windows, as in DiLoCo's paper, and see the same "
    "tokens.",
    "DDP averages gradients in every step. DiLoCo averages pseudogradients, in one bucket, after every "
    f"{SYNC_EVERY} steps; its outer optimizer is SGD with 0.7 and Nesterov momentum of 0.9.",
    "The loss is that of the global parameters, which are equal on all replicas, on 1,024 windows of which "
    "no replica has trained on any, along the way on 128 of them. A "
    "sample is a run with another seed of weights and batches; ratios are "
    "medians over those of each seed.",
    "Bytes are counted at the process group: an allreduce of n bytes counts as 2 n (K-1) / K, which is what "
    "a ring sends, and so do the two halves of a quantized one. Votes and quorums are not counted.",
]


@dataclass(frozen=True)
class Plan:
    steps: int = 500
    seeds: int = 1


QUICK = Plan(steps=100, seeds=1)


def main(plan: Plan = Plan()) -> Result:
    losses: dict[str, list[float]] = {name: [] for name in (DDP, *DILOCO)}
    sent: dict[str, list[float]] = {name: [] for name in losses}
    curves: dict[str, list[list[float]]] = {name: [] for name in losses}
    with tempfile.TemporaryDirectory(prefix="low-communication-") as folder:
        for seed in range(plan.seeds):
            common = [f"--model={folder}/model-{seed}.pt", f"--seed={seed}"]
            pretrain(common)
            for name, of_seeds in losses.items():
                loss, count, curve = train(name, [*common, f"--steps={plan.steps}"])
                of_seeds.append(loss)
                sent[name].append(count)
                curves[name].append(curve)
                print(f"seed {seed}: {name}: {loss:.4f}, {count:,} bytes", flush=True)
    return report(losses, sent, curves)


def report(
    losses: dict[str, list[float]], sent: dict[str, list[float]], curves: dict[str, list[list[float]]]
) -> Result:
    """Save what was measured, by way, a sample for each seed."""
    result = Result("low_communication", "What does DiLoCo cost in loss, and save in bytes?", METHOD)
    for name, of_seeds in losses.items():
        over = statistics.median(a / b for a, b in zip(of_seeds, losses[DDP], strict=True))
        result.add(LOSS, name, "nats per byte", of_seeds, f"{over:.4f} of DDP's")
        if name in DILOCO:
            limit = QUANTIZED_LOSS_RATIO_MAX if DILOCO[name][0] else LOSS_RATIO_MAX
            result.bars.append(Bar(f"{name}: loss over DDP's", over, limit, "x"))
    for name, counts in sent.items():
        part = statistics.median(counts) / statistics.median(sent[DDP])
        result.add(BYTES, name, "bytes", counts, f"1/{1 / part:.0f} of DDP's")
        if name in DILOCO:
            limit = QUANTIZED_BYTES_RATIO_MAX if DILOCO[name][0] else BYTES_RATIO_MAX
            result.bars.append(Bar(f"{name}: bytes over DDP's", part, limit, "x"))
    for name, of_runs in curves.items():
        for point, samples in enumerate(zip(*of_runs, strict=True), 1):
            at = point * CURVE_EVERY
            result.add(f"loss after {at:,} steps", name, "nats per byte", samples, at=at)
    result.save()
    return result


def pretrain(options: list[str]) -> None:
    """Write the file of the model with which all ways begin."""
    with Fleet(WITH_EXAMPLES) as fleet:
        _results(fleet, [fleet.start("pretraining", [*WORKER, *options])])


def train(name: str, options: list[str]) -> tuple[float, float, list[float]]:
    """Train with all replicas; return the loss, the bytes sent and the losses on the way, alike on all."""
    options = [*options, f"--curve-every={CURVE_EVERY}"]
    if name in DILOCO:
        quantize_to, error_feedback = DILOCO[name]
        options = [*options, f"--sync-every={SYNC_EVERY}", f"--quantize={quantize_to}"]
        options += ["--error-feedback"] if error_feedback else []
    lighthouse = LighthouseServer(
        min_replicas=REPLICAS, join_timeout_ms=PATIENCE_MS, keepalive_timeout_ms=PATIENCE_MS
    )
    place = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "TORCHFT_KEEPALIVE_TIMEOUT_MS": str(PATIENCE_MS)}
    try:
        with Fleet(WITH_EXAMPLES | place) as fleet:
            commands = [
                [*WORKER, f"--rank={rank}", f"--replicas={REPLICAS}", *options] for rank in range(REPLICAS)
            ]
            replicas = [fleet.start("replica", command) for command in commands]
            results = _results(fleet, replicas)
            found = {(record["loss"], record["bytes"], *record["curve"]) for record in results}
    finally:
        lighthouse.shutdown()
    if len(found) != 1:
        raise AssertionError(f"{name}: the replicas ended differently: {found}")
    loss, count, *curve = found.pop()
    return loss, count, curve


def _results(fleet: Fleet, processes: list[FleetProcess]) -> list[Record]:
    """Return the record of each process."""
    fleet.wait_for(lambda: all(each.records for each in processes) or None, "result", SECONDS_MAX)
    return [each.records[0] for each in processes]
