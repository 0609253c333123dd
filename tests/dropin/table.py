"""The outcomes as a table, as JSON, and as the page docs/dropin.md, which is made from the JSON alone."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from tests.conftest import ROOT
from tests.dropin.run import Outcome
from tests.dropin.scripts import SCRIPTS

RESULTS = ROOT / "benchmarks" / "results" / "dropin.json"
PAGE = ROOT / "docs" / "dropin.md"
TEXT = Path(__file__).with_name("page.md")

HEAD = ("script", "of", "killed at step", "back after", "healed", "equal after", "all killed: repeated", "")


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with a row for each script."""
    rows = [HEAD, tuple("---" for _ in HEAD), *map(_cells, outcomes)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def save(outcomes: Sequence[Outcome]) -> None:
    """Write the JSON and the page; scripts that were not asked for keep what is saved of them."""
    known = {script["name"]: Outcome(**script) for script in json.loads(RESULTS.read_text())["scripts"]}
    known |= {outcome.name: outcome for outcome in outcomes}
    outcomes = [known[script.name] for script in SCRIPTS if script.name in known]
    document = {
        "taken": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} processors, {platform.system()}, Python {platform.python_version()}",
        "scripts": [asdict(outcome) for outcome in outcomes],
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    PAGE.write_text(page())


def page() -> str:
    """Return docs/dropin.md as the saved JSON says."""
    document = json.loads(RESULTS.read_text())
    outcomes = [Outcome(**script) for script in document["scripts"]]
    passed = sum(not outcome.failed and not outcome.not_run for outcome in outcomes)
    return TEXT.read_text().format(
        table=table(outcomes),
        passed=passed,
        count=len(outcomes),
        taken=document["taken"],
        machine=document["machine"],
    )


def _cells(outcome: Outcome) -> tuple[str, ...]:
    verdict = "passes"
    if outcome.not_run:
        verdict = f"not run: {outcome.not_run}"
    elif outcome.failed:
        verdict = f"**fails**: {outcome.failed.splitlines()[0]}"
    numbers = (
        (outcome.killed_at_step, "{}"),
        (outcome.back_after_s, "{:.0f} s"),
        (outcome.healed_bytes, "{:,} B"),
        (outcome.equal_steps, "{} steps"),
        (outcome.repeated_steps, "{} steps"),
    )
    shown = ("" if number is None else form.format(number) for number, form in numbers)
    return (f"`{outcome.name}`", outcome.source, *shown, verdict)
