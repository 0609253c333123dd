"""`import torchft` where this package has torchft's place: in a process, in its script, in its children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SAME = "import torchft, torchft_like; assert torchft is torchft_like"


def run(*command: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    call = [sys.executable, *command]
    return subprocess.run(call, env=env, cwd=folder, capture_output=True, text=True, check=False)


SPAWNING = """
import sys, multiprocessing, torchft

class Payload:
    pass

def child(payload):
    import torchft, torchft_like
    assert torchft is torchft_like
    assert type(payload) is Payload

if __name__ == "__main__":
    assert sys.argv[1:] == ["-x", "1"]
    for method in "fork", "spawn", "forkserver":
        process = multiprocessing.get_context(method).Process(target=child, args=(Payload(),))
        process.start(); process.join()
        assert process.exitcode == 0, method
"""
LOADING = """
import torch, torch.multiprocessing
from torch.utils.data import DataLoader, Dataset
import torchft

class Numbers(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        import torchft, torchft_like
        assert torchft is torchft_like
        return torch.tensor([index])

def collate(samples):
    return torch.stack(samples)

def work(rank, data):
    assert type(data) is Numbers

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(Numbers(),))
    loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context="forkserver", collate_fn=collate)
    assert [batch.item() for batch in loader] == [0, 1]
"""
AFTERWARDS = """
import multiprocessing, threading

def child():
    pass

def later():
    threading.main_thread().join()
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start(); process.join()
    print("the child of a thread that outlived the script ended with", process.exitcode)

if __name__ == "__main__":
    threading.Thread(target=later).start()
"""


@pytest.mark.parametrize("call", [["script.py"], ["-m", "script"]])
def test_children_of_a_script_can_import_it_and_know_its_classes(tmp_path: Path, call: list[str]) -> None:
    (tmp_path / "script.py").write_text(f"{SPAWNING}    assert sys.path[0] == {str(tmp_path)!r}\n")
    done = run("-m", "torchft_like.as_torchft", *call, "-x", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr


SHOWING = f"{SAME}; import sys; print(__name__, sys.argv)"


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (["FOLDER", "-x"], "__main__ ['FOLDER', '-x']"),
        (["-c", SHOWING, "--lr", "1"], "__main__ ['-c', '--lr', '1']"),
        (["-m", "package.train", "--lr"], "__main__ ['FOLDER/package/train.py', '--lr']"),
    ],
    ids=["a folder with a main module", "a text", "a module"],
)
def test_it_is_run_as_python_does(tmp_path: Path, call: list[str], shown: str) -> None:
    for name in ("__main__.py", "package/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SHOWING)
    words = [word.replace("FOLDER", str(tmp_path)) for word in call]
    done = run("-m", "torchft_like.as_torchft", *words, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.stdout == shown.replace("FOLDER", str(tmp_path)) + "\n", done.stderr


@pytest.mark.parametrize("call", [["-m", "no_such"], ["-m", "no_such.module"], ["no_such.py"]], ids=" ".join)
def test_what_does_not_exist_cannot_be_run(call: list[str]) -> None:
    done = run("-m", "torchft_like.as_torchft", *call)
    assert (done.returncode, call[-1] in done.stderr, "Traceback" in done.stderr) == (1, True, False)


def test_workers_of_torch_know_the_classes_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOADING)
    done = run("-m", "torchft_like.as_torchft", str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr


def test_a_script_stays_the_main_module_until_its_last_thread_has_ended(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(AFTERWARDS)
    done = run("-m", "torchft_like.as_torchft", str(tmp_path / "script.py"))
    assert done.stdout.endswith("ended with 0\n"), done.stderr


def test_a_module_that_is_not_here_is_named_with_the_page_that_says_why() -> None:
    done = run("-m", "torchft_like.as_torchft", "-c", "from torchft.local_sgd_of_tomorrow import DiLoCo")
    assert "ModuleNotFoundError: No module named 'torchft.local_sgd_of_tomorrow'" in done.stderr
    assert "docs/torchft-names.md" in done.stderr


def test_what_torchft_compiles_is_found_under_its_name() -> None:
    names = (
        "LighthouseServer, LighthouseClient, ManagerServer, ManagerClient, Quorum, QuorumMember, QuorumResult"
    )
    found = f"from torchft._torchft import {names}; from torchft import coordination"
    same = "assert LighthouseServer is coordination.LighthouseServer"
    done = run("-m", "torchft_like.as_torchft", "-c", f"{found}; {same}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("place", ["installed", "beside the script"])
def test_another_torchft_is_not_loaded_in_a_script_or_its_children(tmp_path: Path, place: str) -> None:
    script, other = tmp_path / "script.py", tmp_path / "other"
    script.write_text(f"{SPAWNING}")
    (other / "torchft").mkdir(parents=True)
    (other / "torchft" / "__init__.py").write_text("raise SystemExit('the other one')")
    path = str(ROOT)
    if place == "installed":
        path += f"{os.pathsep}{other}"
    else:
        (other / "torchft").rename(tmp_path / "torchft")
    done = run("-m", "torchft_like.as_torchft", str(script), "-x", "1", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    theirs = run("-c", "import torchft", folder=tmp_path, PYTHONPATH=path)
    assert theirs.stderr == "the other one\n", "which is imported where nothing of ours was called"


def test_a_torchft_that_was_imported_before_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "torchft.py").touch()
    done = run("-c", "import torchft, torchft_like.as_torchft", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert "torchft has been imported already: import torchft_like.as_torchft before it" in done.stderr


def test_without_a_script_it_says_how_to_call_it() -> None:
    assert run("-m", "torchft_like.as_torchft").stderr.startswith("usage: python -m torchft_like.as_torchft")
