"""The Python blocks of the pages run, each with the names that its page presupposes."""

from __future__ import annotations

import ast
import copy
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import torchft_like
from tests.conftest import ROOT
from tests.managers import lighthouse_here, manager_alone
from tests.pages import PAGES, blocks
from tests.stores import serve_store
from torchft_like import Manager, ProcessGroupGloo
from torchft_like.device_mesh import ft_init_device_mesh
from torchft_like.local_sgd import DiLoCo
from torchft_like.plain_data import STATES, Structure, TensorLeaves, write

pytestmark = pytest.mark.integration

LIMIT_S = 60.0
Names = dict[str, Any]
Number = tuple[str, int]

# Blocks that take several processes, the file in which a test runs the same, and a call that shows it.
ELSEWHERE: dict[Number, tuple[str, str]] = {
    ("gangs.md", 0): ("tests/integration/gang_job.py", "create_parallel_gangs("),
    ("group-coordinator.md", 0): ("tests/integration/coordinator_cases.py", ".broadcast_tensor_dict("),
    ("group-coordinator.md", 2): ("tests/integration/test_group_coordinator.py", "all_gather_tensors"),
    ("package-page.md", 0): ("tests/integration/test_first_step.py", "package-page.md"),
    ("process-groups.md", 1): ("tests/integration/torch_job.py", "dist._reconfigure("),
    ("process-groups.md", 2): ("tests/integration/torch_job.py", "new_group("),
    ("quickstart.md", 0): ("tests/integration/test_first_step.py", "quickstart.md"),
    ("restart.md", 0): ("tests/integration/test_manager_api.py", '"restart.md"'),
    ("sharded-training.md", 0): ("examples/train_hsdp.py", "ft_init_device_mesh("),
    ("sharded-training.md", 1): ("tests/integration/sharded.py", "ScheduleGPipe(stage"),
    ("testing.md", 0): ("tests/integration/test_first_step.py", "cluster.launch("),
    ("testing.md", 1): ("tests/integration/test_testing_kit.py", "witness.attend(manager.current_step())\n"),
    ("testing.md", 2): ("tests/integration/test_managed_gang.py", "with running("),
}


@dataclass
class Scene:
    """What surrounds a block.

    Attributes:
        before: makes more names, from the usual ones.
        instead: what stands for a placeholder, or for more than one machine has.
        after: looks at what came of it.
    """

    before: Callable[[Names], Names] = lambda _: {}
    instead: Mapping[str, str] = field(default_factory=dict)
    after: Callable[[Names], None] = lambda _: None


class Serving:
    """True three times."""

    def __init__(self) -> None:
        self._left = 3

    def __bool__(self) -> bool:
        self._left -= 1
        return self._left >= 0


def trains(names: Names) -> None:
    """Check that the manager of a block commits a step."""
    manager, optimizer = names["manager"], names["optimizer"]
    before = manager.current_step()
    optimizer.zero_grad()
    names["loss"](names["model"](names["inputs"])).backward()
    optimizer.step()
    assert manager.current_step() == before + 1


def with_optimizer(names: Names) -> Names:
    manager = names["make_manager"]()
    return {"manager": manager, "optimizer": torchft_like.Optimizer(manager, names["adamw"])}


def in_a_step(names: Names) -> Names:
    manager = names["make_manager"](use_async_quorum=False)
    manager.start_quorum()
    return {"manager": manager, "process_group": names["make_group"]()}


def with_diloco(names: Names) -> Names:
    model, inner = names["model"], names["adamw"]
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
    manager = names["make_manager"](use_async_quorum=False)
    diloco = DiLoCo(manager, [model], inner, outer, sync_every=1)
    return {"manager": manager, "inner": inner, "diloco": diloco}


def begins_as_it_was_saved(names: Names) -> None:
    """Check that what a sync changes is put back to what it was when it was saved."""
    diloco, inner, model = names["diloco"], names["inner"], names["model"]

    def sync() -> dict[str, Any]:
        names["loss"](model(names["inputs"])).backward()
        inner.step()
        step = names["manager"].current_step()
        return copy.deepcopy({"step": step, "model": model.state_dict(), "global": diloco.global_states()})

    with diloco:
        sync()
        names["save"]("saved.pt")
        after = sync()
    names["load"]("saved.pt")
    with diloco:
        assert_close(sync(), after, rtol=0, atol=0)


