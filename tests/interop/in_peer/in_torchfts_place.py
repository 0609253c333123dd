"""A pytest plugin: torchft's own tests, as they are in its package, test this package.

Its tests are found in the folder TORCHFT, and all else that they import from torchft is this package's. Two
private names of torchft, which its tests import beside the public ones, are given here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

FOLDER = Path(os.environ["TORCHFT"])
OF_TESTS = re.compile(r"torchft\.(\w+\.)*(\w+_test|_test_utils|_test(\.\w+)?)")


class TheirTests:
    """Finds torchft's modules of tests, and what these have in common."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if OF_TESTS.fullmatch(name) is None:
            return None
        place = FOLDER.joinpath(*name.split(".")[1:])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not file.exists():  # a folder without one
            return importlib.util.spec_from_loader(name, None, is_package=True)
        return importlib.util.spec_from_file_location(name, file)


sys.path.append(str(FOLDER.parent))  # for the packages that only its tests need
importlib.import_module("torchft_like.as_torchft")
sys.meta_path.insert(0, TheirTests())
torchft = importlib.import_module("torchft")
sys.modules["torchft._torchft"] = importlib.import_module("torchft.coordination")
torchft._test_utils = importlib.import_module("torchft._test_utils")  # type: ignore[attr-defined]


def manager_state_dict(manager: object) -> dict[str, object]:
    """Return what a Manager sends to a healing peer."""
    with manager._state.reading() as user:  # type: ignore[attr-defined]
        return {"user": user, "torchft": manager.state_dict()}  # type: ignore[attr-defined]


torchft.manager.Manager._manager_state_dict = manager_state_dict


def pytest_report_header() -> str:
    return f"torchft's Manager is of {torchft.Manager.__module__}"
