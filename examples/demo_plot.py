"""The picture of a demo run: loss, participants, and what each replica was doing, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_faults import Fault
from demo_records import Metric, first_metric_of_each_step
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

FAULT_COLORS = {"SIGKILL": "#c0392b", "SIGSTOP": "#8e44ad"}
TRAINING, HEALING = "#2e8b57", "#e0a030"
SMOOTHED_STEPS = 15
GAP_SECONDS = 0.5
NAMED_PART = 0.06  # of the width: a shorter bar is not named


@dataclass(frozen=True)
class Run:
    """All that the picture shows. Times are seconds since the Unix epoch."""

    began: float
    metrics: Mapping[int, Sequence[Metric]]  # of each replica, none of them empty
    faults: Sequence[Fault]


def write_plot(run: Run, path: Path) -> None:
    """Write the picture as a PNG file."""
    heights = [3, 1.1, 0.35 * len(run.metrics) + 0.2]
    figure = Figure(figsize=(11, 8), layout="constrained")
    loss, participants, replicas = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    figure.suptitle(_title(run), fontsize=13)
    _draw_loss(loss, run)
    _draw_participants(participants, run)
    _draw_replicas(replicas, run)
    for axes in (loss, participants):
        _mark_faults(axes, run)
    _name_faults(loss, run)
    replicas.set_xlabel("seconds since the start")
    replicas.set_xlim(0, max(own[-1].time for own in run.metrics.values()) - run.began)
    figure.savefig(path, dpi=120)


def _title(run: Run) -> str:
    step = max(metric.step for own in run.metrics.values() for metric in own)
    faults = " and ".join(f"a {fault.kind}" for fault in run.faults) or "no faults"
    return f"{len(run.metrics)} replica groups train a small GPT for {step} steps, through {faults}"


def _draw_loss(axes: Axes, run: Run) -> None:
    for replica, own in run.metrics.items():
        trained = [metric for metric in own if metric.participating]
        axes.plot(
            [metric.time - run.began for metric in trained],
            [metric.loss for metric in trained],
            ".",
            markersize=2.5,
            alpha=0.45,
            label=f"replica {replica}",
        )
    times, losses = _mean_loss(run)
    axes.plot(times, losses, color="black", linewidth=1.4, label=f"mean over {SMOOTHED_STEPS} steps")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right", markerscale=3)


def _mean_loss(run: Run) -> tuple[list[float], list[float]]:
    """Return the time and the loss of each step, averaged over the replicas and over the steps around it.

    Where no step was committed for a while the line is broken, by a NaN.
    """
    by_step: dict[int, list[Metric]] = {}
    for own in run.metrics.values():
        for metric in own:
            if metric.participating:
                by_step.setdefault(metric.step, []).append(metric)
    steps = sorted(by_step)
    times = [min(metric.time for metric in by_step[step]) - run.began for step in steps]
    means = [sum(metric.loss for metric in by_step[step]) / len(by_step[step]) for step in steps]
    line: list[tuple[float, float]] = []
    for index, time in enumerate(times):
        if line and time - line[-1][0] > GAP_SECONDS:
            line.append((time, float("nan")))
        reach = min(SMOOTHED_STEPS // 2, index)  # as far to the left as to the right: the start is steep
        window = means[index - reach : index + reach + 1]
        line.append((time, sum(window) / len(window)))
    return [time for time, _ in line], [loss for _, loss in line]


def _draw_participants(axes: Axes, run: Run) -> None:
    committed = first_metric_of_each_step(metric for own in run.metrics.values() for metric in own)
    axes.step(
        [metric.time - run.began for metric in committed],
        [metric.participants for metric in committed],
        where="post",
        color="#1f4e79",
        linewidth=1.8,
    )
    axes.set_ylabel("participants")
    axes.set_ylim(0, len(run.metrics) + 0.6)
    axes.set_yticks(range(len(run.metrics) + 1))
    axes.grid(alpha=0.25)


def _mark_faults(axes: Axes, run: Run) -> None:
    """Draw a line where a fault struck, a shade until the survivors went on, a dotted line at the return."""
    for fault in run.faults:
        color = FAULT_COLORS[fault.kind]
        struck, recovered, returned = (
            time - run.began for time in (fault.struck, fault.recovered, fault.returned)
        )
        axes.axvline(struck, color=color, linewidth=1.3)
        axes.axvline(returned, color=color, linewidth=1.3, linestyle=":")
        axes.axvspan(struck, recovered, color=color, alpha=0.25, linewidth=0)


def _name_faults(axes: Axes, run: Run) -> None:
    for fault in run.faults:
        _name(axes, fault.struck - run.began, 0.97, _struck_text(fault), fault, rotation=0)
        _name(axes, fault.returned - run.began, 0.66, f"replica {fault.victim} is back", fault, rotation=90)


def _name(axes: Axes, time: float, height: float, text: str, fault: Fault, rotation: int) -> None:
    """Write text to the right of a vertical line; `height` is a part of that of the axes."""
    axes.annotate(
        text,
        (time, height),
        xycoords=axes.get_xaxis_transform(),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        rotation=rotation,
        fontsize=9,
        color=FAULT_COLORS[fault.kind],
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5},
    )


def _struck_text(fault: Fault) -> str:
    recovery = fault.recovered - fault.struck
    return f"{fault.kind} of replica {fault.victim}:\nthe others' next step\nafter {recovery:.2f} s"


def _draw_replicas(axes: Axes, run: Run) -> None:
    end_of_all = max(own[-1].time for own in run.metrics.values())
    for replica, own in run.metrics.items():
        for begin, end, color, text in _spans(run, replica, own):
            axes.barh(replica, end - begin, left=begin - run.began, height=0.7, color=color)
            if end - begin > NAMED_PART * (end_of_all - run.began):
                middle = (begin + end) / 2 - run.began
                axes.text(middle, replica, text, ha="center", va="center", color="white", fontsize=8)
    axes.set_yticks(list(run.metrics), [f"replica {replica}" for replica in run.metrics])
    axes.invert_yaxis()
    axes.legend(
        handles=_legend(), loc="upper center", bbox_to_anchor=(0.5, -0.45), ncols=6, frameon=False, fontsize=9
    )


def _legend() -> list[Artist]:
    colors = {"starting, healing": HEALING, "training": TRAINING}
    colors |= {"killed": FAULT_COLORS["SIGKILL"], "stopped": FAULT_COLORS["SIGSTOP"]}
    return [
        *(Patch(color=color, label=name) for name, color in colors.items()),
        Patch(facecolor="gray", alpha=0.3, label="from a fault to the others' next step"),
        Line2D([], [], color="gray", linestyle=":", label="the victim commits again"),
    ]


def _spans(run: Run, replica: int, own: Sequence[Metric]) -> list[tuple[float, float, str, str]]:
    """Return (begin, end, color, text) of what this replica did, from the start to the end."""
    trains_from = own[0].time
    spans = [(run.began, trains_from, HEALING, "")]
    for fault in run.faults:
        if fault.victim == replica:
            spans.append((trains_from, fault.struck, TRAINING, "training"))
            spans.append((fault.struck, fault.revived, FAULT_COLORS[fault.kind], fault.kind))
            spans.append((fault.revived, fault.returned, HEALING, ""))
            trains_from = fault.returned
    return [*spans, (trains_from, own[-1].time, TRAINING, "training")]
