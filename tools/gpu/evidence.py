"""Runs the probes of a stage, the most valuable first; what has a result is not run again.

A stage ends by itself: a probe is not begun without time for it, and gets no more than is left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock

from tools.gpu.plan import PROBES, STAGES, Probe
from tools.gpu.results import COMMITTED, ROOT, Results, write_page
from tools.gpu.running import run

DRY = ROOT / ".cache" / "gpu_evidence_dry.json"
DRY_TIMES = 4  # what a machine without a GPU may be slower
MACHINE_LIMIT_S = 60.0
BEGIN_S_MIN = 20.0  # a probe with less than that is left for the next run
CORES_PER_PROBE = 5
MACHINE = """
import torch, platform, json
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
print(json.dumps({"": device, "torch": torch.__version__, "NCCL": nccl, "Python": platform.python_version()}))
"""


def main() -> None:
    options = _options()
    if options.page:
        write_page()
        return
    stage = Stage(options)
    stage.run()
    sys.exit(0 if stage.is_complete() else 1)


class Stage:
    """One call of this script."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._deadline = time.monotonic() + 60 * options.minutes
        self._dry = options.dry_run
        path = options.results or (DRY if self._dry else COMMITTED)
        self._results = Results(path)
        self._log = path.with_suffix(".log")
        self._retry = options.retry
        self._jobs = max(1, options.jobs)
        self._lock = Lock()
        self._probes = [
            probe for probe in PROBES if probe.stage in options.stage and options.only in probe.name
        ]

    def run(self) -> None:
        """Every probe that is due, some of them side by side where nothing is timed."""
        self._machine = {**_machine(), "commit": _commit(), "on": datetime.now(UTC).strftime("%Y-%m-%d")}
        timed = [probe for probe in self._due() if probe.stage == "C3"]
        others = [probe for probe in self._due() if probe.stage != "C3"]
        with ThreadPoolExecutor(self._jobs) as threads:
            list(threads.map(self._run, others))
        for probe in timed:
            self._run(probe)

    def is_complete(self) -> bool:
        """Whether all of the stage has passed."""
        known = self._results.by_probe
        return all(known.get(probe.name, {}).get("status") == "passed" for probe in self._probes)

    def _due(self) -> list[Probe]:
        known = self._results.by_probe
        done = {name for name, found in known.items() if found["status"] == "passed" or not self._retry}
        return [probe for probe in self._probes if probe.name not in done]

    def _run(self, probe: Probe) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s < BEGIN_S_MIN:
            self._say(probe, "not begun: the time of this run is over")
            return
        limit_s = probe.limit_s * (DRY_TIMES if self._dry else 1)
        found = run(probe, min(limit_s, left_s), self._log, dry=self._dry)
        with self._lock:
            record = {"stage": probe.stage, **found, "dry": self._dry, "machine": self._machine}
            self._results.add(probe, record)
        self._say(probe, f"{found['status']} in {found['seconds']} s\n{found['detail']}".rstrip())

    def _say(self, probe: Probe, what: str) -> None:
        print(f"{probe.stage} {probe.name}: {what}", flush=True)


def _machine() -> dict[str, str]:
    """Asked in a process of its own: this one never touches the device."""
    command = [sys.executable, "-c", MACHINE]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=MACHINE_LIMIT_S, check=True)
    except subprocess.SubprocessError as error:  # the probes have limits of their own, and say the rest
        return {"": f"a device that did not tell its name ({type(error).__name__})"}
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return os.environ.get("GPU_EVIDENCE_COMMIT") or ran.stdout.strip()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="tools/gpu_evidence.py")
    parser.add_argument("--stage", action="append", choices=list(STAGES), default=[], help="may be repeated")
    parser.add_argument("--only", default="", help="of the stage, the probes whose name holds this")
    parser.add_argument("--retry", action="store_true", help="run again what has not passed")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, over Gloo, small")
    parser.add_argument("--minutes", type=float, default=9.0, help="for this run")
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, (os.cpu_count() or 1) // CORES_PER_PROBE),
        help="probes side by side; those of C3 are timed, and never are",
    )
    parser.add_argument("--results", type=Path, help="instead of benchmarks/results/gpu_evidence.json")
    parser.add_argument("--wheels", help="a folder of wheels to use what is not installed from (docs/gpu.md)")
    parser.add_argument(
        "--page", action="store_true", help="write the tables of docs/gpu.md, and nothing else"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
