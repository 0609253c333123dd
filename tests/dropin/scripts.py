"""The upstream scripts: what is installed, what is run, and what it needs that the machine lacks.

A script that is not run says why. To try another one, add a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks import peer

# The packages that torchft_like needs, in the versions that constraints.txt pins.
OURS = ("torch", "numpy", "grpcio", "protobuf", "psutil", "pyzmq", "isal", "uvicorn", "prometheus-client")

RELEASE, NIGHTLY = str(peer.RELEASE), str(peer.NIGHTLY)
ALIAS = "torchft_like.as_torchft"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=3")


@dataclass(frozen=True)
class Script:
    """One script of another project.

    Attributes:
        name: of the row.
        source: the package that the script is in, with its version.
        requirements: of its environment, besides `OURS`.
        without_dependencies: packages that would bring more than the script uses.
        torch: the version, where the script needs another one than constraints.txt pins.
        command: after the interpreter, of one replica group; `{replica}`, `{data}` (the made tokenizer
            and texts), `{folder}` (its working directory), `{shared}` (one of all groups) and `{sources}`
            (unpacked source distributions) are filled in.
        ranks: of each replica group.
        steps: to go on for after the kill and the heal.
        variables: of its environment.
        supplies: what `stage/sitecustomize.py` adds.
        optimizer: the class of the optimizer after whose steps replicas are equal; any if it is empty.
        min_replicas: of the lighthouse: with two, the survivor waits for the group that was killed.
        limit_s: from the start to the verdict, without installing.
        not_run: why it is not run; empty for a script that is.
        saves: it writes checkpoints: all of the job is killed, too, and has to go on from the newest.
        starts_all: one command starts all replica groups.
        has_lighthouse: it starts a lighthouse itself.
        environment: the name of its environment; the row's if it is empty.
    """

    name: str
    source: str
    requirements: tuple[str, ...] = ()
    without_dependencies: tuple[str, ...] = ()
    torch: str = ""
    command: tuple[str, ...] = ()
    ranks: int = 1
    steps: int = 3
    variables: dict[str, str] = field(default_factory=dict)
    supplies: str = ""
    optimizer: str = ""
    min_replicas: int = 1
    limit_s: float = 180.0
    not_run: str = ""
    saves: bool = False
    starts_all: bool = False
    has_lighthouse: bool = False
    environment: str = ""


_TRAIN_DDP = ("torchdata==0.11.0", "pillow==13.0.0")
_TITAN = {
    "TORCHDYNAMO_DISABLE": "1",  # to compile for a CPU takes longer than the rest of the run
    "HF_HUB_OFFLINE": "1",
    # Otherwise torchrun's restarted workers find Gloo's addresses of those before them, and call these.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

SCRIPTS = (
    Script(
        name="torchft: train_ddp.py",
        source=RELEASE,
        requirements=_TRAIN_DDP,
        without_dependencies=("torchvision==0.28.0",),  # brings a torch for CUDA: gigabytes
        command=(*TORCHRUN, "-m", ALIAS, "{sources}/torchft-0.2.0/train_ddp.py"),
        steps=2,
        variables={"REPLICA_GROUP_ID": "{replica}", "NUM_REPLICA_GROUPS": "2"},
        supplies="images",
        limit_s=420.0,
    ),
    Script(
        name="torchft nightly: torchx component, train_ddp.py",
        source=NIGHTLY,
        requirements=(*_TRAIN_DDP, "torchx==0.7.0"),
        without_dependencies=("torchvision==0.28.0",),
        command=(
            *("-m", "torchx.cli.main", "run", "--scheduler", "local_cwd"),
            *("{sources}/nightly/torchft/torchx.py:hsdp", "--replicas", "2", "--script=-m"),
            *("--", ALIAS, "{sources}/torchft-0.2.0/train_ddp.py"),
        ),
        starts_all=True,
        supplies="images",
        limit_s=420.0,
    ),
    *(
        Script(
            name=f"torchtitan 0.3: debug model, FSDP2{', DiLoCo' if semi_syncs else ''}",
            source="torchtitan==0.3.0",
            environment="torchtitan 0.3",
            requirements=("torchtitan==0.3.0",),
            torch="2.14.1",  # for `torch.distributed.set_timeout`
            command=(
                *(*TORCHRUN, "--nproc-per-node=2", "-m", ALIAS, "-m", "torchtitan.train"),
                *("--module", "titan_config", "--config", "debug_model"),
                *("--hf-assets-path", "{data}/tokenizer", "--dataloader.dataset-path", "{data}/texts"),
                *("--training.seq-len", "64", "--training.local-batch-size", "2"),
                *("--training.steps", "100000"),
                # The configuration's own method is DiLoCo in two fragments, every ten steps.
                *(() if semi_syncs else ("--fault-tolerance.semi-sync-method", "None")),
                *("--fault-tolerance.process-group", "gloo"),
                *("--fault-tolerance.replica-id", "{replica}", "--fault-tolerance.group-size", "2"),
                *("--parallelism.data-parallel-shard-degree", "2"),
                *("--parallelism.spmd-backend", "partial_dtensor"),
                *("--checkpoint.enable", "--checkpoint.interval", "1000000" if semi_syncs else "4"),
                *("--checkpoint.async-mode", "async"),
                *("--profiler.no-enable-profiling", "--validator.no-enable"),
                *("--lr-scheduler.warmup-steps", "0", "--lr-scheduler.min-lr-factor", "1.0"),
                *("--dump-folder", "{folder}/out" if semi_syncs else "{shared}/out"),
            ),
            ranks=2,
            variables=_TITAN,
            supplies="accelerator",
            saves=not semi_syncs,
            limit_s=180.0 if semi_syncs else 420.0,
            optimizer="SGD" if semi_syncs else "",  # the outer one
            min_replicas=2 if semi_syncs else 1,
        )
        for semi_syncs in (False, True)
    ),
    Script(
        name="torchtitan 0.2: debug model, FSDP2",
        source="torchtitan==0.2.2",
        requirements=("torchtitan==0.2.2", "triton==3.9.0"),
        command=(
            *(*TORCHRUN, "--nproc-per-node=2", "-m", ALIAS, "-m", "torchtitan.experiments.ft.train"),
            *("--model.name", "llama3", "--model.flavor", "debugmodel"),
            *("--model.hf_assets_path", "{data}/tokenizer", "--training.dataset_path", "{data}/texts"),
            *("--training.dataset", "c4_test", "--training.seq_len", "64"),
            *("--training.local_batch_size", "2", "--training.steps", "100000"),
            *("--fault_tolerance.enable", "--fault_tolerance.process_group", "gloo"),
            *("--fault_tolerance.replica_id", "{replica}", "--fault_tolerance.group_size", "2"),
            *("--parallelism.data_parallel_shard_degree", "2"),
            *("--checkpoint.enable", "--checkpoint.interval", "1000000"),
            *("--lr_scheduler.warmup_steps", "0", "--lr_scheduler.min_lr_factor", "1.0"),
            *("--job.dump_folder", "{folder}/out"),
        ),
        ranks=2,
        variables=_TITAN,
        supplies="accelerator",
    ),
    Script(
        name="Ray Train: TorchftConfig",
        source="ray==2.60.0",
        requirements=("ray[train]==2.60.0",),
        command=("-m", ALIAS, "-m", "ray_train", "{folder}/storage"),
        variables={"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        steps=50,
        starts_all=True,
        has_lighthouse=True,
    ),
    *(
        Script(
            name=f"torchft: train_diloco.py{', streaming' if streams else ''}",
            source=RELEASE,
            environment="torchft: train_diloco.py",
            requirements=("torchdata==0.11.0", "tensorboard==2.21.0"),
            command=(*TORCHRUN, "-m", ALIAS, "{sources}/torchft-0.2.0/train_diloco.py"),
            variables={"REPLICA_GROUP_ID": "{replica}", "USE_STREAMING": str(streams)},
            supplies="tables",
            optimizer="SGD",  # the outer one: between two syncs each replica has parameters of its own
            min_replicas=2,  # alone the survivor would do its 15 syncs while the other one starts
        )
        for streams in (False, True)
    ),
    Script(name="torchft nightly: examples/slurm/runner.py", source=NIGHTLY, not_run="it submits to Slurm"),
    Script(
        name="torchft: examples/monarch",
        source=RELEASE,
        not_run="it trains a torchtitan older than 0.3 on GPUs, under a Monarch controller",
    ),
)
