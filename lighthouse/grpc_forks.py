"""gRPC in a process that forks, as a trainer with data-loader workers does.

gRPC's own handlers of a fork crash the child if other threads use gRPC at that moment, as a trainer's always
do. This module turns them off. Then a fork has gRPC's memory and none of its threads, and a call in it would
wait for ever. Therefore a fork that uses gRPC itself, such as a worker that reads its data from a server,
loads gRPC's library once more at its first use, from a copy of its file: the system's loader knows a library
by its inode. The Python modules of grpc stay what they are, and so does what scripts have imported from them;
what they look up in the library they find in the fork's own.

INVARIANT: in a fork, nothing of the parent's library is called, for it could wait for a thread that is not
there, or find that one has waited. The parent's channels, calls and servers are refused, and never destroyed,
even if a script deletes them. Its credentials, which are words only, are written again. A fork that does not
speak gRPC pays for a few assignments. Where the parent has one thread only, none is missed, and the library
is used as it is: gRPC that was imported and not used, as in a server of forks, costs its forks nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from lighthouse.errors import ForkError
from lighthouse.forks import Turn, in_each_fork, lock_of_each_process

_LIBRARY = "grpc._cython.cygrpc"
_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
_THREAD_OF_GRPC = "event_engine"
# Offsets from the start of a type object, as in CPython's PyTypeObject.
_BASIC_SIZE = 4 * ctypes.sizeof(ctypes.c_void_p)
_DESTRUCTOR = 6 * ctypes.sizeof(ctypes.c_void_p)
_KEEP = ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p).value
# The attributes of grpc's Python objects that hold objects of the library.
_HOLDERS = {
    "grpc": (
        ("ChannelCredentials", "_credentials"),
        ("CallCredentials", "_credentials"),
        ("ServerCredentials", "_credentials"),
    ),
    "grpc._channel": (
        ("Channel", "_channel"),
        ("_ChannelCallState", "channel"),
        ("_ChannelConnectivityState", "channel"),
        ("_MultiThreadedRendezvous", "_call"),
        ("_SingleThreadedRendezvous", "_call"),
        ("_SingleThreadedUnaryStreamMultiCallable", "_channel"),
        ("_StreamStreamMultiCallable", "_channel"),
        ("_StreamUnaryMultiCallable", "_channel"),
        ("_UnaryStreamMultiCallable", "_channel"),
        ("_UnaryUnaryMultiCallable", "_channel"),
    ),
    "grpc._server": (("_ServerState", "server"),),
    "grpc.aio._call": (("Call", "_cython_call"),),
    "grpc.aio._channel": (("Channel", "_channel"), ("_BaseMultiCallable", "_channel")),
    "grpc.aio._server": (("Server", "_server"),),
}
# The attributes from which credentials are made again; credentials of other kinds cannot be read.
_CREDENTIALS = {
    "SSLChannelCredentials": (
        "_pem_root_certificates",
        "_private_key",
        "_certificate_chain",
        "_private_key_signer",
    ),
    "CompositeChannelCredentials": ("_call_credentialses", "_channel_credentials"),
    "CompositeCallCredentials": ("_call_credentialses",),
    "MetadataPluginCallCredentials": ("_metadata_plugin", "_name"),
    "InsecureChannelCredentials": (),
}

_log = logging.getLogger(__name__)
_lock = lock_of_each_process(threading.RLock)
_inherited: list[ModuleType] = []  # the last one is the parent's, the others are its ancestors'
_own: ModuleType | None = None  # the copy that this process, a fork, has loaded
_leaves_threads = True  # whether this process, at its last fork, had other threads than the one that forked


class _ParentsObjectError(ForkError, AttributeError):
    """An object of the parent is used in a fork.

    It is an AttributeError for grpc's finalizers, which ask whether the attribute exists: they then end
    nothing.
    """


class _InheritedLibrary(ModuleType):
    """The parent's library in a fork: each name that is looked up in it comes from the fork's own library."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return super().__getattribute__(name)
        return getattr(_own_library(), name)


class _Holder:
    """An attribute of grpc's objects in a fork, which refuses the values that the parent put into it."""

    def __init__(self, name: str, slot: Any) -> None:
        self._name = name
        self._slot = slot  # None if objects keep the attribute in their dictionary

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if self._slot is not None:
            held = self._slot.__get__(instance, owner)
        elif self._name in vars(instance):
            held = vars(instance)[self._name]
        else:
            raise AttributeError(f"{type(instance).__name__} has no attribute {self._name}")
        return _usable(held)

    def __set__(self, instance: Any, value: object) -> None:
        if self._slot is None:
            vars(instance)[self._name] = value
        else:
            self._slot.__set__(instance, value)


