"""What an import brings along."""

import subprocess
import sys
import tomllib
from types import ModuleType

import pytest

import torchft_like
from tests.conftest import ROOT
from torchft_like import *  # noqa: F403 - for mypy, which has to find the names, too

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
CALLS = {
    command: f"from {module} import {function}; {function}()"
    for command, (module, function) in ((name, origin.split(":")) for name, origin in SCRIPTS.items())
}
MODULES = ("lighthouse", "torchft_like.as_torchft", "torchft_like.chaos")
COMMANDS = [["-c", call] for call in CALLS.values()] + [["-m", module] for module in MODULES]
TORCH_LAST = """
import importlib.util, sys, torchft_like
assert "torch" not in sys.modules and importlib.util.find_spec("torch")
import torch.distributed as dist
"""
IN_A_THREAD = """
import threading, torchft_like
load = lambda: __import__("torchft_like.process_group")
threads = [threading.Thread(target=load), threading.Thread(target=__import__, args=["torch"])]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
import torch.distributed as dist
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("option", ["--help", "--version"])
@pytest.mark.parametrize("command", COMMANDS, ids=[*CALLS, *MODULES])
def test_a_command_explains_itself_without_torch_or_grpc(command: list[str], option: str) -> None:
    done = run("-X", "importtime", *command, option)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
    assert "argparse" in loaded or "torchft_like" in loaded, "what was loaded is known"
    assert loaded & {"torch", "numpy", "grpc", "psutil", "zmq", "uvicorn", "prometheus_client"} == set()


USE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("torchft-gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(1); dist.all_reduce(tensor); dist.destroy_process_group()
assert torch.__loader__ is torch.__spec__.loader and "exec_module" not in vars(torch.__loader__)
assert not any("torchft" in type(finder).__module__ for finder in sys.meta_path)
"""


@pytest.mark.parametrize("load", [TORCH_LAST, IN_A_THREAD])
def test_torch_that_is_imported_last_knows_the_backends(load: str) -> None:
    done = run("-c", load + USE)
    assert done.returncode == 0, done.stderr


# Programs in forks of a process that has torch loaded, and nothing of ours: to load it takes seconds.
IN_FORKS = """
import os, sys, torch.distributed
for program in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        exec(program)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        print(program)
"""
LEAN = """
import sys, torchft_like.process_group
assert "grpc" not in sys.modules
import torchft_like.manager
assert "torch.distributed.tensor" not in sys.modules  # half a second; a script with DTensors has loaded it
import torchft_like.coordination
assert "lighthouse.server" in sys.modules
assert not {"uvicorn", "prometheus_client", "h11", "click", "lighthouse.page"} & set(sys.modules)
"""
ALIASED = """
import sys, torchft_like.as_torchft
before = len(sys.path)
torchft_like.as_torchft.install()
assert len(sys.path) == before
from importlib.util import find_spec
assert find_spec("torchft") and find_spec("torchft.manager")
assert find_spec("torchft.no_such_module") is None
import torchft, torchft_like; assert torchft is torchft_like
import torchft.process_group as theirs, torchft_like.process_group as ours
assert theirs is ours
import torchft.data
assert torchft.data.__spec__.name == torchft.data.__name__ == "torchft_like.data"
"""


def test_each_part_can_be_the_first_to_be_imported_and_brings_no_more_than_it_needs() -> None:
    parts = (*torchft_like._NAMES, "manager_server.server", "group_coordinator", "gang", "checkpointing")
    programs = [
        ALIASED,
        LEAN,
        f"import torchft_like\n{USE}",
        *(f"import torchft_like.{part}" for part in parts),
    ]
    done = run("-W", "ignore", "-c", IN_FORKS, *programs)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_every_public_name_can_be_imported() -> None:
    names = vars(torchft_like)["__all__"]
    assert [name for name in names if getattr(torchft_like, name, None) is None] == []
    assert Manager is torchft_like.Manager  # noqa: F405


@pytest.mark.parametrize("package", ["torchft_like", "torchft_like.gang", "torchft_like.group_coordinator"])
def test_a_star_brings_no_modules(package: str) -> None:
    names: dict[str, object] = {}
    exec(f"from {package} import *", names)
    assert [name for name, value in names.items() if isinstance(value, ModuleType)] == []


def test_the_alias_is_the_wrapper_not_torchs_optimizer() -> None:
    assert Optimizer is torchft_like.OptimizerWrapper  # noqa: F405


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(torchft_like, "Nothing")
