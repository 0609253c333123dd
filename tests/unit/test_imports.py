"""What an import brings along."""

import subprocess
import sys
import tomllib

import pytest

import torchft_like
from tests.conftest import ROOT

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
CALLS = {command: f"from {origin.replace(':', ' import ')}; main()" for command, origin in SCRIPTS.items()}
MODULES = ("lighthouse", "torchft_like.as_torchft", "torchft_like.chaos")
COMMANDS = [["-c", call] for call in CALLS.values()] + [["-m", module] for module in MODULES]
TORCH_LAST = "import torchft_like, sys; assert 'torch' not in sys.modules; import torch.distributed as dist"
TORCH_FIRST = "import torch.distributed as dist, torchft_like"
FOUND_FIRST = (
    "import torchft_like, importlib.util; importlib.util.find_spec('torch'); import torch.distributed as dist"
)
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


@pytest.mark.parametrize("load", [TORCH_LAST, TORCH_FIRST, FOUND_FIRST, IN_A_THREAD])
def test_torch_knows_the_backends_whichever_is_imported_first(load: str) -> None:
    use = (
        "dist.init_process_group('torchft-gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "import torch, sys; tensor = torch.ones(1); dist.all_reduce(tensor); dist.destroy_process_group()\n"
        "assert torch.__loader__ is torch.__spec__.loader and 'exec_module' not in vars(torch.__loader__)\n"
        "assert not any('torchft' in type(finder).__module__ for finder in sys.meta_path)"
    )
    done = run("-c", f"{load}\n{use}")
    assert done.returncode == 0, done.stderr


def test_a_manager_does_not_load_dtensors() -> None:
    """They take half a second, and a script that has some has loaded them."""
    done = run("-c", "import sys, torchft_like.manager; print('torch.distributed.tensor' in sys.modules)")
    assert done.stdout.split() == ["False"], done.stderr


def test_a_trainer_loads_nothing_of_the_lighthouses_page() -> None:
    program = "import sys, torchft_like.manager, torchft_like.coordination; print(*sys.modules)"
    loaded = set(run("-c", program).stdout.split())
    assert "lighthouse.server" in loaded
    assert loaded & {"uvicorn", "prometheus_client", "h11", "click", "lighthouse.page"} == set()


EACH_ALONE = """
import importlib, os, sys, torch, grpc
for module in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        importlib.import_module(f"torchft_like.{module}")
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        print(module)
"""


def test_each_part_can_be_the_first_to_be_imported() -> None:
    parts = (*torchft_like._NAMES, "manager_server.server", "group_coordinator", "gang", "checkpointing")
    done = run("-W", "ignore", "-c", EACH_ALONE, *parts)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in torchft_like.__all__ if getattr(torchft_like, name, None) is None] == []


def test_the_alias_is_the_wrapper_not_torchs_optimizer() -> None:
    assert torchft_like.Optimizer is torchft_like.OptimizerWrapper


def test_process_groups_load_no_grpc() -> None:
    program = "import sys, torchft_like.process_group; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(torchft_like, "Nothing")
