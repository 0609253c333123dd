"""Schedules come from their seed alone, and deal every kind equally often."""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from torchft_like.cli import main
from torchft_like.testing.chaos.campaign import FAILED, WRONG_ARGUMENT
from torchft_like.testing.chaos.schedule import KINDS, draw


def test_the_same_seed_gives_the_same_faults() -> None:
    assert draw(5, list(KINDS), 600, 10, 4) == draw(5, list(KINDS), 600, 10, 4)
    assert draw(5, list(KINDS), 600, 10, 4) != draw(6, list(KINDS), 600, 10, 4)


def test_every_kind_comes_equally_often() -> None:
    counts = Counter(planned.kind for planned in draw(1, list(KINDS), len(KINDS) * 100, 10, 4))
    assert set(counts.values()) == {10}


def test_faults_come_in_their_own_intervals() -> None:
    plan = draw(3, ["kill"], 100, 10, 4)
    assert [int(planned.at_s // 10) for planned in plan] == list(range(10))


@pytest.mark.parametrize(
    ("kinds", "length_s", "interval_s", "replicas"),
    [
        ([], 60, 10, 4),
        (["nothing"], 60, 10, 4),
        (["kill"], 0, 10, 4),
        (["kill"], 60, -1, 4),
        (["kill"], 60, 1, 0),
        (["kill"], math.inf, 1, 2),
        (["kill"], math.nan, 1, 2),
        (["kill"], 60, math.nan, 2),
        (["kill"], 3, 10, 2),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(
    kinds: list[str], length_s: float, interval_s: float, replicas: int
) -> None:
    with pytest.raises(ValueError, match=r"unknown kinds|must be above 0|no fault fits"):
        draw(1, kinds, length_s, interval_s, replicas)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kinds", "nothing"],
        ["--kinds", ","],
        ["--replicas", "1"],
        ["--replicas", "41"],
        ["--names", "all-the-same"],
        ["--names", "job:{index}"],
        ["--length", "nan"],
        ["--interval", "inf"],
        ["--step-time", "-1"],
        ["--baseline", "-5"],
        ["--command", "python 'train.py"],
        ["--command", "no-such-program-anywhere"],
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chaos", *arguments])
    assert ended.value.code == WRONG_ARGUMENT
    assert arguments[0] in capsys.readouterr().err


def test_the_command_writes_over_no_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chaos").mkdir()
    assert main(["chaos", "--out", str(tmp_path)]) == WRONG_ARGUMENT
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kinds", "kill-rank,baby-kill"], "kill-rank: replica groups have one rank"),
        (["--length", "3", "--interval", "10"], "no fault fits"),
    ],
)
def test_the_command_says_why_there_is_no_fault_at_all(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", *arguments]) == WRONG_ARGUMENT
    assert complaint in capsys.readouterr().err


def test_a_job_that_does_not_even_start_has_failed_and_its_logs_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("torchft_like.testing.chaos.engine.FIRST_STEP_S_MAX", 0.5)
    command = f"{sys.executable} -c 'print(\"nothing to do\"); input()'"
    assert main(["chaos", "--no-network", "--kinds", "kill", "--command", command]) == FAILED
    said = capsys.readouterr().err
    assert "no first step" in said
    [kept] = tmp_path.glob("torchft-like-*")
    assert f"logs are kept in {kept}" in said
    assert list(kept.glob("chaos/*.log"))
