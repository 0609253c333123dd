"""What a Manager says that has no more retries."""

from __future__ import annotations

import pytest
from torch import nn

from tests.managers import lighthouse_here, manager_alone
from torchft_like.errors import MaxRetriesError


def test_too_few_participants_for_long_are_named_by_the_error() -> None:
    with (
        lighthouse_here(min_replicas=1) as lighthouse,
        manager_alone(
            "alone", lighthouse.address(), nn.Linear(1, 1), min_replica_size=2, max_retries=0
        ) as manager,
    ):
        manager.start_quorum()
        with pytest.raises(MaxRetriesError, match="1 replica group took part in it, and min_replica_size"):
            manager.should_commit()
