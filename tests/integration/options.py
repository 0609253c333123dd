"""The options that a test gives a worker: one class for the harness and for the worker."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torchft_like.testing.training import WIDTH


@dataclass(frozen=True)
class WorkerOptions:
    """How one rank trains; the harness fills in the first two fields.

    Attributes:
        name: of the replica group.
        index: position of the group's bit in the ledger (see `invariants.Commit`).
        faults: planned faults as `faults.Fault` reads them.
        steps: end of the script, in steps that this process has committed.
        pause_s: work outside of the collectives in each step.
        timeout_s: of operations. Above every limit of the tests: what recovers by it fails them.
        ballast_mb: extra state, so that a heal takes a while.
        backend: the process group: "gloo", "baby-gloo", "nccl" or "baby-nccl" (on a GPU), "native-gloo"
            (torch's own).
        store_port: of the store in which torch's own groups meet.
        reduce: "ddp" for DistributedDataParallel, "manager" for an allreduce of each gradient, "sharded"
            for a model that is sharded over the ranks of the group (see `sharded`).
        state: of a sharded model: "shards" for a ShardedState, "dtensors" for what `state_dict` of modules
            and optimizer return, which are DTensors, "full" for the whole tensors of `get_state_dict`.
        inner_backend: of torch's default group, which spans the replica group; empty for torch's choice.
        slices: of the state's fingerprint; 0 does not watch for divergence.
        on_divergence: name of an OnDivergence.
        width: of the model.
        began: the step, and the number of the first quorum, with which a trainer of another job comes.
        claims: the step at which a trainer says that it is, which has done none.
        job_id: as the Manager takes it.
        protocol: what its version is said to speak with other replica groups; 0: what it speaks.
        steps_kept_max: how many steps the others do while this rank heals; 0: they wait.
    """

    name: str = ""
    index: int = 0
    faults: tuple[str, ...] = ()
    steps: int = 1_000_000
    pause_s: float = 0.06
    timeout_s: float = 120.0
    quorum_timeout_s: float = 120.0
    connect_timeout_s: float = 60.0
    min_replica_size: int = 1
    use_async_quorum: bool = True
    world_size_mode: str = "DYNAMIC"
    ballast_mb: int = 0
    backend: str = "gloo"
    store_port: int = 0
    reduce: str = "ddp"
    state: str = "shards"
    inner_backend: str = ""
    slices: int = 0
    on_divergence: str = "HEAL"
    width: int = WIDTH
    began: int = 0
    claims: int = 0
    job_id: str = ""
    protocol: int = 0
    steps_kept_max: int = 0

    @property
    def device(self) -> str:
        return "cuda" if self.backend.endswith("nccl") else "cpu"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerOptions:
        fields = json.loads(text)
        return cls(**{**fields, "faults": tuple(fields["faults"])})
