"""One rank of a replica group in a chaos run: a tiny model, trained by the public API.

It writes every step that it commits into a journal, with a digest of its parameters and a ledger of the
replicas that took part (`invariants.Commit`), and every checkpoint that it saved, or could not save. Its
state goes to healing peers through a relay that can spoil it; the engine asks for that, for a step that is
given up, for a start that joins no quorum at first, and for a process group that cannot be configured, by
putting a file into the folder of triggers. It knows nothing of any other fault.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn

from torchft_like import Manager, ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo, Restart, restartable
from torchft_like.shutdown_signals import Stop, stop_on_signals
from torchft_like.testing.chaos.orders import Order
from torchft_like.testing.journal import JOURNAL_ENV, Journal
from torchft_like.testing.relay import Filter, at, cut, flip_bit
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
IDLE_LOOK_S = 0.1
RESTARTS_MAX = 10**6
FIRST = Restart()
SPOILT: dict[str, Filter] = {"truncate": cut, "bit-flip": flip_bit}


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
    name, ballast_bytes = f"{order.name}/{os.environ.get('RANK', '0')}", training.state_kb * 1024
    model = (LocalModel if training.is_local else Model)(name, ballast_bytes, width=training.width)
    checkpoint = Path(order.checkpoints, Path(os.environ[JOURNAL_ENV]).stem + ".checkpoint")
    requests = Requests(order, journal)
    with make_manager(order, model, requests) as manager, stop_on_signals(manager) as stop:
        requests.idle(stop)
        arguments = manager, journal, order.index, training.pause_s, requests.visit
        loop = SyncLoop(model, *arguments) if isinstance(model, LocalModel) else Loop(model, *arguments)
        while not stop.requested:
            try:
                has_committed = loop.attempt_step()
            except StepGivenUpError:
                continue
            if has_committed and manager.current_step() % training.checkpoint_every == 0:
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


class StepGivenUpError(Exception):
    """The engine wants a step to be given up."""


class Requests:
    """What the engine asks of this worker, or of its replica group: each is a file in a folder."""

    def __init__(self, order: Order, journal: Journal) -> None:
        self._triggers, self._name = Path(order.triggers), order.name
        self._journal = journal

    def idle(self, stop: Stop) -> None:
        """Be registered, and do nothing, for as long as the engine wants."""
        if seconds := self._taken(f"idle.{self._name}"):
            self._journal.write("idle", seconds=float(seconds))
            end = time.monotonic() + float(seconds)
            while time.monotonic() < end and not stop.requested:
                time.sleep(IDLE_LOOK_S)

    def visit(self, place: str) -> None:
        """Raise in the backward pass if the engine wants this step to be given up."""
        if place == "backward" and self._taken(f"give-up.{self._name}") is not None:
            self._journal.write("given_up")
            raise StepGivenUpError

    def open_filter(self) -> Filter:
        """Return the filter of a connection of the relay, which spoils one answer if the engine wants it."""
        return at(SPOILT_AT_BYTES, self._spoil)

    def _spoil(self, data: bytes) -> bytes:
        for name, spoil in SPOILT.items():
            if self._taken(name) is not None:
                self._journal.write("spoilt", how=name)
                return spoil(data)
        return data

    def _taken(self, name: str) -> str | None:
        """Return the text of a request, which is then no more; None if there is none."""
        trigger = self._triggers / name
        try:
            text = trigger.read_text()
            trigger.unlink()
        except FileNotFoundError:
            return None
        return text


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


def make_manager(order: Order, model: Model, requests: Requests) -> Manager:
    """Make the Manager of this rank; its addresses come from the environment."""
    timeout = timedelta(seconds=order.training.timeout_s)
    host = os.environ["CHAOS_HOST"]
    return Manager(
        pg=_process_group(order, timeout),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=1,
        use_async_quorum=not order.training.is_local,
        timeout=timeout,
        quorum_timeout=timedelta(seconds=order.training.quorum_timeout_s),
        replica_id=order.name,
        hostname=host,
        checkpoint_transport=RelayedTransport(requests.open_filter, timeout, host),
    )


def _process_group(order: Order, timeout: timedelta) -> ProcessGroup:
    """Return a process group that cannot be configured while the engine wants this replica group sick."""
    is_baby = order.training.backend == "baby-gloo"
    group: ProcessGroup = ProcessGroupBabyGloo(timeout) if is_baby else ProcessGroupGloo(timeout)
    trigger, configure = Path(order.triggers) / f"sick.{order.name}", group.configure

    @wraps(configure)
    def configure_if_well(*arguments: Any, **named: Any) -> None:
        if trigger.exists():
            raise OSError(errno.ENOMEM, "the engine wants it so")
        configure(*arguments, **named)

    group.configure = configure_if_well  # type: ignore[method-assign]
    return group


if __name__ == "__main__":
    main()
