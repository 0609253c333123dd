"""The TorchX component of a job: an app for `torchx run`, with torchft's name and arguments.

    torchx run --scheduler local_cwd PATH/torchft_like/torchx.py:hsdp --replicas 2 --script train.py -- --lr 1

Each replica group is a role, and each of its ranks a replica of that role, which runs an agent of torchrun's
for this rank alone, so that the end of one rank ends no other (docs/launchers.md). The lighthouse is started
apart. TorchX loads this file by itself, and reads the types of the arguments, so they are not postponed.
"""

import os
import shlex
from types import SimpleNamespace
from typing import Dict, Optional  # noqa: UP035 - TorchX takes these forms only

try:
    from torchx import specs
except ImportError:  # without TorchX what is below is not called
    specs = SimpleNamespace(AppDef=object)

FIRST_PORT = 29600


def hsdp(
    *script_args: str,
    replicas: int = 2,
    workers_per_replica: int = 1,
    max_restarts: int = 10,
    script: str = "train_ddp.py",
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    image: str = "",
    h: Optional[str] = None,  # noqa: UP045
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,  # noqa: N803 - torchft's
) -> specs.AppDef:
    """Describe a job of replica groups.

    Args:
        script_args: the arguments of the script.
        replicas: how many replica groups.
        workers_per_replica: how many ranks each has.
        max_restarts: how often torchrun starts a rank again that has failed.
        script: what torchrun runs.
        env: variables of every rank; without `gpu` no CUDA device is seen.
        image: the container image.
        h: a named resource of TorchX, in place of the next three.
        cpu: processors of a rank.
        gpu: GPUs of a rank.
        memMB: memory of a rank, in MB.
    """
    if replicas < 1 or workers_per_replica < 1:
        raise ValueError("replicas and workers_per_replica must be 1 or more")
    variables = {"TORCHFT_LIGHTHOUSE": os.environ.get("TORCHFT_LIGHTHOUSE", "http://localhost:29510")}
    if not gpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    command = shlex.join([*([script] if script else []), *script_args]).replace("$", "$$")
    roles = [
        specs.Role(
            name=f"replica_{group}",
            image=image,
            min_replicas=workers_per_replica,
            num_replicas=workers_per_replica,
            resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
            max_retries=0,
            env={
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": str(replicas),
                **variables,
                **(env or {}),
            },
            entrypoint="sh",
            args=[
                "-c",
                f"exec torchrun --nnodes={workers_per_replica} --node-rank={specs.macros.replica_id} "
                f"--nproc-per-node=1 --master-addr=$${{{specs.macros.rank0_env}:-localhost}} "
                f"--master-port={FIRST_PORT + group} --max-restarts={max_restarts} {command}",
            ],
        )
        for group in range(replicas)
    ]
    return specs.AppDef(name="torchft", roles=roles)