def with_scaler(names: Names) -> Names:
    manager, scaler = names["make_manager"](), torch.amp.GradScaler("cpu")
    manager.register_state_dict_fn("scaler", scaler.load_state_dict, scaler.state_dict)
    ddp_model = torchft_like.DistributedDataParallel(manager, names["model"])
    batches = iter([torch.ones(4, 2)])
    clip = torch.nn.utils.clip_grad_norm_
    return {
        "manager": manager,
        "scaler": scaler,
        "ddp_model": ddp_model,
        "batches": batches,
        "clip_grad_norm_": clip,
    }


def replicated_and_sharded(names: Names) -> Names:
    manager = names["make_manager"]()
    mesh = ft_init_device_mesh(
        device_type="cpu",
        mesh_shape=(2, 1),
        mesh_dim_names=("dp_replicate", "dp_shard"),
        replicate_dim=0,
        manager=manager,
    )
    return {"manager": manager, "model": fully_shard(torch.nn.Linear(2, 1), mesh=mesh)}


def needed_no_quorum(names: Names) -> None:
    torch.distributed.destroy_process_group()
    assert names["manager"].participating_rank() is None  # it has not asked for a quorum


def has_committed(names: Names) -> None:
    assert names["manager"].current_step() > 0


def ends(names: Names) -> None:
    names["coordinator"].destroy()
    names["group"].shutdown()


class Setting(Enum):
    """A setting of an optimizer."""

    ON = 1


NAMES_OF_SHAMPOO = (
    "AdamPreconditionerConfig",
    "RootInvShampooPreconditionerConfig",
    "SingleDeviceDistributedConfig",
    "WeightDecayType",
    "EigenConfig",
    "PerturbationConfig",
)


def settings_travel(_: Names) -> None:
    """Check that a setting arrives as it was by what the block registers."""
    structure, _leaves = write([Setting.ON], STATES)
    assert Structure(structure, STATES).value(TensorLeaves([])) == [Setting.ON]


def queue_is_read(names: Names) -> None:
    assert [message["step"] for message in names["messages"]] == [7] * 3


class PlainTrainer:
    """Trains as transformers' Trainer does: its counter and its schedule follow each try of a step."""

    def __init__(self, model: Any, args: Any, *, optimizers: Any, callbacks: Any, **_: Any) -> None:
        self.model, self.args, (self.optimizer, self.schedule) = model, args, optimizers
        self.callback, self.state = callbacks[0], SimpleNamespace(global_step=0)

    def train(self, resume_from_checkpoint: str | None) -> None:
        model = self._wrap_model(self.model)  # type: ignore[attr-defined] # the block's class has it
        tries = 0
        while tries < 3:
            tries += 1
            control = SimpleNamespace(should_save=False)
            self.callback.on_step_begin(self.args, self.state, control)
            model(torch.ones(4, 2)).sum().backward()
            if tries == 2:
                self.callback.manager.report_error(RuntimeError("this try is lost"))
            self.optimizer.step()
            self.callback.on_optimizer_step(self.args, self.state, control)
            self.schedule.step()
            self.state.global_step += 1
            control.should_save = True
            self.callback.on_step_end(self.args, self.state, control)
            if control.should_save:
                os.makedirs(f"{self.args.output_dir}/checkpoint-{self.state.global_step}", exist_ok=True)
                self.callback.on_save(self.args, self.state, control)


def with_trainer(names: Names) -> Names:
    manager = names["make_manager"]()
    return {
        "manager": manager,
        "transformers": SimpleNamespace(
            Trainer=PlainTrainer, TrainerCallback=type("Callback", (), {"manager": manager})
        ),
        "LambdaLR": torch.optim.lr_scheduler.LambdaLR,
        "args": SimpleNamespace(output_dir="out"),
        "dataset": None,
        "last": None,
    }


