"""Queues of coordinators whose members live in threads of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.group_coordinator.test_coordinator import LIMIT_S, gloo, over
from tests.unit.process_group.conftest import Party, party, store
from torchft_like.errors import QueueClosedError
from torchft_like.group_coordinator import GroupCoordinator, queues
from torchft_like.message_queue.remote_audience import RemoteAudience

__all__ = ["party", "store"]


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every member on a machine of its own, as far as the coordinators know."""
    places = queues._places

    def apart(*arguments: object) -> list[bytes]:
        return [b"%d" % rank for rank, _ in enumerate(places(*arguments))]  # type: ignore[arg-type]

    monkeypatch.setattr(queues, "_places", apart)


def together(party: Party, act: Callable[[int, GroupCoordinator], object], size: int = 2) -> list[object]:
    return party.together(over(party.meet(size, gloo)), act)  # type: ignore[arg-type]


@pytest.mark.usefixtures("far")
def test_groups_that_are_broken_off_wait_for_no_reader(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    patience: list[float] = []
    close = RemoteAudience.close

    def heard(audience: RemoteAudience, patience_s: float = 0.0) -> None:
        patience.append(patience_s)
        close(audience, patience_s)

    monkeypatch.setattr(RemoteAudience, "close", heard)
    coordinators = over(party.meet(2, gloo))
    writer, reader = party.together(coordinators, lambda _, c: c.create_mq_broadcaster())  # type: ignore[arg-type]
    writer.enqueue("nobody reads this", LIMIT_S)
    coordinators[0]._current().break_off("a test")
    assert patience == [0]
    with pytest.raises(QueueClosedError):
        writer.enqueue("too late")
    assert reader.dequeue(LIMIT_S) == "nobody reads this"
    with pytest.raises(QueueClosedError):
        reader.dequeue(LIMIT_S)
    for coordinator in coordinators:
        coordinator.destroy()
