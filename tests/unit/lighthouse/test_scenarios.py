"""The quorum core tells the stories in scenarios/*.txt word for word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.lighthouse.scenario import replay

FOLDER = Path(__file__).parent / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.one_quorum_per_step
@pytest.mark.monotonic
@pytest.mark.no_regress
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_core_gives_the_golden_transcript(path: Path) -> None:
    golden = path.read_text()
    transcript = replay(golden)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(transcript)
    else:
        assert transcript == golden


def test_there_are_scenarios() -> None:
    assert FILES
