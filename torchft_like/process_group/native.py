"""A Gloo group of torch's own, made with `enable_reconfigure=True`, that a Manager configures.

torch brings the members together and moves the bytes; a generation of this package waits for the operations,
ends when the Manager says so, and raises errors in the Manager's words.

Only its timeout ends an operation of torch's Gloo: torch's own abort leaves a blocked one blocked. So an
abort here reconfigures the group to a single member, as soon as no operation of this process is under way:
that closes the connections. The neighbours of a member that was killed fail at once, and as they leave, most
of those that wait for them fail, too; Gloo misses some. Operations that are left, and all that wait for a
member that is stopped, last until the group's timeout: choose it with that in mind.

INVARIANT: an operation is never given up while torch may still write to its tensors.

The members meet in the store that each of them gave to `init_process_group`: one, for the life of the job.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from torchft_like.errors import ConfigError
from torchft_like.process_group.base import ProcessGroup
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.gloo.gaps import GlooGaps
from torchft_like.process_group.handles import exchange_and_reconfigure, reconfigure_among
from torchft_like.process_group.store import GroupMembers, meeting_store
from torchft_like.process_group.wrapper import ReconfigurableProcessGroup

CPU = torch.device("cpu")

_logger = logging.getLogger(__name__)


def adopted(pg: dist.ProcessGroup) -> ProcessGroup:
    """Return the group itself if it is of this package; wrap a group of torch's that can be reconfigured.

    Raises:
        ConfigError: the group is neither of this package nor torch's Gloo that can be reconfigured.
    """
    if hasattr(pg, "configure"):
        return pg  # type: ignore[return-value] # a group with `configure` has this package's interface
    can_ask = isinstance(pg, dist.ProcessGroup) and CPU in pg._device_types
    gloo = pg._get_backend(CPU) if can_ask else None
    # The attribute `supports_reconfigure` of torch's Gloo is true in any case.
    if isinstance(gloo, dist.ProcessGroupGloo) and getattr(gloo.options, "enable_reconfigure", False):
        return NativeProcessGroup(pg, gloo)
    raise ConfigError(
        f"no Manager can configure {pg!r:.99}: pass ProcessGroupGloo() or another group of this package, or "
        'what init_process_group("gloo", ..., enable_reconfigure=True) makes, from torch 2.14 on'
    )


class NativeProcessGroup(ReconfigurableProcessGroup):
    """torch's Gloo, configured with the address of a store, as the groups of this package are.

    Args:
        pg: torch's group; its other owners can use it between `configure` and the next abort.
        gloo: the backend of that group.
    """

    def __init__(self, pg: Any, gloo: Any) -> None:
        super().__init__(gloo.options._timeout)
        self._torchs = pg
        self._gloo = gloo
        self._meeting = threading.Lock()  # torch has one configuration at a time
        self._latest: _NativeBackend | None = None

    def getBackendName(self) -> str:  # noqa: N802
        return "native-gloo"

    def _create(self, members: GroupMembers, abort: AbortSignal) -> _NativeBackend:
        with self._meeting:
            abort.check()
            self._gloo._set_default_timeout(members.timeout)
            self._latest = backend = _NativeBackend(self, members)
            if members.world_size == 1:
                reconfigure_among(self._torchs, [self._torchs.get_reconfigure_handle()], members.timeout)
                return backend
            with meeting_store(members, abort) as store:
                seat = members.rank, members.world_size
                exchange_and_reconfigure(self._torchs, store, seat, members.timeout)
            return backend

    def _leave(self, backend: _NativeBackend) -> None:
        """Reconfigure to a single member, if this backend is still the latest."""
        with self._meeting:
            if self._latest is not backend:
                return
            self._latest = None
            try:
                reconfigure_among(self._torchs, [self._torchs.get_reconfigure_handle()], self._timeout)
            except RuntimeError as error:  # such as torch's store; the next `configure` reports it
                _logger.warning("torch's group could not leave its peers: %s", error)


class _NativeBackend:
    """torch's group in one configuration."""

    rest_s_max = math.inf  # torch ends every operation at its timeout, and nothing ends one before

    def __init__(self, owner: NativeProcessGroup, members: GroupMembers) -> None:
        self._owner = owner
        self._members = members

    def __str__(self) -> str:
        return f"torch's Gloo: {self._members}"

    @property
    def inner(self) -> object:
        return self._owner._gloo

    def methods(self) -> Mapping[str, Callable[..., Work]]:
        members = self._members
        return GlooGaps(self._owner._gloo, self._owner._torchs, members.rank, members.world_size).methods()

    def set_timeout(self, timeout: timedelta) -> None:
        self._owner._gloo._set_default_timeout(timeout)

    def break_off(self) -> None:
        """Do nothing before an abort: alone, the next operation would succeed, with a wrong result."""

    def is_still(self) -> bool:
        """Return False: only torch knows when it is done with its operations."""
        return False

    def close(self) -> None:
        """Leave the peers, which frees those that wait for this process."""
        self._owner._leave(self)
