"""This package in torchft's place, for scripts and libraries that import torchft.

    python -m torchft_like.as_torchft train.py --lr 0.1
    torchrun --nproc-per-node=2 -m torchft_like.as_torchft -m package.train

From then on `torchft` and its submodules are `torchft_like` and its submodules, in this process and in
all that it starts: they find the folder `as_torchft_path` on their path, where `torchft` is a module
that imports this one. A torchft that is installed is not loaded. `import torchft_like.as_torchft`,
before anything imports torchft, does the same within a script.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType

from torchft_like._installation import __version__

THEIRS = "torchft"
OURS = "torchft_like"
PATH = str(Path(__file__).with_name("as_torchft_path"))
USAGE = f"usage: python -m {OURS}.as_torchft (SCRIPT | -m MODULE) [ARGUMENT ...]"


class _Alias(MetaPathFinder, Loader):
    """Finds a module under torchft's name where there is one under ours, and loads that one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != THEIRS and not name.startswith(f"{THEIRS}."):
            return None
        ours = importlib.util.find_spec(OURS + name.removeprefix(THEIRS))
        if ours is None:
            return None
        is_package = ours.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package, loader_state=ours)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return importlib.import_module(spec.loader_state.name)

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed under its own name, which it keeps."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Take torchft's place in this process and in those that it starts; a second call changes nothing.

    Raises:
        ImportError: torchft has been imported already.
    """
    if any(isinstance(finder, _Alias) for finder in sys.meta_path):
        return
    loaded = sys.modules.get(THEIRS)
    if loaded is not None and getattr(loaded, "__path__", None) != [str(Path(PATH) / THEIRS)]:
        raise ImportError(f"{THEIRS} has been imported already: import {OURS}.as_torchft before it")
    sys.meta_path.insert(0, _Alias())
    sys.path.insert(1, PATH)  # which spawned processes of multiprocessing are given
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([PATH, *(folder for folder in inherited if folder)])


def main() -> None:
    """Run a script, a module or a text as Python itself would."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{USAGE}\n\n{__doc__}")
    elif arguments == ["--version"]:
        sys.stdout.write(f"{OURS} {__version__}, as {THEIRS}\n")
    elif arguments[:1] == ["-m"] and len(arguments) > 1:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments and not arguments[0].startswith("-"):
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.exit(USAGE)


if __name__ == "__main__":
    importlib.import_module("torchft_like.as_torchft").main()
else:
    install()