def turn_off_handlers_of_forks() -> None:
    """Turn gRPC's own fork handlers off, unless gRPC is in use already or its user wants them."""
    os.environ.setdefault(_SUPPORT, "0")
    if (library := sys.modules.get(_LIBRARY)) is not None:
        with contextlib.suppress(AttributeError):
            library.reset_grpc_config_vars()  # gRPC read the variable when it was imported
    if os.environ[_SUPPORT].lower() in ("1", "true", "yes", "y", "t"):
        _log.warning(
            f"{_SUPPORT}={os.environ[_SUPPORT]}: gRPC's handlers of a fork crash data-loader workers that "
            "are forked while a Manager speaks gRPC; unset it, for workers can speak gRPC without it"
        )
    elif library is not None and _THREAD_OF_GRPC in _names_of_threads():
        _log.warning(
            "gRPC was in use before torchft_like was imported, so that gRPC's handlers of a fork stay on: "
            "they crash data-loader workers that are forked while a Manager speaks gRPC; import torchft_like "
            f"first, or set {_SUPPORT}=0"
        )


def prepare_for_forks() -> None:
    """Look up now, once gRPC is imported, what each fork would have to look up otherwise."""
    _destructors(sys.modules[_LIBRARY])


@functools.cache
def _destructors(library: ModuleType) -> list[ctypes.c_void_p]:
    """Return the addresses at which the types of the library that are written in C keep their destructors.

    A type that is not laid out as Python documents it, as in a Python without the GIL, is not touched.
    """
    kinds = [kind for kind in vars(library).values() if isinstance(kind, type) and not kind.__dictoffset__]
    return [
        ctypes.c_void_p.from_address(id(kind) + _DESTRUCTOR)
        for kind in kinds
        if kind.__module__ == library.__name__
        and ctypes.c_ssize_t.from_address(id(kind) + _BASIC_SIZE).value == kind.__basicsize__
    ]


def _leave_library_to_parent() -> None:
    global _own  # noqa: PLW0603 - one per process
    if (library := sys.modules.get(_LIBRARY)) is None or not _leaves_threads:
        return
    _own = None
    for destructor in _destructors(library):
        # An object that loses its last reference gets another one, so it is never destroyed.
        destructor.value = _KEEP
    _inherited.append(library)
    library.__class__ = _InheritedLibrary
    for module_name, holders in _HOLDERS.items():
        for class_name, name in holders:
            holder = getattr(sys.modules.get(module_name), class_name, None)
            if holder is not None and not isinstance(present := vars(holder).get(name), _Holder):
                setattr(holder, name, _Holder(name, present))


def _usable(held: Any) -> Any:
    """Return what this process may use instead of a value that its parent may have made.

    Raises:
        ForkError: the parent made it, and it cannot be made again; the message names its kind.
    """
    kind = type(held).__name__
    if not any(vars(library).get(kind) is type(held) for library in _inherited):
        return held
    if kind in _CREDENTIALS:
        parts = (tuple(map(_usable, p)) if isinstance(p, tuple) else _usable(p) for p in _parts(held))
        return getattr(_own_library(), kind)(*parts)
    raise _ParentsObjectError(
        f"gRPC's {kind} was made before process {os.getpid()} was forked, and is its parent's: make one in "
        "the process that uses it, for example in the data loader's worker_init_fn"
    )


def _parts(credentials: object) -> Iterator[Any]:
    for name in _CREDENTIALS[type(credentials).__name__]:
        with contextlib.suppress(AttributeError):  # other versions of gRPC have other attributes
            yield getattr(credentials, name)


def _own_library() -> ModuleType:
    global _own  # noqa: PLW0603 - one per process
    with _lock:
        if _own is None:
            try:
                library = _second_copy(_inherited[-1])
            except (OSError, ImportError, AttributeError) as error:
                raise ForkError(
                    f"process {os.getpid()} was forked by one that has gRPC, and cannot load gRPC for "
                    f"itself: {error}; start it by spawn or forkserver"
                ) from error
            _own = library
            _hand_out(library, _inherited[-1])
        return _own


def _second_copy(inherited: ModuleType) -> ModuleType:
    # The copy stays open: the loader knows libraries by their paths, too, so no later library may get its
    # number.
    copy = os.memfd_create("cygrpc")
    with open(str(inherited.__file__), "rb") as source, open(copy, "wb", closefd=False) as target:
        shutil.copyfileobj(source, target)
    loader = ExtensionFileLoader(_LIBRARY, f"/proc/self/fd/{copy}")
    library = module_from_spec(ModuleSpec(_LIBRARY, loader, origin=loader.path))
    loader.exec_module(library)
    library.__file__, library.__spec__ = inherited.__file__, inherited.__spec__
    return library


def _hand_out(library: ModuleType, inherited: ModuleType) -> None:
    """Replace the inherited library's objects by the new one's in every module that has imported them."""
    new = {id(inherited): library}
    for name, value in vars(inherited).items():
        if getattr(value, "__module__", None) == _LIBRARY:
            new[id(value)] = getattr(library, name)
    sys.modules[_LIBRARY] = library
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module not in (library, inherited):
            for name, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, name, new[id(value)])


def _names_of_threads() -> Iterator[str]:
    for thread in _threads():
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as name:  # it ended
            yield name.read().strip()


def _threads() -> list[str]:
    """Return the threads of this process; none where the system does not tell."""
    return os.listdir("/proc/self/task") if os.path.exists("/proc/self/task") else []


def _look_for_threads() -> None:
    global _leaves_threads  # noqa: PLW0603 - one per process
    _leaves_threads = len(_threads()) != 1


in_each_fork(Turn.OBJECTS, _leave_library_to_parent)
os.register_at_fork(before=_look_for_threads)
