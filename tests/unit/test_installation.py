"""What is installed says its version, and another project's lighthouse is told from ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lighthouse
import torchft_like
from tests.conftest import ROOT


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *command],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_both_packages_say_one_version(tmp_path: Path) -> None:
    assert torchft_like.__version__ == lighthouse.__version__
    said = run(tmp_path, "-m", "lighthouse", "--version")
    assert (said.returncode, said.stdout) == (0, f"lighthouse of torchft-like {lighthouse.__version__}\n")


def test_a_lighthouse_of_another_project_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lighthouse").mkdir()
    (tmp_path / "lighthouse" / "__init__.py").write_text("__version__ = '1.0.0'\n")
    refused = run(tmp_path, "-c", "import torchft_like")
    assert refused.returncode == 1
    assert f"ImportError: {tmp_path}/lighthouse/__init__.py is of another project" in refused.stderr


def test_two_projects_in_one_folder_are_refused(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lighthouse", tmp_path / "lighthouse")
    (tmp_path / "lighthouse-1.0.0.dist-info").mkdir()
    refused = run(tmp_path, "-m", "lighthouse", "--version")
    assert refused.returncode == 1
    assert "pip uninstall lighthouse" in refused.stderr


# The package page.


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / PROJECT["readme"]).read_text()


def test_every_link_and_picture_is_absolute() -> None:
    targets = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", PAGE)
    assert [target for target in targets if not "".join(target).startswith("https://")] == []


@pytest.mark.parametrize("extra", re.findall(r"torchft-like\[(\w+)\]", PAGE))
def test_an_extra_that_is_named_exists(extra: str) -> None:
    assert extra in PROJECT["optional-dependencies"]


def test_the_versions_of_torch_are_those_that_are_required() -> None:
    (bounds,) = (each for each in PROJECT["dependencies"] if each.startswith("torch>"))
    first, beyond = re.findall(r"2\.(\d+)", bounds)
    assert f"torch 2.{first} to 2.{int(beyond) - 1}" in PAGE
