"""A replica group of a job in which states are spoilt on their way from one replica to the other.

python -m tests.stress.spoilt_job NAME INDEX TRIGGER

What "source" sends passes a relay, which spoils each connection somewhere for as long as the file TRIGGER is
there. "receiver" records the error of each heal; where one succeeds nevertheless, it leaves and comes back.
"""

from __future__ import annotations

import random
import sys
from datetime import timedelta
from pathlib import Path

from torchft_like import Manager, ProcessGroupGloo
from torchft_like.checkpointing import HTTPTransport
from torchft_like.errors import CheckpointError
from torchft_like.shutdown_signals import stop_on_signals
from torchft_like.testing.journal import Journal
from torchft_like.testing.relay import Filter, at, cut, flip_bit
from torchft_like.testing.training import Loop, Model, RelayedTransport, prepare_process

SOURCE, RECEIVER = "source", "receiver"
LIMIT = timedelta(seconds=60)
PAUSE = timedelta(milliseconds=200)  # after which a receiver of too few bytes takes its source for dead
STATE_BYTES = 1 << 20
HEAD_BYTES = 4000  # of what a connection answers: heads, and the structure of the state
chance = random.Random(20)


def main() -> None:
    prepare_process()
    name, index, trigger = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    while train(name, index, trigger, Journal.of_this_process()):
        pass


def train(name: str, index: int, trigger: Path, journal: Journal) -> bool:
    """Train until SIGTERM, or until this replica has healed though it was not to; return whether it has."""
    is_receiver = name == RECEIVER
    with (
        Manager(
            pg=ProcessGroupGloo(LIMIT),
            load_state_dict=(model := Model(name, STATE_BYTES)).load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=1,
            timeout=LIMIT,
            replica_id=name,
            checkpoint_transport=(
                HTTPTransport(LIMIT, stall_timeout=PAUSE)
                if is_receiver
                else RelayedTransport(lambda: spoiler() if trigger.exists() else bytes, LIMIT)
            ),
        ) as manager,
        stop_on_signals(manager) as stop,
    ):
        loop = Loop(model, manager, journal, index, pause_s=0.0)
        while not stop.requested:
            if loop.attempt_step():
                if is_receiver and trigger.exists():
                    journal.write("healed")
                    return True
            elif is_receiver and (failure := manager.errored()) is not None:
                error = failure.original_exception
                journal.write(
                    "refused", how=type(error).__name__, is_typed=isinstance(error, CheckpointError)
                )
    return False


def spoiler() -> Filter:
    """Return a filter of one connection, which does one of several things at one place."""
    spoil: Filter = chance.choice(
        [
            cut,
            flip_bit,
            lambda data: chance.randbytes(min(8, len(data))) + data[8:],
            lambda data: data[chance.randint(1, 5) :],
            lambda data: chance.randbytes(chance.randint(1, 5)) + data,
        ]
    )
    return at(chance.randrange(chance.choice([HEAD_BYTES, STATE_BYTES, STATE_BYTES])), spoil)


if __name__ == "__main__":
    main()
