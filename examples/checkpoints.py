"""Checkpoints on a disk that all replica groups reach, for the day when no group is left.

The first of the groups that take part writes them, every rank its part of the state, in the background while
the training goes on. A group that starts loads the newest one that is complete: if all start, the job goes on
from there; if others train, or have found a newer one, this group heals from them in its first step.

A checkpoint is complete when it has its `.metadata`, which torch writes last. One that is complete and cannot
be read, as a file is damaged, is passed over. Each start of a group writes into folders of its own: a process
that was taken for dead may go on writing. Nothing here deletes old checkpoints, or parts of one.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from torchft_like import Manager

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one job. All ranks of a replica group call the methods at the same steps.

    Args:
        folder: where they are; None saves and resumes nothing.
        every: committed steps between two of them.
    """

    def __init__(
        self,
        folder: Path | None,
        every: int,
        manager: Manager,
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> None:
        self.folder, self.every = folder, every
        self.manager, self.model, self.optim = manager, model, optim
        self.saved_step = manager.current_step()
        self.writing: Future[Any] | None = None
        # The ranks that write talk beside the training, so not in its group.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def resume(self) -> bool:
        """Load the newest checkpoint that can be read, before the first step; return whether there is one.

        Raises:
            CheckpointException: none of those that are complete can be read: no job is begun anew then.
        """
        found = [self.complete()]
        if self.group is not None:  # another group may complete one just now: all ranks load the same
            dist.broadcast_object_list(found, group_src=0, group=self.group)
        unreadable = None
        for folder in found[0]:
            try:
                self.load(folder)
            except CheckpointException as error:  # on all ranks, if one of them cannot read its part
                logger.error("%s cannot be read: %r", folder, error)
                unreadable = error
            else:
                return True
        if unreadable is not None:
            raise unreadable
        return False

    def load(self, folder: Path) -> None:
        """Load a checkpoint."""
        state = self.state()
        load(state, checkpoint_id=folder, process_group=self.group, no_dist=self.group is None)
        set_state_dict(
            self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        self.manager.load_state_dict(state["manager"])
        self.saved_step = self.manager.current_step()

    def save_if_due(self) -> None:
        """Begin to save a state that is due; called between two steps."""
        if self.manager.current_step() % self.every == 0:
            self.save()

    def save(self) -> None:
        """Begin to save this state, unless it is saved, or is another group's to save."""
        step = self.manager.current_step()
        if self.folder is None or step == self.saved_step or self.manager.participating_rank() != 0:
            return
        self.finish()
        name = f"step-{step}-{self.manager.replica_id()}"
        writing = async_save(  # returns when it has a copy
            self.state(),
            checkpoint_id=self.folder / name,
            process_group=self.group,
            no_dist=self.group is None,
        )
        assert isinstance(
            writing, Future
        )  # and no response with one: the copy was not made in the background
        self.writing, self.saved_step = writing, step

    def finish(self) -> None:
        """Wait until the last save has ended. One that has failed is no reason to stop training."""
        if self.writing is not None and (error := self.writing.exception()) is not None:
            logger.error("a checkpoint was not written: %r", error)
        self.writing = None

    def complete(self) -> list[Path]:
        """Return the folders of the complete checkpoints, the newest one first."""
        complete = self.folder.glob("step-*/.metadata") if self.folder is not None else ()
        return sorted((path.parent for path in complete), key=_step_and_name, reverse=True)

    def state(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim, "manager": self.manager.state_dict()}


def _step_and_name(folder: Path) -> tuple[int, str]:
    return int(folder.name.split("-")[1]), folder.name
