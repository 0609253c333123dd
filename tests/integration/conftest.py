"""An environment for every integration test that does not depend on the shell that runs the tests."""

from __future__ import annotations

import os
import re

import pytest

OURS = re.compile(r"TORCHFT_.*|TORCHELASTIC_.*|MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)")


@pytest.fixture(autouse=True)
def _without_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove every variable that the project reads from the inherited environment."""
    for variable in filter(OURS.fullmatch, list(os.environ)):
        monkeypatch.delenv(variable)
