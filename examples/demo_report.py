"""What the demo says at its end: the recovery times, the digests, and the verdict on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from demo_faults import Fault
from demo_job import DemoError, Job
from demo_plot import Run, write_plot
from demo_records import Record, problems
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def report(job: Job, console: Console) -> None:
    """Print, draw and keep the measurements.

    Raises:
        DemoError: the replicas do not hold the same bits.
    """
    results, directory = job.results(), job.settings.output_dir
    if job.faults:
        console.print(_fault_table(job.faults))
    console.print(_digest_table(results))
    metrics = {index: records.metrics for index, records in enumerate(job.records)}
    write_plot(Run(job.began, metrics, job.faults), directory / "demo.png")
    summary = {"faults": [_measured(fault) for fault in job.faults], "results": results}
    (directory / "result.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(f"picture {directory / 'demo.png'}, logs beside it", highlight=False, soft_wrap=True)
    if found := problems(results, job.settings.steps):
        raise DemoError("; ".join(found))
    console.print(
        f"all {len(results)} replicas hold bit-identical parameters and optimizer states", style="bold green"
    )


def _measured(fault: Fault) -> dict[str, object]:
    return {
        "fault": fault.kind,
        "replica": fault.victim,
        "recovery_seconds": fault.recovered - fault.struck,
        "return_seconds": fault.returned - fault.revived,
    }


def _fault_table(faults: Sequence[Fault]) -> Table:
    columns = ("fault", "others' next step", "comes back by", "its own next step")
    table = Table(*columns, title="recovery, measured", title_justify="left", box=SIMPLE_HEAD)
    for fault in faults:
        table.add_row(
            f"{fault.kind} of replica {fault.victim}",
            f"after {fault.recovered - fault.struck:.3f} s",
            "a new process" if fault.kind == "SIGKILL" else "SIGCONT",
            f"after {fault.returned - fault.revived:.3f} s",
        )
    return table


def _digest_table(results: Mapping[int, Record | None]) -> Table:
    columns = ("replica", "step", "SHA-256 of parameters and optimizer state")
    table = Table(*columns, title="state at the end", title_justify="left", box=SIMPLE_HEAD)
    for replica, result in results.items():
        step, digest = (str(result["step"]), f"{result['digest']:.32}...") if result else ("-", "-")
        table.add_row(str(replica), step, digest)
    return table