def counts_what_was_committed(names: Names) -> None:
    step = names["manager"].current_step()
    assert (step, names["trainer"].state.global_step) == (2, 2)
    assert names["adamw"].param_groups[0]["lr"] == 1e-3 * 0.5 ** (step / 1000)
    assert torch.load("out/checkpoint-2/manager.pt") == names["manager"].state_dict()


class PlainStrategy:
    """Does what Lightning's strategy does for one process, in the order in which Lightning calls it."""

    lightning_module: torch.nn.Module
    optimizers: list[Any]

    def setup_environment(self) -> None: ...
    def setup_optimizers(self, trainer: object) -> None:
        self.optimizers = [torch.optim.AdamW(self.lightning_module.parameters())]

    def teardown(self) -> None: ...


def with_strategy(_: Names) -> Names:
    strategies = SimpleNamespace(DDPStrategy=PlainStrategy)
    return {"lightning": SimpleNamespace(pytorch=SimpleNamespace(strategies=strategies))}


def strategy_trains(names: Names) -> None:
    strategy = names["FaultTolerant"]()
    strategy.lightning_module = names["model"]
    strategy.setup_environment()
    model = strategy._setup_model(names["model"])
    strategy.setup_optimizers(None)
    strategy.load(copy.deepcopy(strategy.save()))
    (optimizer,) = strategy.optimizers
    trains({**names, "manager": strategy.manager, "optimizer": optimizer, "model": model})
    strategy.teardown()


TWO_WORKERS = {"num_workers=4": "num_workers=2"}  # torch warns of more than this machine has processors
SCENES: dict[Number, Scene] = {
    ("README.md", 0): Scene(
        instead={"= ...": "= model, adamw", "10_000": "3", "min_replica_size=2": "min_replica_size=1"},
        after=has_committed,
    ),
    ("coming-from-torchft.md", 0): Scene(with_scaler, after=has_committed),
    ("divergence.md", 0): Scene(with_optimizer, {"[optimizer]": "[adamw]"}, trains),
    ("elastic-coordinator.md", 0): Scene(
        lambda _: {"serving": Serving()}, after=lambda names: names["coordinator"].destroy()
    ),
    ("gangs.md", 1): Scene(
        lambda names: {"manager": names["make_manager"](use_async_quorum=False), "optimizer": names["adamw"]},
        {"tp_size=2": "tp_size=1"},
        has_committed,
    ),
    ("group-coordinator.md", 1): Scene(after=ends),
    ("healing.md", 0): Scene(
        lambda names: {"manager": names["make_manager"]()},
        after=trains,
    ),
    ("healing.md", 1): Scene(
        lambda _: dict.fromkeys(
            ("shampoo_types", "matrix_functions_types"),
            SimpleNamespace(**dict.fromkeys(NAMES_OF_SHAMPOO, Setting)),
        ),
        {
            "from distributed_shampoo import shampoo_types\n": "",
            "from distributed_shampoo.preconditioner import matrix_functions_types\n": "",
        },
        settings_travel,
    ),
    ("in-process-restart.md", 0): Scene(
        lambda _: {"parse_args": list},
        {"Manager(...)": "make_manager()", '"/checkpoints", 10**10': '".", 1'},
    ),
    ("loaders.md", 0): Scene(lambda _: {"data": range(8)}, {"Manager(...)": "make_manager()", **TWO_WORKERS}),
    ("loaders.md", 1): Scene(
        lambda names: {
            **with_optimizer(names),
            "dataset": TensorDataset(torch.rand(1024, 2), torch.rand(1024, 1)),
            "loss": torch.nn.functional.mse_loss,
        },
        TWO_WORKERS,
        after=has_committed,
    ),
    ("low-communication.md", 0): Scene(
        lambda _: {"batches": [torch.ones(4, 2)] * 500},
        {"Manager(..., ": "make_manager("},
        has_committed,
    ),
    ("low-communication.md", 1): Scene(
        lambda names: {
            **in_a_step(names),
            "inner": names["adamw"],
            "outer": torch.optim.SGD(names["model"].parameters(), lr=0.7),
        }
    ),
    ("message-queue.md", 0): Scene(after=queue_is_read),
    ("process-groups.md", 0): Scene(
        instead={"10.0.0.1:29500": "STORE"}, after=lambda names: names["group"].shutdown()
    ),
    ("process-groups.md", 3): Scene(with_trainer, after=counts_what_was_committed),
    ("process-groups.md", 4): Scene(with_strategy, after=strategy_trains),
    ("restart.md", 1): Scene(with_diloco, after=begins_as_it_was_saved),
    ("sharded-training.md", 2): Scene(replicated_and_sharded, after=needed_no_quorum),
}


