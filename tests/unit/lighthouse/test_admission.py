"""What is let in is as long as docs/security.md says, and no longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lighthouse import admission
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.membership import QuorumNumber
from lighthouse.wire import torchft_pb2 as pb

LIMIT = admission.believable(0, QuorumNumber(1, 1))


def about_links(*ids: str) -> str | None:
    return admission.about_links(pb.BrokenLinks(unreachable_replica_ids=ids))


def about_register(**fields: object) -> str | None:
    register = pb.Register(replica_id="a", **fields)  # type: ignore[arg-type]
    return admission.about_register(register, LighthouseConfig(), LIMIT)


@pytest.mark.parametrize(
    ("most", "check"),
    [
        (4096, lambda length: admission.about_replica("x" * length)),
        (4096, lambda length: about_register(address="x" * length)),
        (64, lambda count: about_links(*["x"] * count)),
        (16_384, lambda length: about_links(*["x" * 256] * 63, "x" * (length - 63 * 256))),
        (10**15, admission.about_step),
        (100 * 365 * 24 * 60 * 60 * 1000, lambda number: about_register(last_quorum_id=number)),
    ],
    ids=["replica id", "address", "links", "names of links", "step", "quorum id"],
)
def test_one_more_than_the_limit_is_refused(most: int, check: Callable[[int], str | None]) -> None:
    assert check(most) is None
    assert check(most + 1) is not None
