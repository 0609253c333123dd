"""A PNG for each saved result. Reads the JSON and nothing else."""

from __future__ import annotations

import math
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchmarks.process_groups import CONTESTANTS, SHARED
from benchmarks.report import RESULTS
from benchmarks.systems import OURS, PEERS, PLAIN_DDP

COLUMNS_MAX = 4
LINEAR_SPAN_MAX = 20
SYSTEMS = (OURS, *PEERS, PLAIN_DDP)
COLORS = {of.name: of.color for of in SYSTEMS} | {of.name: of.color for of in CONTESTANTS}
OTHER_COLORS = ("tab:red", "tab:purple", "tab:brown")

Case = list[dict[str, Any]]


def plot(result: dict[str, Any]) -> None:
    """Write results/<name>.png: a panel for each case, a bar for each system, a dot for each sample."""
    mpl.use("Agg")
    curves = by_case([{**row, "case": _without_number(row)} for row in result["rows"] if _is_on_curve(row)])
    cases = by_case([row for row in result["rows"] if not _is_on_curve(row)]) | curves
    cases = {case: rows for case, rows in cases.items() if any(row["max"] != 0 for row in rows)}
    columns = min(COLUMNS_MAX, len(cases))
    lines = math.ceil(len(cases) / columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 2.3 * lines + 0.8), squeeze=False)
    panels = list(axes.flat)
    for panel, (case, rows) in zip(panels, cases.items(), strict=False):
        (_draw_curves if case in curves else _draw_case)(panel, case, rows)
    for unused in panels[len(cases) :]:
        unused.set_visible(False)
    machine = result["machine"]
    figure.suptitle(
        f"{result['question']}\n{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['date']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(RESULTS / f"{result['name']}.png", dpi=110)
    plt.close(figure)


def by_case(rows: Case) -> dict[str, Case]:
    """Return the rows of each case, in the order of the first mention."""
    cases: dict[str, Case] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    return cases


def _is_on_curve(row: dict[str, Any]) -> bool:
    return row.get("at") is not None


def _without_number(row: dict[str, Any]) -> str:
    return str(row["case"]).replace(f"{row['at']:,} ", "n ", 1) if _is_on_curve(row) else str(row["case"])


def _draw_curves(axes: Axes, case: str, rows: Case) -> None:
    """Draw the median of every system over the number, with the span from the least to the most as a
    shade.
    """
    systems = list(dict.fromkeys(row["system"] for row in rows))
    colors = _colors([{"system": system} for system in systems])
    for system, color in zip(systems, colors, strict=True):
        points = [row for row in rows if row["system"] == system and row["median"] is not None]
        at = [row["at"] for row in points]
        axes.plot(at, [row["median"] for row in points], ".-", color=color, label=system)
        axes.fill_between(
            at, [row["min"] for row in points], [row["max"] for row in points], color=color, alpha=0.12
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(
        sorted({row["at"] for row in rows}), [f"{x:g}" for x in sorted({row["at"] for row in rows})]
    )
    axes.set_title(case, fontsize=8)
    axes.set_xlabel("n", fontsize=7)
    axes.set_ylabel(rows[0]["unit"], fontsize=7)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6)


def _draw_case(axes: Axes, case: str, rows: Case) -> None:
    colors = _colors(rows)
    for place, row in enumerate(rows):
        if row["median"] is None:
            axes.text(0.02, place, row["note"], va="center", fontsize=7, transform=axes.get_yaxis_transform())
            continue
        axes.barh(place, row["median"], color=colors[place], alpha=0.55)
        axes.plot(row["samples"], [place] * len(row["samples"]), ".", color="black", markersize=3)
        axes.annotate(f" {row['median']:.3g}", (row["median"], place - 0.27), fontsize=7)
    _scale(
        axes, [row["median"] for row in rows if row["median"]], [x for row in rows for x in row["samples"]]
    )
    axes.set_yticks(range(len(rows)), [row["system"] for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title(case, fontsize=8)
    axes.set_xlabel(rows[0]["unit"], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)


def _scale(axes: Axes, medians: list[float], samples: list[float]) -> None:
    """Return whether the axis is logarithmic: the systems differ by more than a glance at a linear one
    shows.
    """
    if medians and min(samples) > 0 and max(medians) > LINEAR_SPAN_MAX * min(medians):
        axes.set_xscale("log")
        axes.set_xlim(min(samples) / 2, max(samples) * 4)
        return
    axes.set_xlim(min([*samples, 0]) * 1.2, max([*samples, 1e-9]) * 1.2)
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _colors(rows: Case) -> list[str]:
    others = iter(OTHER_COLORS * len(rows))
    return [COLORS.get(row["system"].removesuffix(SHARED)) or next(others) for row in rows]
