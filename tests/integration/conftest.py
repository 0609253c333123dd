"""What every integration test needs: an environment that does not depend on who runs the tests."""

from __future__ import annotations

import os
import re

import pytest

OURS = re.compile(r"TORCHFT_.*|TORCHELASTIC_.*|MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)")


@pytest.fixture(autouse=True)
def _without_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the project reads is inherited from the shell."""
    for variable in filter(OURS.fullmatch, list(os.environ)):
        monkeypatch.delenv(variable)
