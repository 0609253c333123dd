"""Train a small GPT in two data centers, over a slow link between them; either may go away and come back.

        data center 0                                  data center 1
    +-----------------------+                      +-----------------------+
    | model, DataLoader     |   100 Mbit/s, 20 ms  | model, DataLoader     |
    | inner steps: AdamW    |  <---------------->  | inner steps: AdamW    |
    | global parameters     |   every 10 steps     | global parameters     |
    | outer steps: Nesterov |   half of the model, | outer steps: Nesterov |
    +-----------------------+   a byte per number  +-----------------------+

Each replica group trains by itself, on its part of the text. Every `--sync-every` inner steps each of the
model's `--fragments` is synced once: what the groups have changed in it is averaged, beside the next
`--delay` inner steps, and their outer optimizers take the same step with it (Streaming DiLoCo).

On one machine, with a lighthouse, and the second replica group killed on the way:

    python examples/train_diloco.py --local --kill-at-step 6

With --link 100,20, as root, each replica group has a network namespace of its own, and a link of 100 Mbit/s
with 20 ms each way between them. As in two data centers, a torchrun for each, which starts it again:

    python -m lighthouse --bind 0.0.0.0:29510 --min_replicas 1 --insecure
    TORCHFT_LIGHTHOUSE=http://HOST:29510 torchrun --standalone --nproc_per_node 1 --max-restarts 3 \\
        examples/train_diloco.py --replica-id 0
    (the same with --replica-id 1 in the other one)

(docs/security.md has what a network that is not closed needs instead of --insecure.)

A replica group that comes back trains until the others' next sync, and goes on from there as their copy.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from arguments import SEED_MAX, number
from library_text import StandardLibraryText
from local_groups import interrupt_at_sigterm, kill_steps, run_groups
from tiny_gpt import TinyGPT, next_byte_loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from torchft_like import Manager, ProcessGroupGloo, stop_on_signals
from torchft_like.digest import state_digest
from torchft_like.errors import ConnectError, CoordinationError
from torchft_like.local_sgd import DiLoCo
from torchft_like.testing.chaos.network import Network, NetworkUnavailableError, Rules
from torchft_like.testing.processes import RunningProcess

CONTEXT = 64  # bytes that the model sees at once
BATCH_SIZE = 8
PACKET_BYTES = 65_520


def train(args: argparse.Namespace) -> None:
    """Train as one replica group."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # the Manager says who comes and goes
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = TinyGPT(width=48, layers=2, context=CONTEXT)
    inner = torch.optim.AdamW(model.parameters(), lr=args.lr)
    fragments = fragments_of(model, args.fragments)

    def save_state() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state,
        state_dict=save_state,
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"group-{args.replica_id}",
    )
    diloco = DiLoCo(
        manager,
        fragments,
        inner,
        [torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments],
        sync_every=args.sync_every,
        fragment_sync_delay=args.delay,
        should_quantize=args.quantize,
        use_bucketization=True,
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader_of(args)))
    with manager, stop_on_signals(manager) as stop, diloco:
        syncs = participants = 0  # of the last sync that was committed
        while not stop.requested and (diloco.is_syncing or not is_done(args, syncs, participants)):
            inputs, targets = next(batches)
            inner.zero_grad()
            loss = next_byte_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            inner.step()  # a sync begins, or ends, in some of them
            if manager.current_step() != syncs and not diloco.is_syncing:
                syncs, participants = manager.current_step(), manager.num_participants()
                print(f"step {syncs}  loss {loss.item():.3f}  participants {participants}", flush=True)
        digest = state_digest({"fragments": diloco.global_states()})
        result = {"finished": args.replica_id, "step": syncs, "digest": digest}
    print(json.dumps(result), flush=True)
    if not is_done(args, syncs, participants):  # a SIGTERM; a launcher takes 0 for the end of the job
        sys.exit(128 + signal.SIGTERM)


def is_done(args: argparse.Namespace, syncs: int, participants: int) -> bool:
    """Return whether the last sync is committed, and with --finish-together by all of the groups."""
    everybody = participants >= args.num_replicas
    return syncs >= args.steps and (everybody or not args.finish_together)


def fragments_of(model: TinyGPT, count: int) -> list[nn.Module]:
    """Deal the parts of the model like cards, so that each fragment has some of all depths."""
    positions = nn.ParameterList([model.positions])
    parts = [model.tokens, positions, *model.blocks, nn.ModuleList([model.norm, model.head])]
    return [nn.ModuleList(parts[number::count]) for number in range(count)]