def python_blocks() -> dict[Number, str]:
    found = {}
    for page in PAGES:
        texts = [block.text for block in blocks(page) if block.language == "python"]
        found.update({(page.name, number): text for number, text in enumerate(texts)})
    return found


def imports_before(number: Number) -> str:
    """Return what the blocks that stand before one on its page import: what else it needs, it imports."""
    page, place = number
    trees = (ast.parse(python_blocks()[page, before]) for before in range(place))
    found = (node for tree in trees for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    return "\n".join(map(ast.unparse, found))


def test_every_block_runs_here_or_elsewhere() -> None:
    assert set(python_blocks()) == {*SCENES, *ELSEWHERE}
    assert [(file, call) for file, call in ELSEWHERE.values() if call not in (ROOT / file).read_text()] == []


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Names]:
    """What all pages presuppose: a lighthouse, a store, a small model, and the names of `torchft_like`."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        lighthouse = stack.enter_context(lighthouse_here(min_replicas=1))
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", lighthouse.address())
        store = serve_store()
        model = torch.nn.Linear(2, 1)

        def make_manager(**settings: Any) -> Manager:
            return stack.enter_context(manager_alone("a", model=model, init_sync=True, **settings))

        def make_group() -> ProcessGroupGloo:
            group = ProcessGroupGloo(LIMIT_S)
            stack.callback(group.shutdown)
            group.configure(f"127.0.0.1:{store.port}/{time.monotonic_ns()}", 0, 1)
            return group

        public = {name: getattr(torchft_like, name) for name in vars(torchft_like)["__all__"]}
        yield {
            **public,
            "AdamW": torch.optim.AdamW,
            "DataLoader": DataLoader,
            "ReduceOp": ReduceOp,
            "os": os,
            "time": time,
            "torch": torch,
            "model": model,
            "adamw": torch.optim.AdamW(model.parameters()),
            "loss": lambda outputs: outputs.square().mean(),
            "inputs": torch.ones(4, 2),
            "batches": itertools.repeat(torch.ones(4, 2)),
            "gradient": torch.ones(4),
            "tensor": torch.ones(4),
            "steps": 2,
            "rank": 0,
            "world_size": 1,
            "new_rank": 0,
            "new_world_size": 1,
            "store_address": f"127.0.0.1:{store.port}/snippet",
            "STORE": f"127.0.0.1:{store.port}",
            "make_manager": make_manager,
            "make_group": make_group,
            "__name__": "__main__",
        }


@pytest.mark.parametrize("number", SCENES, ids=lambda number: f"{number[0]}-{number[1]}")
def test_a_block_does_what_it_says(number: Number, usual: Names) -> None:
    scene, text = SCENES[number], python_blocks()[number]
    for old, new in scene.instead.items():
        assert old in text
        text = text.replace(old, usual.get(new, new))
    names = {**usual, **scene.before(usual)}
    exec(imports_before(number), names)
    if number[0] == "message-queue.md":
        run_queue(text, names)
    else:
        exec(compile(text, number[0], "exec"), names)
    scene.after(names)


def run_queue(text: str, names: Names) -> None:
    """Run the writer's part, and beside it that of each reader, which has the handle."""
    imports, writer, reader = text.split("\n\n")
    make, hand_out, *write = writer.splitlines(keepends=True)
    exec(imports + "\n" + make + hand_out, names)

    def read(rank: int) -> object:
        own = {**names, "rank": rank}
        exec(reader, own)
        own["reader"].shutdown()
        return own["message"]

    with ThreadPoolExecutor(3) as readers:
        reading = [readers.submit(read, rank) for rank in range(3)]
        exec("".join(write), names)
        names["messages"] = [one.result(LIMIT_S) for one in reading]
    names["queue"].shutdown()
