"""`import torchft` where this package has torchft's place: in a process, in its script, in its children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SAME = "import torchft, torchft_like; assert torchft is torchft_like"


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)


def assert_runs(program: str) -> None:
    done = run("-c", f"import torchft_like.as_torchft\n{program}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "program",
    [
        SAME,
        "import torchft.process_group as theirs, torchft_like.process_group as ours; assert theirs is ours",
        "from importlib.util import find_spec as find; assert find('torchft') and find('torchft.manager')",
        "from importlib.util import find_spec as find; assert find('torchft.no_such_module') is None",
        "import torchft.data as d; assert d.__spec__.name == d.__name__ == 'torchft_like.data'",
        "import sys; n = len(sys.path); torchft_like.as_torchft.install(); assert len(sys.path) == n",
    ],
)
def test_torchft_is_this_package(program: str) -> None:
    assert_runs(program)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_a_script_can_import_it(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys, multiprocessing, torchft\n"
        f"def child():\n    import torchft, torchft_like\n    assert torchft is torchft_like\n"
        f"if __name__ == '__main__':\n"
        f"    assert sys.argv[1:] == ['-x', '1'] and sys.path[0] == {str(tmp_path)!r}\n"
        f"    process = multiprocessing.get_context({method!r}).Process(target=child)\n"
        f"    process.start(); process.join(); sys.exit(process.exitcode)\n"
    )
    done = run("-m", "torchft_like.as_torchft", str(script), "-x", "1")
    assert done.returncode == 0, done.stderr


def test_a_module_is_run_as_python_does(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "train.py").write_text(f"{SAME}\nimport sys\nprint(__name__, __spec__.name, sys.argv[1:])\n")
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    done = run("-m", "torchft_like.as_torchft", "-m", "package.train", "--lr", "1", PYTHONPATH=path)
    assert done.stdout == "__main__ package.train ['--lr', '1']\n", done.stderr


def test_a_torchft_that_was_imported_before_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "torchft.py").touch()
    done = run("-c", "import torchft, torchft_like.as_torchft", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert "torchft has been imported already: import torchft_like.as_torchft before it" in done.stderr


def test_an_installed_torchft_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "torchft.py").write_text("raise SystemExit('the other one')")
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    done = run("-c", f"import torchft_like.as_torchft; {SAME}", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


def test_without_a_script_it_says_how_to_call_it() -> None:
    assert run("-m", "torchft_like.as_torchft").stderr.startswith("usage: python -m torchft_like.as_torchft")
