"""This package in torchft's place, for scripts and libraries that import torchft.

    python -m torchft_like.as_torchft train.py --lr 0.1
    torchrun --nproc-per-node=2 -m torchft_like.as_torchft -m package.train
    python -m torchft_like.as_torchft -c 'from torchft import Manager'

From then on `torchft` and its submodules are `torchft_like` and its submodules, in this process and in all
processes that it starts: they find the folder `as_torchft_path` on their path, where `torchft` is a module
that imports this one. `import torchft_like.as_torchft`, before anything imports torchft, does the same within
a script.

A torchft that is installed too, or lies beside the script, is not loaded there, nor any part of it: what this
package lacks is an ImportError. Without this module, `torchft` is the installed one as usual.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from pathlib import Path
from types import CodeType, ModuleType

from torchft_like._installation import __version__

THEIRS = "torchft"
OURS = "torchft_like"
PATH = str(Path(__file__).with_name("as_torchft_path"))
USAGE = f"usage: python -m {OURS}.as_torchft (SCRIPT | -m MODULE | -c TEXT) [ARGUMENT ...]"

# Modules of torchft's whose names are here in another module.
_ELSEWHERE = {f"{THEIRS}._torchft": f"{OURS}.coordination"}

_LACKING = (
    f"No module named {{name!r}}: {OURS} is in {THEIRS}'s place and does not have it; its page "
    f"docs/torchft-names.md lists what it has, and why not the rest"
)


class _Alias(MetaPathFinder, Loader):
    """Finds a module under torchft's name if there is one under this package's, and loads that one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != THEIRS and not name.startswith(f"{THEIRS}."):
            return None
        ours = importlib.util.find_spec(_ELSEWHERE.get(name, OURS + name.removeprefix(THEIRS)))
        if ours is None:
            # It is being imported, not merely looked for.
            if sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
                raise ModuleNotFoundError(_LACKING.format(name=name), name=name)
            return None
        is_package = ours.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package, loader_state=ours)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return importlib.import_module(spec.loader_state.name)

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec: it has been executed under its own name, which it keeps."""
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
    _put_on_path()
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([PATH, *(folder for folder in inherited if folder)])


def _put_on_path() -> None:
    """Make `torchft` known to processes that multiprocessing spawns, which get `sys.path`.

    The folder of the script stays first on the path unless it has another torchft.
    """
    sys.path[:] = [folder for folder in sys.path if folder != PATH]
    is_beside = importlib.machinery.PathFinder.find_spec(THEIRS, sys.path[:1]) is not None
    sys.path.insert(0 if is_beside else 1, PATH)


def main() -> None:
    """Run a script, a module or a text as Python itself would."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{USAGE}\n\n{__doc__}")
    elif arguments == ["--version"]:
        sys.stdout.write(f"{OURS} {__version__}, as {THEIRS}\n")
    elif arguments[:1] == ["-c"] and len(arguments) > 1:
        sys.argv = ["-c", *arguments[2:]]
        _run(compile(arguments[1], "<string>", "exec"))
    elif arguments[:1] == ["-m"] and len(arguments) > 1:
        sys.argv = arguments[1:]
        spec = _spec_of(arguments[1])
        sys.argv[0] = spec.origin if spec and spec.origin else arguments[1]
        _run_module(spec)
    elif arguments and not arguments[0].startswith("-"):
        sys.argv = arguments
        _run_path(arguments[0])
    else:
        sys.exit(USAGE)


def _run_path(path: str) -> None:
    finder = pkgutil.get_importer(path)  # finds a __main__.py in a folder or an archive
    if not sys.flags.safe_path:
        sys.path[0] = path if finder is not None else str(Path(path).resolve().parent)
        _put_on_path()
    if finder is not None:
        _run_module(finder.find_spec("__main__"))
        return
    try:
        with io.open_code(str(Path(path).resolve())) as script:
            text = script.read()
    except OSError as error:
        sys.exit(f"{OURS}.as_torchft: {path} cannot be read: {error.strerror}")
    _run(compile(text, path, "exec"), file=path)


def _spec_of(module: str) -> importlib.machinery.ModuleSpec | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(f"{error.name}."):
            raise  # what a package of the name imports
        return None
    is_package = spec is not None and spec.submodule_search_locations is not None
    return _spec_of(f"{module}.__main__") if is_package else spec


def _run_module(spec: importlib.machinery.ModuleSpec | None) -> None:
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        sys.exit(f"{OURS}.as_torchft: there is no Python module to run in {sys.argv[0]}")
    _run(code, spec, spec.origin)


def _run(code: CodeType, spec: importlib.machinery.ModuleSpec | None = None, file: str | None = None) -> None:
    """Run code as `__main__`, which stays in place: threads and exit handlers outlive a script's text."""
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __spec__=spec, __package__=spec.parent if spec else None)
    if file is not None:
        module.__file__ = file
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102 - the caller asked for this code


if __name__ == "__main__":
    importlib.import_module("torchft_like.as_torchft").main()
else:
    install()
