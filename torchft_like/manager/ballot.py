"""The common decisions of the ranks of one replica group: whether a step commits, and whether they leave
after it.

A rank that is asked to stop while another has already begun the next step could not leave without spoiling
that step. So the rank puts its wish to stop into its next vote, and the verdict on that step, which every
rank gets, stops all of them at the same place in the script.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

from torchft_like.core.replica_group import Verdict
from torchft_like.errors import GroupLostError
from torchft_like.manager.attempt import Attempt
from torchft_like.manager.config import ManagerConfig
from torchft_like.manager.quorum_driver import QuorumDriver
from torchft_like.manager_server.rank_link import RankLink
from torchft_like.runtime.durations import seconds_of


class Ballot:
    """One rank's part in the votes of its replica group.

    Attributes:
        stop_agreed: whether the group leaves, by the last verdict.
        checks: return an error that keeps this rank from voting yes.
    """

    def __init__(self, config: ManagerConfig, link: RankLink, driver: QuorumDriver) -> None:
        self.stop_agreed = False
        self.checks: list[weakref.WeakMethod[Callable[[], Exception | None]]] = []
        self._stop_wanted = False
        self._config = config
        self._link = link
        self._driver = driver

    def request_stop(self) -> None:
        """Ask the group to stop; a rank without others need not wait for a vote. Safe in a signal handler."""
        self._stop_wanted = True
        self._driver.asked_to_stop()
        self.stop_agreed = self.stop_agreed or self.is_alone

    @property
    def is_alone(self) -> bool:
        """Whether this rank is the whole replica group, whose vote is the verdict."""
        return self._config.group_world_size == 1

    def objections(self) -> Iterator[Exception]:
        """Run the checks, and yield what they object to."""
        for reference in self.checks:
            if (check := reference()) is not None and (error := check()) is not None:
                yield error

    def decide(self, attempt: Attempt, vote: Verdict, timeout: timedelta | float | None) -> Verdict:
        """Return the verdict on the step, which is the same on every rank.

        Raises:
            GroupLostError: a rank is gone, or did not vote within the timeout.
        """
        self._link.vote(self._config.group_rank, vote._replace(stop=self._stop_wanted))
        bound_s = self._config.timeout_s if timeout is None else seconds_of(timeout, "timeout")
        if attempt.has_exchanged:
            bound_s += self._config.timeout_s
        verdict = attempt.wait_decided(bound_s)
        if verdict is None:
            # The others may have been told either verdict; a guess could make the ranks of this group differ.
            error = GroupLostError(
                f"not all ranks of replica group {self._link.replica_id} voted on step {vote.step} within "
                f"{bound_s:g} s; restart all ranks of this replica group"
            )
            self._driver.stop(error, None)
            raise error
        self.stop_agreed = verdict.stop
        return verdict
