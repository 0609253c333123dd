"""One rank of a replica group in a chaos run: a tiny model, trained by the public API.

It writes every step that it commits into a journal, with a digest of its parameters and a ledger of the
replicas that took part (`invariants.Commit`), and every checkpoint that it saved, or could not save. Its
state goes to healing peers through a relay that can spoil it; the engine asks for that by putting a file into
the folder of triggers. It knows nothing of any other fault.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch import nn

from torchft_like import (
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
)
from torchft_like.shutdown_signals import stop_on_signals
from torchft_like.testing.chaos.orders import Order
from torchft_like.testing.journal import Journal
from torchft_like.testing.relay import Filter, at, cut, flip_bit
from torchft_like.testing.training import Model, RelayedTransport, prepare_process
from torchft_like.testing.witness import Witness

# The place of an answer at which a fault strikes: after the head, inside the state.
SPOILT_AT_BYTES = 256 * 1024
TRIGGERS: dict[str, Filter] = {"truncate": cut, "bit-flip": flip_bit}
_CLONE_NEWNET = 0x40000000


def main() -> None:
    """Train until SIGTERM; the only argument is the order."""
    prepare_process()
    order = Order.from_json(sys.argv[1])
    if order.namespace:
        _enter_network(order.namespace)
    os.environ.update(order.variables)
    _train(order)


def _train(order: Order) -> None:
    journal = Journal(order.journal)
    model = Model(f"{order.name}/{os.environ.get('RANK', '0')}", order.training.state_kb * 1024)
    with make_manager(order, model, journal) as manager, stop_on_signals(manager) as stop:
        loop = Loop(order, model, manager, journal)
        while not stop.requested:
            loop.attempt_step()


class Loop:
    """The body of the training loop, and its records."""

    def __init__(self, order: Order, model: Model, manager: Manager, journal: Journal) -> None:
        self._order = order
        self._model = model
        self._manager = manager
        self._journal = journal
        self._ddp = DistributedDataParallel(manager, model.net)
        self._optimizer = Optimizer(manager, model.optimizer)
        self._checkpoint = Checkpoint(Path(order.checkpoints), Path(order.journal).stem, journal)
        self._witness = Witness(manager, journal, order.index)
        model.taken_over = self._witness.took_over

    def attempt_step(self) -> None:
        """Attempt a step, and record it, committed or not."""
        began = time.time()
        self._optimizer.zero_grad()
        time.sleep(self._order.training.pause_s)
        inputs, targets = self._model.batch(self._manager.current_step())
        nn.functional.mse_loss(self._ddp(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self._manager.wait_quorum()
        step = self._manager.current_step()
        self._witness.attend(step, self._model.digest())
        self._optimizer.step()
        if not self._witness.has_committed:
            self._journal.write("failed", began=began, step=step)
            return
        self._witness.testify(self._model.digest(), began=began)
        committed = self._manager.current_step()
        if committed % self._order.training.checkpoint_every == 0:
            self._checkpoint.save(committed, self._model.net)


class Checkpoint:
    """The last good state on disk, which stays as it is if a new one cannot be written."""

    def __init__(self, folder: Path, name: str, journal: Journal) -> None:
        self._path = folder / f"{name}.checkpoint"
        self._journal = journal

    def save(self, step: int, net: nn.Module) -> None:
        """Save the parameters. A failure is recorded, and training goes on."""
        content = b"".join(tensor.detach().numpy().tobytes() for tensor in net.state_dict().values())
        unfinished = self._path.with_suffix(".unfinished")
        try:
            with unfinished.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self._path)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "")
            self._journal.write("checkpoint_failed", step=step, errno=name, reason=str(error))
        else:
            self._journal.write("checkpoint", step=step)


class Spoiler:
    """Filters for a relay, which spoil one answer when they find a trigger of the engine."""

    def __init__(self, triggers: Path, journal: Journal) -> None:
        self._triggers = triggers
        self._journal = journal

    def open(self) -> Filter:
        """Return the filter of a connection."""
        return at(SPOILT_AT_BYTES, self._spoil)

    def _spoil(self, data: bytes) -> bytes:
        for name, spoil in TRIGGERS.items():
            try:
                (self._triggers / name).unlink()
            except FileNotFoundError:
                continue
            self._journal.write("spoilt", how=name)
            return spoil(data)
        return data


def make_manager(order: Order, model: Model, journal: Journal) -> Manager:
    """Make the Manager of this rank; its addresses come from the environment."""
    timeout = timedelta(seconds=order.training.timeout_s)
    host = order.variables["CHAOS_HOST"]
    return Manager(
        pg=_process_group(order, timeout),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=1,
        timeout=timeout,
        quorum_timeout=timedelta(seconds=order.training.quorum_timeout_s),
        replica_id=order.name,
        hostname=host,
        checkpoint_transport=RelayedTransport(Spoiler(Path(order.triggers), journal).open, timeout, host),
    )


def _process_group(order: Order, timeout: timedelta) -> ProcessGroup:
    if order.training.backend == "baby-gloo":
        return ProcessGroupBabyGloo(timeout)
    return ProcessGroupGloo(timeout)


def _enter_network(path: str) -> None:
    """Enter a network namespace, before there is any other thread: threads that start later inherit it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
