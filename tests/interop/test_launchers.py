"""The recipes of docs/launchers.md under the real launchers: a rank is killed, a spare takes its place."""

from __future__ import annotations

import functools
import getpass
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lighthouse.address import LOOPBACK
from tests.conftest import ROOT
from tests.dropin.environments import python_for
from tests.dropin.scripts import SCRIPTS, Script
from tests.waiting import soon
from tools.environments import Environment, UnavailableError
from torchft_like.testing.cluster import LighthouseProcess
from torchft_like.testing.processes import Processes

# The first test of a machine installs Ray, which takes longer than a test may.
pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(1500)]

RECIPES = ROOT / "examples" / "launchers"
TRAINING = ("--steps=300", "--pause=0.05")  # a rank is killed soon after step 20
LIMIT_S = 240.0
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
VARIABLES = {"OMP_NUM_THREADS": "1", "PATH": PATH, "PYTHONPATH": str(ROOT)}
RUN = "LAUNCHERS_TEST_RUN"  # by this variable the processes of a test are found
SLURM = ("munged", "slurmctld", "slurmd", "sbatch")

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={node} CPUs=8
PartitionName=all Nodes=localhost Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path, processes: Processes) -> Iterator[dict[str, str]]:
    """Run a cluster of one host; yield the variables with which its commands find it."""
    missing = [name for name in SLURM if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: install slurmctld, slurmd, slurm-client and munge")
    if os.getuid() != 0:
        pytest.skip("slurmd has to be root to start a task")
    facts = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": tmp_path}
    with socket.create_server((LOOPBACK, 0)) as first, socket.create_server((LOOPBACK, 0)) as second:
        ports = {"controller": first.getsockname()[1], "node": second.getsockname()[1]}
    conf = tmp_path / "slurm.conf"
    conf.write_text(SLURM_CONF.format(**facts, **ports))
    key = tmp_path / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    for folder in (tmp_path, tmp_path / "state", tmp_path / "spool"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)  # munged trusts no other
    env = {**VARIABLES, "SLURM_CONF": str(conf), RUN: str(tmp_path)}
    files = {
        name: f"--{name}-file={tmp_path}/munge.{end}"
        for name, end in (("key", "key"), ("pid", "pid"), ("log", "log"), ("seed", "seed"))
    }
    processes.start(
        "munged", "--foreground", "--force", f"--socket={tmp_path}/munge.socket", *files.values(), env=env
    )
    controller = processes.start("slurmctld", "-D", "-c", "-f", str(conf), env=env)
    controller.wait_for_output("Running as primary controller|slurmctld version", LIMIT_S)
    processes.start("slurmd", "-D", "-N", "localhost", "-f", str(conf), env=env)
    yield env
    run = functools.partial(subprocess.run, env={**os.environ, **env}, check=True, capture_output=True)
    run(["scancel", f"--user={getpass.getuser()}"])
    soon(lambda: not run(["squeue", "--noheader"]).stdout, LIMIT_S)


def test_slurm_keeps_the_neighbours_of_a_rank_that_dies(
    tmp_path: Path, processes: Processes, slurm: dict[str, str]
) -> None:
    written = tmp_path / "job.txt"
    submit = "sbatch", "--wait", f"--output={written}", str(RECIPES / "train_hsdp.sbatch")
    job = processes.start(*submit, *TRAINING, env=slurm)

    def output() -> str:
        return written.read_text() if written.exists() else ""

    kill_one_rank(tmp_path, output)
    assert job.wait(LIMIT_S) == 0, output()
    check(output())


def test_ray_keeps_the_neighbours_of_a_rank_that_dies(tmp_path: Path, processes: Processes) -> None:
    python = interpreter(lambda script: script.source.startswith("ray=="))
    job = processes.start(
        str(python),
        str(RECIPES / "ray_ranks.py"),
        "--cpus=0.2",
        *("examples/train_hsdp.py", "--finish-together", *TRAINING),
        env={
            **VARIABLES,
            RUN: str(tmp_path),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
        },
    )
    kill_one_rank(tmp_path, lambda: job.output)
    assert job.wait(LIMIT_S) == 0, job.output
    check(job.output)
    assert "exit status by rank of each group: [[0, 0], [0, -9]]" in job.output


def test_torchx_runs_the_ranks_of_each_group_apart(tmp_path: Path, processes: Processes) -> None:
    python = interpreter(lambda script: "torchx" in script.name)
    with LighthouseProcess("--min_replicas=2") as lighthouse:
        job = processes.start(
            *(str(python), "-m", "torchx.cli.main", "run", "--scheduler=local_cwd"),
            *(f"{ROOT}/torchft_like/torchx.py:hsdp", "--workers_per_replica=2", "--max_restarts=0"),
            *("--script=examples/train_hsdp.py", "--", "--finish-together", "--steps=20"),
            env={
                **VARIABLES,
                "PATH": f"{python.parent}:{PATH}",
                RUN: str(tmp_path),
                "TORCHFT_LIGHTHOUSE": lighthouse.url,
            },
        )
        assert job.wait(LIMIT_S) == 0, job.output
    ends = [json.loads(line) for line in re.findall(r'\{"finished".*?\}', job.output)]
    assert sorted(end["finished"] for end in ends) == [0, 1], job.output
    assert len({end["digest"] for end in ends}) == 1


def test_the_manifests_are_what_kubernetes_takes() -> None:
    try:
        python = Environment("kubernetes-validate", ("kubernetes-validate==1.37.0",)).interpreter()
    except UnavailableError as error:
        pytest.skip(str(error))
    check = ROOT / "tests" / "interop" / "in_peer" / "check_manifests.py"
    done = subprocess.run(
        [str(python), str(check), *map(str, sorted(RECIPES.glob("*.yaml")))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kinds = [line.split()[0] for line in done.stdout.splitlines()]
    assert set(kinds) == {"Deployment", "Service", "NetworkPolicy", "JobSet", "Secret"}


def interpreter(is_it: Callable[[Script], bool]) -> Path:
    """Return the interpreter of the environment of an upstream script; the test is skipped without it."""
    try:
        return python_for(next(filter(is_it, SCRIPTS)))
    except UnavailableError as error:
        pytest.skip(str(error))


def kill_one_rank(run: Path, output: Callable[[], str]) -> None:
    """Kill rank 1 of group 1 once both groups train together."""
    assert soon(lambda: re.search(r"step [1-9]\d+ .* participants 2", output()), LIMIT_S), output()
    wanted = {("RANK", "1"), ("REPLICA_GROUP_ID", "1"), (RUN, str(run))}
    (rank,) = (
        process
        for process in psutil.process_iter(["environ"])
        if wanted <= (process.info["environ"] or {}).items() and is_script(process)
        if (parent := process.parent()) and not is_script(parent)  # whose worker it would be
    )
    rank.send_signal(signal.SIGKILL)


def is_script(process: psutil.Process) -> bool:
    return process.cmdline()[1:2] == ["examples/train_hsdp.py"]


def check(output: str) -> None:
    """Check who has begun how many tries, and that both groups end with the same bits."""
    tries: dict[tuple[int, int], list[int]] = {}
    for line in re.findall(r'\{"try".*?\}', output):
        said: dict[str, Any] = json.loads(line)
        tries.setdefault((said["group"], said["rank"]), []).append(said["try"])
    assert tries == {(0, 0): [0], (0, 1): [0], (1, 0): [0, 1], (1, 1): [0, 1]}
    ends = [json.loads(line) for line in re.findall(r'\{"finished".*?\}', output)]
    assert sorted(end["finished"] for end in ends) == [0, 1]
    assert len({end["digest"] for end in ends}) == 1
