"""How the demo shows itself: a live table on a terminal, plain lines anywhere else.

The view is told things and shows them; it decides nothing and reads no file.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

STORY_LINES = 14
REFRESH_SECONDS = 0.25
PLAIN_STATUS_SECONDS = 5.0
BARS = "▁▂▃▄▅▆▇█"

STATE_STYLES = {
    "starting": "yellow",
    "healing": "cyan",
    "training": "green",
    "killed": "bold red",
    "stopped": "bold magenta",
    "finished": "bold green",
}


@dataclass(frozen=True)
class Row:
    """The state of one replica at this moment."""

    replica: int
    state: str  # a key of STATE_STYLES
    step: int
    losses: Sequence[float]  # so far; the last is the newest
    participants: int  # 0 while it does not take part


class View(Protocol):
    """The functions of a view that the demo calls."""

    def tell(self, seconds: float, text: str, style: str = "") -> None:
        """Show an event, `seconds` after the start."""

    def show(self, rows: Sequence[Row]) -> None:
        """Show the replicas as they are now; called often, drawn less often."""

    def close(self) -> None:
        """Give the terminal back."""


def make_view(console: Console, replicas: int, steps: int) -> View:
    """Return the live view on a terminal, the plain one elsewhere."""
    return LiveView(console, replicas, steps) if console.is_terminal else PlainView(console, steps)


class PlainView:
    """Prints a line per event, and a status line every few seconds."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._began = self._shown = time.monotonic()

    def tell(self, seconds: float, text: str, style: str = "") -> None:
        self._console.print(
            f"{seconds:6.2f} s  {text}", style=style, markup=False, highlight=False, soft_wrap=True
        )

    def show(self, rows: Sequence[Row]) -> None:
        if time.monotonic() - self._shown < PLAIN_STATUS_SECONDS:
            return
        self._shown = time.monotonic()
        parts = [f"{row.replica} {row.state} {_loss(row)}" for row in rows]
        step = max(row.step for row in rows)
        self.tell(self._shown - self._began, f"step {step}/{self._steps}  " + "  |  ".join(parts))

    def close(self) -> None:
        """Do nothing: this view holds nothing of the terminal."""


class LiveView:
    """Draws a table of the replicas over the last lines of the story."""

    def __init__(self, console: Console, replicas: int, steps: int) -> None:
        self._steps = steps
        self._story: deque[Text] = deque(maxlen=STORY_LINES)
        self._rows: Sequence[Row] = [Row(index, "starting", 0, (), 0) for index in range(replicas)]
        self._began = time.monotonic()
        self._drawn = 0.0
        self._live = Live(self._render(), console=console, auto_refresh=False, transient=False)
        self._live.start(refresh=True)

    def tell(self, seconds: float, text: str, style: str = "") -> None:
        self._story.append(Text.assemble((f"{seconds:6.2f} s  ", "dim"), (text, style)))

    def show(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        if time.monotonic() - self._drawn >= REFRESH_SECONDS:
            self._draw()

    def close(self) -> None:
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        step = max(row.step for row in self._rows)
        seconds = time.monotonic() - self._began
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        bar.add_row(
            ProgressBar(total=self._steps, completed=step), f"step {step} of {self._steps}   {seconds:.0f} s"
        )
        story = Text(no_wrap=True, overflow="ellipsis")
        for line in self._story:
            story.append_text(line).append("\n")
        return Group(
            Panel(_table(self._rows), title="replica groups", border_style="dim"),
            Panel(story, title="events", border_style="dim", height=STORY_LINES + 2),
            bar,
        )


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, expand=True, pad_edge=False)
    table.add_column("replica")
    table.add_column("state")
    for name in ("step", "loss", "participants"):
        table.add_column(name, justify="right")
    table.add_column("loss so far", ratio=1, no_wrap=True)
    for row in rows:
        style = STATE_STYLES[row.state]
        state = f"[{style}]{escape(row.state)}[/]"
        table.add_row(
            str(row.replica),
            state,
            str(row.step),
            _loss(row),
            str(row.participants or "-"),
            sparkline(row.losses),
        )
    return table


def _loss(row: Row) -> str:
    return f"{row.losses[-1]:.3f}" if row.losses else "-"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Return the means of `width` equal parts of `values` as a row of bars."""
    count = min(width, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
