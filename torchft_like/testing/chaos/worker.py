"""One rank of a replica group in a chaos run: a tiny model, trained by the public API.

It writes every step that it commits into a journal, with a digest of its parameters and a ledger of the
replicas that took part (`invariants.Commit`), and every checkpoint that it saved, or could not save. Its
state goes to healing peers through a relay that can spoil it; the engine asks for that, for a step that is
given up, for a start that joins no quorum at first, and for a process group that cannot be configured, by
putting a file into the folder of triggers (`faults`). It knows nothing of any other fault.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch import nn

from torchft_like import Manager, ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo, Restart, restartable
from torchft_like.shutdown_signals import Stop, stop_on_signals
from torchft_like.testing.chaos.orders import Order
from torchft_like.testing.faults import Faults, StepGivenUpError
from torchft_like.testing.journal import JOURNAL_ENV, Journal
from torchft_like.testing.training import (
    LocalModel,
    Loop,
    Model,
    RelayedTransport,
    SyncLoop,
    prepare_process,
)

# The place of an answer at which a fault strikes: after the head, inside the state.
SPOILT_AT_BYTES = 256 * 1024
BALLAST_BYTES = 1024 * 1024  # so that a heal takes a while
CHECKPOINT_EVERY = 5  # steps
IDLE_LOOK_S = 0.1
RESTARTS_MAX = 10**6
FIRST = Restart()


def main() -> None:
    """Train until SIGTERM; the only argument is the order."""
    prepare_process()
    order = Order.from_json(sys.argv[1])
    if order.training.restarts:
        log = logging.getLogger("torchft_like.in_process.spare")
        log.setLevel(logging.INFO)
        log.addHandler(Waiting(Journal.of_this_process()))
        restartable(max_restarts=RESTARTS_MAX)(train_again)(order)
    else:
        train(order)


def train_again(order: Order, restart: Restart = FIRST) -> None:
    """Train in a process that may have trained before, or was a spare."""
    order = order.at(int(os.environ["REPLICA_GROUP_ID"]))
    facts = {"name": order.name, "rank": int(os.environ["RANK"]), "attempt": restart.attempt}
    Journal.of_this_process().write("try", **facts, reason=restart.reason[:500])
    train(order)


def train(order: Order) -> None:
    """Train until SIGTERM."""
    training, journal = order.training, Journal.of_this_process()
    name = f"{order.name}/{os.environ.get('RANK', '0')}"
    model = (LocalModel if training.is_local else Model)(name, BALLAST_BYTES, width=training.width)
    checkpoint = Path(order.checkpoints, Path(os.environ[JOURNAL_ENV]).stem + ".checkpoint")
    faults = Faults(faults_of(order), journal)
    with make_manager(order, model, faults) as manager, stop_on_signals(manager) as stop:
        idle(order, journal, stop)
        arguments = manager, journal, order.index, training.pause_s, faults.visit
        loop = SyncLoop(model, *arguments) if isinstance(model, LocalModel) else Loop(model, *arguments)
        while not stop.requested:
            try:
                has_committed = loop.attempt_step()
            except StepGivenUpError:
                continue
            if has_committed and manager.current_step() % CHECKPOINT_EVERY == 0:
                save_checkpoint(checkpoint, manager.current_step(), model.net, journal)


class Waiting(logging.Handler):
    """Writes into the journal that this process waits for a place, as a spare."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        """Write it."""
        if "waits for a place" in record.getMessage():
            self._journal.write("waits")


def faults_of(order: Order) -> list[str]:
    """Return the faults for which the engine may ask, each by a file; docs/testing.md says what they are."""
    folder, name = order.triggers, order.name
    return [
        f"give-up@backward@{folder}/give-up.{name}",
        f"raise@configure@{folder}/sick.{name}",
        f"cut-answer@heal@{folder}/truncate",
        f"flip-answer@heal@{folder}/bit-flip",
    ]


def idle(order: Order, journal: Journal, stop: Stop) -> None:
    """Be registered, and do nothing, for as long as the engine wants, which it has written into a file."""
    trigger = Path(order.triggers, f"idle.{order.name}")
    try:
        seconds = float(trigger.read_text())
        trigger.unlink()
    except FileNotFoundError:
        return
    journal.write("idle", seconds=seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stop.requested:
        time.sleep(IDLE_LOOK_S)


def save_checkpoint(path: Path, step: int, net: nn.Module, journal: Journal) -> None:
    """Save the parameters. If that fails, the last good ones stay, that is recorded, and training goes on."""
    content = b"".join(tensor.detach().numpy().tobytes() for tensor in net.state_dict().values())
    unfinished = path.with_suffix(".unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        journal.write("checkpoint_failed", step=step, errno=name, reason=str(error))
    else:
        journal.write("checkpoint", step=step)


def make_manager(order: Order, model: Model, faults: Faults) -> Manager:
    """Make the Manager of this rank; its addresses come from the environment."""
    timeout = timedelta(seconds=order.training.timeout_s)
    host = os.environ["CHAOS_HOST"]
    is_baby = order.training.backend == "baby-gloo"
    group: ProcessGroup = ProcessGroupBabyGloo(timeout) if is_baby else ProcessGroupGloo(timeout)
    return Manager(
        pg=faults.in_configure(group),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=1,
        use_async_quorum=not order.training.is_local,
        timeout=timeout,
        quorum_timeout=timedelta(seconds=order.training.quorum_timeout_s),
        replica_id=order.name,
        hostname=host,
        checkpoint_transport=RelayedTransport(faults.in_answers(SPOILT_AT_BYTES), timeout, host),
    )


if __name__ == "__main__":
    main()