def loader_of(args: argparse.Namespace) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the batches of this replica group's part of the text, in another order after each start."""
    text = StandardLibraryText(CONTEXT)
    order = torch.Generator()
    order.seed()
    return DataLoader(
        Subset(text, range(args.replica_id, len(text), args.num_replicas)),
        BATCH_SIZE,
        shuffle=True,
        generator=order,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )


# ------------------------------------------------------------- all of it on this machine


def run_locally(args: argparse.Namespace) -> int:
    """Run a lighthouse and the groups as processes; return 0 if all of them end with the same bits."""
    interrupt_at_sigterm()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="train-diloco-")))
        host, insides = "127.0.0.1", [list[str]()] * args.num_replicas
        if args.link:
            names = [f"data-center-{index}" for index in range(args.num_replicas)]
            network = stack.enter_context(Network(names, folder, args.seed, PACKET_BYTES))
            network.apply(rules_of(args.link, names))
            host, insides = network.address(names[0]), [network.entering(name) for name in names]
        command = ["-m", "lighthouse", f"--bind={host}:0", "--min_replicas=1", "--join_timeout_ms=10000"]
        command.append("--insecure")  # no other host reaches the namespaces
        lighthouse = RunningProcess([*insides[0], sys.executable, *command], folder / "lighthouse.log")
        stack.callback(lighthouse.kill)
        port = lighthouse.wait_for_output(r"listening on .*:(\d+)")[1]
        return run_groups(1, f"http://{host}:{port}", kill_steps(args), insides)


def link(text: str) -> tuple[float, float] | None:
    """Read "megabits per second,milliseconds each way"; "" is no link."""
    if not text:
        return None
    try:
        megabits, delay_ms = map(number(float, 0), text.split(","))
    except ValueError:
        megabits, delay_ms = 0.0, 0.0
    if not megabits:
        raise argparse.ArgumentTypeError(f"{text!r} is not MBIT,MS, such as 100,20")
    return megabits, delay_ms


def rules_of(link: tuple[float, float], names: list[str]) -> Rules:
    """Return the rules of such a link for each data center."""
    megabits, delay_ms = link
    return Rules(
        delay_s=dict.fromkeys(names, delay_ms / 2000),  # a packet passes two of them
        bytes_per_s=dict.fromkeys(names, megabits * 1e6 / 8),
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT with Streaming DiLoCo.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--local", action="store_true", help="start everything on this machine")
    parser.add_argument("--link", type=link, help="with --local: MBIT,MS of the link, see above; needs root")
    parser.add_argument(
        "--kill-at-step",
        type=number(int, 0),
        help="with --local: kill the last group, once, while it trains with others",
    )
    parser.add_argument("--replica-id", type=int, default=0, help="which replica group this is, from 0")
    parser.add_argument(
        "--num-replicas", type=number(int, 1), default=2, help="replica groups that share the data"
    )
    parser.add_argument(
        "--steps", type=number(int, 0), default=40, help="committed syncs of a fragment until the end"
    )
    parser.add_argument("--finish-together", action="store_true", help="go on until all groups are there")
    parser.add_argument(
        "--sync-every", type=number(int, 1), default=20, help="inner steps in which all is synced once"
    )
    parser.add_argument(
        "--fragments", type=number(int, 1), default=2, help="parts of the model, synced one by one"
    )
    parser.add_argument(
        "--delay", type=number(int, 0), default=2, help="inner steps beside which an average is made"
    )
    parser.add_argument("--quantize", default="int8", help="a byte for each number: int8 or fp8; '' for four")
    parser.add_argument("--workers", type=number(int, 0), default=1, help="processes that load batches ahead")
    parser.add_argument("--lr", type=number(float, 0), default=2e-3, help="learning rate of AdamW")
    parser.add_argument("--seed", type=number(int, 0, SEED_MAX), default=0, help="of the weights")
    args = parser.parse_args()
    if not 0 <= args.replica_id < args.num_replicas:
        parser.error(f"--replica-id {args.replica_id} is not in 0..{args.num_replicas - 1} (--num-replicas)")
    return args


def main() -> None:
    args = parse_args()
    if args.local:
        try:
            sys.exit(run_locally(args))
        except KeyboardInterrupt:
            sys.exit("interrupted; every group has been ended")
        except NetworkUnavailableError as error:
            sys.exit(f"train_diloco.py: --link: {error}")
    if "RANK" not in os.environ:
        sys.exit("train_diloco.py: start it with torchrun, or with --local")
    try:
        train(args)
    except (CoordinationError, ConnectError) as error:  # a wrong setting, or nobody there
        sys.exit(f"train_diloco.py: {error}")


if __name__ == "__main__":
    main()
