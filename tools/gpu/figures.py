"""Figures that a probe or a test finds, a line of JSON each in the file that GPU_FIGURES names.

A line is written at once, so a probe that is killed later has not lost what it had found.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, TypeVar

VARIABLE = "GPU_FIGURES"
T = TypeVar("T")
_failed: list[str] = []


def figure(name: str, value: float | str, unit: str = "", *, bar: float | None = None) -> None:
    """Write one figure down.

    Args:
        name: says what it is of, without its unit.
        unit: empty for a text or a plain number.
        bar: what it must not be above; for a figure that must not be below, give its inverse.
    """
    if isinstance(value, float):
        value = float(f"{value:.4g}")
    line = json.dumps({"name": name, "value": value, "unit": unit, "bar": bar})
    print(line, flush=True)
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:
            file.write(line + "\n")


def median_figure(name: str, samples: Sequence[float], unit: str, *, bar: float | None = None) -> float:
    """Write the median of some samples down, and return it."""
    value = median(samples)
    figure(name, value, unit, bar=bar)
    return value


def read_figures(path: Path) -> list[dict[str, Any]]:
    """Return all figures that were written to the end of their line."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_probe(main: Callable[..., object], *arguments: Any) -> NoReturn:
    """Run `main` of the process's main module as a command line says, and end the process; 1 if a part of it
    has failed.

    It runs in a copy of the module that has its own name, by which ranks find the functions they are asked.
    """
    spec = sys.modules["__main__"].__spec__
    if spec is not None:
        main = getattr(importlib.import_module(spec.name), main.__name__)
    main(*arguments, dry="--dry-run" in sys.argv)
    sys.exit(f"failed: {', '.join(_failed)}" if _failed else 0)


def attempted(act: Callable[[], T], name: str) -> T | None:
    """Return the result of `act`; if it fails, the error is the figure, and the probe fails in the end."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - it is written down
        _failed.append(name)
        figure(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200])
        return None
