"""What is installed says its version, and another project's lighthouse is told from ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import lighthouse
import torchft_like

ROOT = Path(__file__).parents[2]


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
