"""The gangs of a job with several kinds of parallelism: how they are made from one root, and which of them a
block of code uses.

The sizes decide which ranks are together; the root gang, of any kind, makes the gangs. A part that is the
whole is the whole gang itself, and a part of one process is a FakeGang: neither costs a connection.

The current gangs, for callees that cannot get them as an argument, are a stack per thread. It is kept in a
context variable, so that tasks of one thread do not see each other's, together with an object that stands for
the thread, so that no thread inherits another's. (The thread's number would not do: a later thread gets it
again.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from torchft_like.errors import GangError, TopologyError
from torchft_like.gang.base import Gang, with_index
from torchft_like.gang.fake import FakeGang

Partition = list[list[int]]


def neighbours(size: int, width: int) -> Partition:
    """Return parts of neighbours: 8 by 2 is 01 23 45 67."""
    return [list(range(start, start + width)) for start in range(0, size, width)]


def counterparts(size: int, width: int) -> Partition:
    """Return parts of the ranks with the same place among their neighbours: 8 by 2 is 0246 1357."""
    return [list(range(start, size, width)) for start in range(width)]


def _check_divides(name: str, part: int, size: int, whole: str, least: int = 1) -> None:
    if part >= least and size % part == 0:
        return
    sizes = [str(number) for number in range(least, size + 1) if size % number == 0]
    cure = f"take one of {', '.join(sizes)}" if sizes else f"it needs {least} processes or more"
    problem = f"must be {least} or more" if part < least else f"does not divide {whole}, whose size is {size}"
    raise TopologyError(f"{name} {part} {problem}: {cure}")


_META = torch.device("meta")


@dataclass(kw_only=True, eq=False)
class Gangs:
    """One gang for each kind of parallelism. In a `with` block they are the thread's current ones.

    Attributes:
        root: all processes.
        dp: data parallel: those that hold the same shard of the model.
        rdp: replicated data parallel, a part of `dp`: across nodes in hybrid sharding; for DDP.
        sdp: sharded data parallel, a part of `dp`: within a node in hybrid sharding; for FSDP.
        tp: tensor parallel.
        pp: pipeline parallel.

    Raises:
        ValueError: the caller is rank 0 of the root and not of all gangs: work that rank 0 does for each gang
          would be in another process than work that rank 0 does for the job.
    """

    root: Gang
    dp: Gang
    rdp: Gang
    sdp: Gang
    tp: Gang
    pp: Gang

    def __post_init__(self) -> None:
        with contextlib.suppress(GangError):  # one of the gangs has no members yet: its first use will say so
            if self.root.rank == 0:
                parts = {name: getattr(self, name) for name in ("dp", "rdp", "sdp", "tp", "pp")}
                if others := {name: gang.rank for name, gang in parts.items() if gang.rank}:
                    raise ValueError(
                        f"rank 0 of the root gang must be rank 0 of every gang, and has the ranks {others}"
                    )

    @property
    def device(self) -> torch.device:
        """The device of the tensors that the root makes itself."""
        return self.root.device

    def close(self) -> None:
        """Close every gang, the root last. Safe to call again."""
        with contextlib.ExitStack() as all_of_them:  # even if one of them fails to close
            for gang in _unique(self.root, self.dp, self.rdp, self.sdp, self.tp, self.pp):
                all_of_them.callback(gang.close)

    def __enter__(self) -> Self:
        _push(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop(self)


def create_parallel_gangs(root_gang: Gang, *, tp_size: int = 1) -> Gangs:
    """Split the root gang for tensor and data parallelism. All members of the root call this.

    Neighbours share a tensor parallel gang: put them on one host. A root of 8 with `tp_size=2` gives the
    tensor parallel gangs 01, 23, 45, 67 and the data parallel gangs 0246, 1357.

    Raises:
        TopologyError: `tp_size` does not divide the size of the root; it is a ValueError.
        GangError: the members could not meet.
    """
    size = root_gang.size
    _check_divides("tp_size", tp_size, size, "the root gang")
    alone = FakeGang(root_gang.device)
    tp = root_gang.of_all() if tp_size == size else _part(root_gang, neighbours(size, tp_size), alone)
    dp = _second_part(root_gang, counterparts(size, tp_size), alone, tp)
    return Gangs(root=root_gang, dp=dp, rdp=dp, sdp=alone, tp=tp, pp=alone)


def create_fsdp_gangs(gangs: Gangs, intra_node_size: int | None = None) -> Gangs:
    """Set `gangs.sdp` and `gangs.rdp` for sharded data parallelism; return the same object.

    Those of an earlier call are closed.

    Args:
        gangs: what `create_parallel_gangs` made; all members of its data parallel gang call this.
        intra_node_size: how many neighbours shard the model between them. None shards it over the whole
            data parallel gang, and `rdp` is a fake gang of one. 4 for a data parallel gang of 8 gives
            the sharded gangs 0123, 4567 and the replicated gangs 04, 15, 26, 37.

    Raises:
        TopologyError: `intra_node_size` is less than 2, or does not divide the size of `gangs.dp`; it is a
            ValueError.
        GangError: the members could not meet.
    """
    dp = gangs.dp
    alone = FakeGang(dp.device)
    sdp: Gang = dp
    rdp: Gang = alone
    if intra_node_size is not None:
        size = dp.size
        _check_divides("intra_node_size", intra_node_size, size, "the data parallel gang", least=2)
        sdp = _part(dp, neighbours(size, intra_node_size), alone)
        rdp = _second_part(dp, counterparts(size, intra_node_size), alone, sdp)
    before = gangs.sdp, gangs.rdp
    gangs.sdp, gangs.rdp = sdp, rdp
    kept = _unique(gangs.root, gangs.dp, gangs.tp, gangs.pp, sdp, rdp)
    for gang in _unique(*before):
        if all(gang is not other for other in kept):
            gang.close()
    return gangs


def create_fake_gangs(device: torch.device) -> Gangs:
    """Return gangs of one process: every one is a FakeGang of rank 0 and size 1."""
    alone = FakeGang(device)
    return Gangs(root=alone, dp=alone, rdp=alone, sdp=alone, tp=alone, pp=alone)


def _part(whole: Gang, partition: Partition, alone: Gang) -> Gang:
    """Return the caller's part of a gang that is divided up completely, in the order of its ranks."""
    if len(partition) == 1:
        return whole
    if len(partition) == whole.size:
        return alone
    part = whole.split(partition)
    if part is None:
        raise RuntimeError(f"rank {whole.rank} is in none of {partition}")
    return part


