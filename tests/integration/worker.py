"""One rank of a replica group, as the failure tests start it: a tiny model, trained by the public API.

The environment is what torchrun would set. What the worker commits it writes into a journal (see
`invariants.Commit`), and it injects into itself those faults that need an exact place (see `faults`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from tests.integration.options import WorkerOptions
from tests.integration.sharded import ShardedModel
from tests.standby import stand_by
from torchft_like import (
    Manager,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    WorldSizeMode,
)
from torchft_like.divergence import OnDivergence, StateFingerprint
from torchft_like.manager_server import server
from torchft_like.shutdown_signals import stop_on_signals
from torchft_like.testing.faults import Faults
from torchft_like.testing.journal import Journal
from torchft_like.testing.training import Loop, Model, RelayedTransport, prepare_process

STATE_BYTES_BEFORE_FAULT = 1024 * 1024
NATIVE_WORLD = 8


def main() -> None:
    """Train as the options in the only argument say, until the steps are done or SIGTERM comes."""
    options = WorkerOptions.from_json(sys.argv[1])
    if options.backend == "baby-gloo":
        stand_by()
    prepare_process()
    journal = Journal.of_this_process()
    faults = Faults(options.faults, journal)
    model = ShardedModel(options) if options.reduce == "sharded" else plain_model(options)
    faults.flip = model.flip
    with make_manager(options, model, faults) as manager, stop_on_signals(manager) as stop:
        if options.began:
            manager.load_state_dict(dict.fromkeys(("step", "first_quorum_id"), options.began))
        if options.claims:
            manager.load_state_dict({"step": options.claims})
        loop = Loop(model, manager, journal, options.index, options.pause_s, faults.visit)
        if options.steps_kept_max:
            manager.register_replay(loop.replay(), options.steps_kept_max)
        if options.slices:
            manager.watch_divergence(fingerprint_of(model, options))
        steps_done = 0
        while steps_done < options.steps and not stop.requested:
            if loop.attempt_step():
                steps_done += 1
                if isinstance(model, ShardedModel):
                    model.write(journal, manager.current_step())


def plain_model(options: WorkerOptions) -> Model:
    """Return the kit's model, which every rank has as a whole."""
    name = f"{options.name}/{os.environ['RANK']}"
    return Model(name, options.ballast_mb * 1024 * 1024, options.device, options.reduce, options.width)


BACKENDS: dict[str, Callable[[timedelta], ProcessGroup]] = {
    "gloo": ProcessGroupGloo,
    "baby-gloo": ProcessGroupBabyGloo,
    "nccl": ProcessGroupNCCL,
    "baby-nccl": ProcessGroupBabyNCCL,
}


def make_group(options: WorkerOptions, faults: Faults, timeout: timedelta) -> dist.ProcessGroup:
    """Return the group that the options ask for."""
    if options.backend != "native-gloo":
        return faults.in_configure(BACKENDS[options.backend](timeout))
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", options.store_port, is_master=False, wait_for_workers=False),  # type: ignore[attr-defined]
        rank=options.index,  # of a group that is there once at a time
        world_size=NATIVE_WORLD,
        timeout=timeout,
        enable_reconfigure=True,  # type: ignore[call-arg] # torch has it from 2.14 on
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def make_manager(options: WorkerOptions, model: Model, faults: Faults) -> Manager:
    """Return the Manager that the options ask for; the environment says the rest."""
    server.PROTOCOL = options.protocol or server.PROTOCOL
    timeout = timedelta(seconds=options.timeout_s)
    return Manager(
        pg=make_group(options, faults, timeout),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=options.min_replica_size,
        use_async_quorum=options.use_async_quorum,
        timeout=timeout,
        quorum_timeout=timedelta(seconds=options.quorum_timeout_s),
        connect_timeout=timedelta(seconds=options.connect_timeout_s),
        world_size_mode=WorldSizeMode[options.world_size_mode],
        replica_id=options.name,
        job_id=options.job_id,
        checkpoint_transport=RelayedTransport(faults.in_answers(STATE_BYTES_BEFORE_FAULT), timeout),
    )


def fingerprint_of(model: Model, options: WorkerOptions) -> StateFingerprint:
    """Return a fingerprint of all that the model has."""
    return StateFingerprint(
        model.watched(),
        [model.optimizer],
        slices=options.slices,
        on_divergence=OnDivergence[options.on_divergence],
    )


if __name__ == "__main__":
    main()
