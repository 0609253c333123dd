"""A gang whose members are those of a Manager's quorum, and gangs of it that are derived anew.

The Manager decides which replicas are members; a trainer calls `start_quorum` and `should_commit` as with any
Manager. In between, a gang's functions raise a GangError where a managed group would keep an error to itself,
and the step of such an error is lost: a script that goes on cannot commit it.

INVARIANT: a gang made of this one belongs to one quorum. It ends, wherever its members wait, when that
quorum's group is aborted or configured anew, and says so from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from torchft_like.communicator.communicator import Communicator
from torchft_like.errors import GangError
from torchft_like.gang.base import Gang
from torchft_like.gang.gangs import Gangs
from torchft_like.gang.group_gang import GroupGang
from torchft_like.process_group import ManagedProcessGroup
from torchft_like.process_group.configuration import Configuration
from torchft_like.process_group.swallowing import GroupManager


@final
class ManagedGang(GroupGang):
    """The members of the current quorum, healing ones included: one rank of every replica group.

    It is usable from the first `start_quorum` on. A reduction counts the participants, so a replica that
    heals in this step adds zero, or another value that changes no result, and MEAN divides by the others; a
    function that shares tensors out by rank (all_gather) makes no sense in such a step and raises a
    GangError. So do all functions of sub-gangs in it. Step 0 is such a step, however often it is tried,
    unless the Manager has `init_sync=False`; with `use_async_quorum=False` replicas heal before the step, and
    no step is. Its process group is a ManagedProcessGroup, whose collectives do not raise.

    After a GangError go on to the next `start_quorum`: the gang then has the members of that quorum.

    Args:
        manager: the Manager of this rank.
        device: the device of the tensors; None asks the manager's group.
    """

    def __init__(self, manager: GroupManager, device: torch.device | None = None) -> None:
        group = ManagedProcessGroup(manager)
        super().__init__(group, device or group._device_types[0])
        self._manager = manager
        self._tell, self._check_parts = manager.report_error, self._check_nobody_heals

    @property
    def rank(self) -> int:
        """The caller's place in the quorum; to read it waits for the quorum."""
        self._wait_quorum()
        rank = self._manager.replica_rank()
        if rank is None:
            raise GangError("the manager has no quorum yet: call start_quorum first")
        return rank

    @property
    def size(self) -> int:
        """The number of members of the quorum; to read it waits for the quorum."""
        self._wait_quorum()
        return self._manager.replica_world_size()

    @property
    def configuration(self) -> Configuration:
        """The present configuration of the manager's group; to read it waits for the quorum."""
        self._wait_quorum()
        return self._manager.process_group.configuration

    def close(self) -> None:
        """Do nothing: the group is the Manager's."""

    def _whole(self, members: Communicator) -> Communicator:
        return self._over(self._manager.process_group)

    def of_all(self) -> Gang:
        """Return a gang of the current quorum, which cannot be used while a member heals."""
        return self.split([range(self.size)]) or self

    def _check_nobody_heals(self) -> None:
        if not (healing := self._manager.healing_ranks()):
            return
        cure = "they do in the next one, and in every one with Manager(use_async_quorum=False)"
        if self._manager.current_step() == 0:  # step 0 is tried again, and then they heal again
            cure = "pass Manager(use_async_quorum=False), or init_sync=False if all replicas start out alike"
        error = GangError(
            f"ranks {sorted(healing)} of the quorum fetch the others' state in this step, and sub-gangs do "
            f"not work in such a step: {cure}"
        )
        self._manager.report_error(error)
        raise error

    def _present(self) -> Communicator:
        self._wait_quorum()
        return self._over(self._pg)

    def _wait_quorum(self) -> None:
        try:
            self._manager.wait_quorum()
        except Exception as error:
            raise GangError(f"there is no quorum: {error}") from error

    def __repr__(self) -> str:
        return f"<ManagedGang over {self._manager!r} on {self._device}>"


class ElasticGangs:
    """The gangs of a job whose size changes: one rule, applied to every quorum.

        gangs = ElasticGangs(ManagedGang(manager), lambda root: create_parallel_gangs(root, tp_size=2))
        ...
        manager.start_quorum()
        gangs.current().tp.all_reduce(...)

    Args:
        root: the gang of the quorum.
        rule: the function that makes gangs of it; the same on all members.
    """

    def __init__(self, root: ManagedGang, rule: Callable[[Gang], Gangs]) -> None:
        self._root = root
        self._rule = rule
        self._configuration: Configuration | None = None  # the configuration of the present gangs
        self._gangs: Gangs | None = None

    def current(self) -> Gangs:
        """Return the gangs of the current quorum, derived anew if it is another one than at the last call.

        Every member calls this, after `start_quorum` and before its first use of them.

        Raises:
            TopologyError: the size of the quorum does not factor. Every member gets the error, before
              anything is sent. Another quorum may have another size.
            GangError: the members could not meet.
        """
        configuration = self._root.configuration
        if self._gangs is None or self._configuration is not configuration:
            self.close()
            self._gangs, self._configuration = self._rule(self._root), configuration
        return self._gangs

    def close(self) -> None:
        """Close the present gangs. Safe to call again."""
        gangs, self._gangs = self._gangs, None
        if gangs is not None:
            gangs.close()
