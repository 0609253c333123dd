"""What a drop-in test adds to the processes of an upstream script, which knows nothing of it.

Python imports a `sitecustomize` by itself in every process that has this folder on its PYTHONPATH,
also in those that torchrun and Ray start. This one acts when the script imports what concerns it.

It observes: after every step of an optimizer that follows a commit it writes a line of JSON with the
step and digests of the parameters after and before it. The hooks are torch's own; the step is the
Manager's. Where DROPIN_OPTIMIZER names a class, optimizers of others do not count.

It supplies what a machine without a GPU and without the Internet lacks, where DROPIN_SUPPLIES names
it. docs/dropin.md tells which scripts need what.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

RECORDS = "DROPIN_RECORDS"
SUPPLIES = "DROPIN_SUPPLIES"
OPTIMIZER = "DROPIN_OPTIMIZER"

Act = Callable[[ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls an act with each module that it has one for, once, as soon as the module is loaded."""

    def __init__(self, acts: dict[str, Act]) -> None:
        self._acts = acts

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        act = self._acts.pop(name, None)  # first: the search below comes by here again
        spec = importlib.util.find_spec(name) if act else None
        if act is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            act(module)

        spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


# ------------------------------------------------------------------ observing


def observe(optimizers: ModuleType) -> None:
    """Have every optimizer of torch report its steps."""
    observer = Observer()
    optimizers.register_optimizer_step_pre_hook(observer.begins)
    optimizers.register_optimizer_step_post_hook(observer)


class Observer:
    """Writes a record after each step of an optimizer. Of several in a step the last record counts."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._before = ""

    def begins(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        """Look at the parameters before a step."""
        if self._concerns(optimizer):
            self._before = _digest(optimizer)

    def _concerns(self, optimizer: Any) -> bool:
        if type(optimizer).__name__ != os.environ.get(OPTIMIZER, type(optimizer).__name__):
            return False
        self._manager = self._manager or _find_manager()
        # Scripts step before they train, to have their optimizer make its state.
        return self._manager is not None and self._manager.current_step() > 0

    def __call__(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        if not self._concerns(optimizer):
            return
        record = {
            "time": time.time(),
            "pid": os.getpid(),
            "rank": int(os.environ.get("RANK", "0")),
            "replica": str(self._manager.replica_id()),
            "step": self._manager.current_step(),
            "digest": _digest(optimizer),
            "before": self._before,
        }
        with Path(os.environ[RECORDS], f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def _find_manager() -> Any:
    """The process's only Manager. The script does not hand it out, so it is looked for."""
    managers = (candidate for candidate in gc.get_objects() if type(candidate).__name__ == "Manager")
    return next((manager for manager in managers if hasattr(manager, "current_step")), None)


def _digest(optimizer: Any) -> str:
    """Of the parameters' bytes; of a DTensor those of this rank's shard.

    An outer optimizer of fragments of a model has changed only those of them that have a gradient.
    """
    sha = hashlib.sha256()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if OPTIMIZER in os.environ and parameter.grad is None:
                continue
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            torch = sys.modules["torch"]
            sha.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]


# ------------------------------------------------------------------ supplying


def cpu_as_accelerator(cpu: ModuleType) -> None:
    """torchtitan asks torch for the machine's accelerator, and takes CUDA where there is none."""
    sys.modules["torch._utils"]._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
    answers: dict[str, object] = {
        "current_device": 0,
        "get_device_name": "cpu",
        "get_device_properties": SimpleNamespace(total_memory=1 << 34),
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "memory_stats": {},
    }
    for name, answer in answers.items():
        setattr(cpu, name, lambda *_args, _answer=answer, **_options: _answer)


def sums_for_gloo(fully_shard: ModuleType) -> None:
    """torchtitan has FSDP divide gradients by 1.0, which FSDP does by an operation that only NCCL has."""
    model = fully_shard.FSDPModule
    divide = model.set_gradient_divide_factor

    def divide_by_a_sum(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    model.set_gradient_divide_factor = divide_by_a_sum


def images(datasets: ModuleType) -> None:
    """CIFAR-10 comes from a university's server; torchvision's own FakeData has images of that size."""

    def noise(transform: Any, **_options: object) -> Any:
        return datasets.FakeData(size=20_000, image_size=(3, 32, 32), num_classes=10, transform=transform)

    vars(datasets)["CIFAR10"] = noise


def small_tables(modules: ModuleType) -> None:
    """train_diloco.py has two tables of 500 MiB, of which it reads a row; their gradients are as large."""
    make = modules.Embedding.__init__

    def make_small(self: Any, num_embeddings: int, *args: Any, **options: Any) -> None:
        make(self, min(num_embeddings, 50_000), *args, **options)

    modules.Embedding.__init__ = make_small


def no_compiled_operators(extension: ModuleType) -> None:
    """torchvision on the index is compiled for a torch with CUDA; beside another it cannot be imported."""
    if not extension._has_ops():
        library = sys.modules["torch"].library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor boxes, Tensor scores, float limit) -> Tensor")
        vars(extension)["kept"] = library  # it ends with its last reference


SUPPLY: dict[str, dict[str, Act]] = {
    "accelerator": {
        "torch.cpu": cpu_as_accelerator,
        "torch.distributed.fsdp._fully_shard._fully_shard": sums_for_gloo,
    },
    "tables": {"torch.nn.modules.sparse": small_tables},
    "images": {"torchvision.datasets": images, "torchvision.extension": no_compiled_operators},
}


def install() -> None:
    acts: dict[str, Act] = {"torch.optim.optimizer": observe}
    for name in os.environ.get(SUPPLIES, "").split():
        acts |= SUPPLY[name]
    sys.meta_path.insert(0, AfterImport(acts))


if RECORDS in os.environ:
    install()
