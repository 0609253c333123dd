"""A plot of a report, by matplotlib, which the package does not need: it is imported only here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchft_like.testing.chaos.report import BIN_S, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(report: Report, path: Path) -> None:
    """Draw recovery times by kind, and throughput over time beside that of the run without faults.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl  # noqa: PLC0415
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.use("Agg")
    kinds = list(report.by_kind)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 2.0 + 0.35 * max(6, len(kinds))))
    _draw_recoveries(left, kinds, report)
    _draw_throughput(right, report)
    kept = "" if report.kept is None else f", {report.kept:.1%} of the throughput kept"
    problems = ", ".join(f"{len(found)} {name}" for name, found in report.problems.items())
    figure.suptitle(f"{report.overall.faults} faults{kept}\n{problems}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_recoveries(axes: Axes, kinds: list[str], report: Report) -> None:
    """Draw a dot for each fault."""
    for measure, color, shift, label in (
        ("recovery_s", "tab:blue", 0.12, "survivors commit again"),
        ("whole_s", "tab:orange", -0.12, "all together again"),
    ):
        shown: list[dict[str, Any]] = [dict(f) for f in report.faults if f[measure] is not None]
        axes.scatter(
            [fault[measure] for fault in shown],
            [kinds.index(fault["kind"]) + shift for fault in shown],
            s=12,
            color=color,
            alpha=0.6,
            label=label,
        )
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from the injection")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)


def _draw_throughput(axes: Axes, report: Report) -> None:
    for throughput, color, label in (
        (report.baseline, "tab:gray", "without faults"),
        (report.throughput, "tab:blue", "with faults"),
    ):
        if throughput is not None:
            times = [BIN_S * (index + 0.5) for index in range(len(throughput.curve))]
            axes.plot(times, throughput.curve, color=color, label=label, linewidth=1)
    began = float(report.setup.get("began", 0.0))
    for fault in report.faults:
        axes.axvline(fault["time"] - began, color="tab:red", alpha=0.15, linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("batches per second")
    axes.legend(fontsize=8)
