"""A layer of experts, shared out over processes, that serves while one of them dies and another joins.

    python examples/elastic_experts.py

starts three processes on this machine. Each has some of the experts and answers requests of its own: the
tokens of all go to all (`dispatch`), every process asks its experts, and the sums come back (`combine`).
One process is killed with SIGKILL; the others share out its experts and go on; it is started again and
takes its share. What you should see: who the members are, each time that this changes, and not one answer
that differs from what a single process with all experts gives.

The launcher is a stand-in for a scheduler: it starts processes, and a lighthouse that says who is a member.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
from torch import Tensor

from torchft_like import LighthouseServer
from torchft_like.errors import ChangeRolledBackError, GroupCoordinatorError
from torchft_like.group_coordinator import CoordinatorOptions, ElasticCoordinator
from torchft_like.process_group import create_store_client
from torchft_like.process_group.store import serve_store

EXPERTS, WIDTH, CHOICES = 8, 16, 2
ENOUGH = 20  # answers with the same members, until the launcher goes on
PAUSE_S = 0.005
STORE_TIMEOUT = timedelta(seconds=60)


def main() -> None:
    if len(sys.argv) == 3:
        Worker(name=sys.argv[1], address=sys.argv[2]).serve()
    elif len(sys.argv) > 1:
        sys.exit(__doc__)
    else:
        sys.exit(launch())


# ----------------------------------------------------------------------------- the launcher


def launch() -> int:
    """Start, kill and start workers again; return how many of them failed."""
    lighthouse = LighthouseServer(join_timeout_ms=60_000)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    _store, served_at = serve_store("127.0.0.1", STORE_TIMEOUT)  # for as long as it is referred to
    address = f"{served_at}/experts"
    workers = {name: start(name, address) for name in "abc"}
    everybody = list(workers.values())
    try:
        say("a, b and c are started")
        wait_until_served("abc", address)

        say(f"b (process {workers['b'].pid}) is killed")
        workers["b"].send_signal(signal.SIGKILL)
        workers.pop("b").wait()
        wait_until_served("ac", address)

        say("b is started again")
        workers["b"] = start("b", address)
        everybody.append(workers["b"])
        wait_until_served("abc", address, "again ")

        create_store_client(address).set("stop", "1")
        return sum(worker.wait() != 0 for worker in workers.values())
    finally:
        for worker in everybody:
            worker.kill()
            worker.wait()
        lighthouse.shutdown()


def start(name: str, address: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, __file__, name, address], env=environment)


def wait_until_served(members: str, address: str, again: str = "") -> None:
    """Wait until each of the members has given enough answers together with the others."""
    create_store_client(address).wait([f"{again}served by {name} of {members}" for name in members])


# ------------------------------------------------------------------------------ the workers


class Worker:
    """Serves its own requests, with the help of all members."""

    def __init__(self, name: str, address: str) -> None:
        torch.set_num_threads(1)
        self.name = name
        self.store = create_store_client(address)
        self.group = ElasticCoordinator(name, group_name="experts", options=CoordinatorOptions(timeout=30.0))
        self.layer = Layer(self.group)
        self.answers, self.wrong, self.in_epoch = 0, 0, 0

    def serve(self) -> None:
        self.group.follow()
        self.begin_epoch()
        while True:
            try:
                if self.has_switched():
                    continue  # every epoch begins here, on all members
                if self.is_over():
                    break
                self.answer(request(self.name, self.answers))
            except GroupCoordinatorError as error:
                call = str(error).partition(" failed")[0]
                say(f"{self.name}: {call} was broken off; waits for other members")
                self.group.follow()
                self.begin_epoch()
        say(f"{self.name}: {self.answers} answers, {self.wrong} of them wrong")
        self.group.destroy()
        sys.exit(0 if self.wrong == 0 else 1)

    def is_over(self) -> bool:
        """Return what the first member has read in the store, so that all stop at the same request."""
        return bool(self.group.broadcast_object(self.store.check(["stop"])))

    def has_switched(self) -> bool:
        """Ask for the next members, and switch when all of them are ready."""
        change = self.group.begin_change()
        if not self.group.is_due(change):
            return False
        try:
            change.complete()
        except ChangeRolledBackError as error:
            say(f"{self.name}: {error}")
        self.begin_epoch()
        return True

    def members(self) -> tuple[str, ...]:
        return self.group.membership.members if self.group.membership else ()

    def begin_epoch(self) -> None:
        """Print which experts this process has now."""
        self.in_epoch = 0
        experts = ", ".join(str(expert) for expert in self.layer.own_experts())
        place = f"rank {self.group.rank_in_group} of {self.group.world_size}"
        say(f"{self.name}: members {', '.join(self.members())}, {place}, experts {experts}")

    def answer(self, tokens: Tensor) -> None:
        self.wrong += not torch.allclose(self.layer(tokens), self.layer.reference(tokens), atol=1e-5)
        self.answers += 1
        self.in_epoch += 1
        if self.in_epoch == ENOUGH:
            self.tell_launcher()
        time.sleep(PAUSE_S)

    def tell_launcher(self) -> None:
        key = f"served by {self.name} of {''.join(self.members())}"
        self.store.set(f"again {key}" if self.store.check([key]) else key, "1")


class Layer:
    """Experts, each of which is a matrix; a token goes to those with the highest scores, weighted with
    them.
    """

    def __init__(self, group: ElasticCoordinator) -> None:
        generator = torch.Generator().manual_seed(0)  # a real layer would load them
        self.group = group
        self.router = torch.randn(WIDTH, EXPERTS, generator=generator)
        self.experts = torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator) / WIDTH

    def own_experts(self) -> list[int]:
        """Return the experts of this process, in the present epoch."""
        return list(range(self.group.rank_in_group, EXPERTS, self.group.world_size))

    def __call__(self, tokens: Tensor) -> Tensor:
        hidden, logits = self.group.dispatch(tokens, tokens @ self.router)[:2]
        return self.group.combine(self.ask(self.own_experts(), hidden, logits))

    def reference(self, tokens: Tensor) -> Tensor:
        """Return the layer's answer with all experts in this process."""
        return self.ask(list(range(EXPERTS)), tokens, tokens @ self.router)

    def ask(self, experts: list[int], hidden: Tensor, logits: Tensor) -> Tensor:
        """Return the sum of what some experts say; zero for tokens that go to none of them."""
        scores, chosen = logits.softmax(-1).topk(CHOICES)
        answers = torch.zeros_like(hidden)
        for expert in experts:
            weight = (scores * (chosen == expert)).sum(-1, keepdim=True)
            answers += weight * (hidden @ self.experts[expert])
        return answers


def request(name: str, number: int) -> Tensor:
    """Return some tokens; sometimes none."""
    generator = torch.Generator().manual_seed(1000 * ord(name) + number)
    return torch.randn(number % 7, WIDTH, generator=generator)


def say(line: str) -> None:
    """Print the text in one piece: the processes share the output."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


if __name__ == "__main__":
    main()
