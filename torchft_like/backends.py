"""The names by which torch makes this package's groups: `dist.init_process_group("torchft-gloo")`.

torch gets to know them when both torch and this package are loaded, whichever comes first: importing this
package does not load torch, which would cost `--help` seconds.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple


class Origin(NamedTuple):
    """The class of a backend's groups, and the devices of their tensors."""

    module: str
    class_name: str
    devices: tuple[str, ...]


BACKENDS = MappingProxyType(
    {
        "torchft-gloo": Origin("gloo", "ProcessGroupGloo", ("cpu",)),
        "torchft-baby-gloo": Origin("baby.group", "ProcessGroupBabyGloo", ("cpu",)),
        "torchft-nccl": Origin("nccl", "ProcessGroupNCCL", ("cuda",)),
        "torchft-baby-nccl": Origin("baby.group", "ProcessGroupBabyNCCL", ("cuda",)),
        "torchft-dummy": Origin("wrapper", "ProcessGroupDummy", ("cpu",)),
    }
)


def register_backends() -> None:
    """Register the names of `BACKENDS` with torch, which this loads; a second call changes nothing."""
    backend = importlib.import_module("torch.distributed").Backend
    for name, origin in BACKENDS.items():
        create = functools.partial(_create, name)
        backend.register_backend(name, create, extended_api=True, devices=list(origin.devices))


def register_with_torch() -> None:
    """Register the backends now if torch is loaded, else as soon as it is."""
    if "torch" in sys.modules:
        register_backends()
    else:
        sys.meta_path.insert(0, _AfterTorch())


def _create(name: str, wanted: Any, pg_options: object) -> Any:
    registration = importlib.import_module("torchft_like.process_group.registration")
    return registration.create_group(name, wanted, pg_options)


class _AfterTorch(MetaPathFinder):
    """Finds torch as the other finders do, and makes its loader register the backends afterwards."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                register_backends()

        loader.exec_module = exec_module