def _second_part(whole: Gang, partition: Partition, alone: Gang, first: Gang) -> Gang:
    """Return the caller's part, as `_part` does; if that fails, close the part that was made before it."""
    try:
        return _part(whole, partition, alone)
    except BaseException:
        first.close()
        raise


def _unique(*gangs: Gang) -> list[Gang]:
    return list({id(gang): gang for gang in gangs}.values())


# ----------------------------------------------------------------------------- the current ones


class _Block(NamedTuple):
    """A block that the thread is in, and the devices for whose tensors its gangs are used."""

    gangs: Gangs
    devices: tuple[torch.device, ...]


_stack: ContextVar[tuple[object, tuple[_Block, ...]] | None] = ContextVar(
    "torchft_current_gangs", default=None
)
_local = threading.local()
_defaults: dict[torch.device, Gangs] = {}
_alone: dict[torch.device, Gangs] = {}


def maybe_get_current_gangs() -> Gangs | None:
    """Return the gangs of the innermost `with gangs:` that the calling thread is in; None outside of any."""
    blocks = _present()
    return blocks[-1].gangs if blocks else None


def get_current_gangs(device: torch.device | None = None) -> Gangs:
    """Return the gangs of the innermost block of the calling thread that is about a device, or the default
    ones.

    Args:
        device: the device of the tensors; None for torch's default device.
    """
    wanted = _device(device)
    innermost = (block.gangs for block in reversed(_present()) if wanted in block.devices)
    return next(innermost, None) or get_default_gangs(wanted)


@contextlib.contextmanager
def set_gangs(gangs: Gangs, *, meta: bool = False) -> Iterator[None]:
    """Make the gangs the thread's current ones for their device in the block, as `with gangs:` does.

    Args:
        meta: whether they are the current ones for the meta device, too.
    """
    _push(gangs, meta=meta)
    try:
        yield
    finally:
        _pop(gangs)


def get_default_gangs(device: torch.device | None = None) -> Gangs:
    """Return the gangs that the process has set for a device, or else fake ones, the same each time.

    Args:
        device: the device of the tensors; None for torch's default device.
    """
    wanted = _device(device)
    if (found := _defaults.get(wanted)) is not None:
        return found
    place = torch.device("cpu") if wanted.type == "meta" else wanted
    return _alone.setdefault(place, create_fake_gangs(place))


def set_default_gangs(gangs: Gangs, *, meta: bool = False) -> None:
    """Make the gangs the default ones of the process for their device.

    Args:
        meta: whether they are the default ones for the meta device, too.
    """
    _defaults.update(dict.fromkeys(_devices_of(gangs, meta), gangs))


class GangContext:
    """The current gangs as an object, for code that takes its dependencies as arguments."""

    get_current_gangs = staticmethod(get_current_gangs)
    set_gangs = staticmethod(set_gangs)


def _push(gangs: Gangs, *, meta: bool = False) -> None:
    _stack.set((_calling_thread(), (*_present(), _Block(gangs, _devices_of(gangs, meta)))))


def _pop(gangs: Gangs) -> None:
    """End the innermost block of these gangs: generators may end theirs out of order."""
    present = _present()
    for place in reversed(range(len(present))):
        if present[place].gangs is gangs:
            _stack.set((_calling_thread(), present[:place] + present[place + 1 :]))
            return


def _present() -> tuple[_Block, ...]:
    thread, blocks = _stack.get() or (None, ())
    return blocks if thread is _calling_thread() else ()


def _calling_thread() -> object:
    if not hasattr(_local, "thread"):
        _local.thread = object()
    return _local.thread


def _devices_of(gangs: Gangs, meta: bool) -> tuple[torch.device, ...]:
    return (_device(gangs.device), *([_META] if meta else []))


def _device(device: torch.device | None) -> torch.device:
    """Return the device under its one name: "cuda" alone means the current one, and there is one CPU."""
    found = with_index(torch.get_default_device() if device is None else torch.device(device))
    return torch.device("cpu") if found.type == "cpu" else found
