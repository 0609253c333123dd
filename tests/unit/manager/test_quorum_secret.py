"""Who does not know the secret of a quorum cannot tell where its members meet, nor fetch their state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from lighthouse.address import LOOPBACK
from tests.unit.manager.test_step import quorum as quorum_result
from torchft_like import ProcessGroupGloo
from torchft_like.core.quorum_secret import QuorumSecret
from torchft_like.errors import ProcessGroupError
from torchft_like.group_coordinator.elastic import Membership
from torchft_like.process_group.store import parse_store_address, serve_store

LIMIT = timedelta(seconds=30)
SECRET = QuorumSecret(bytes(range(32)))


def test_members_meet_where_no_other_secret_and_no_key_leads() -> None:
    result = quorum_result(store_address="host:1", secret=SECRET)
    place = result.meeting_place("torchft/7/0")
    assert place == result.meeting_place("torchft/7/0") != result.meeting_place("torchft/7/1")
    assert place != result._replace(secret=QuorumSecret(b"another")).meeting_place("torchft/7/0")
    assert result.checkpoint_key not in ("", *place.split("secret="))
    assert SECRET.hex()[:16] not in place + result.checkpoint_key


def test_without_a_secret_it_is_as_in_torchft() -> None:
    result = quorum_result(store_address="host:1")
    assert (result.meeting_place("torchft/7/0"), result.checkpoint_key) == ("host:1/torchft/7/0", "")


def test_no_text_for_people_has_a_secret() -> None:
    result = quorum_result(store_address="host:1", secret=SECRET)
    place = result.meeting_place("torchft/7/0")
    key = place.partition("secret=")[2]
    texts = [f"{result!r} {SECRET} {SECRET!r}", repr(parse_store_address(place))]
    texts.append(repr(Membership(7, place, ("a",))))
    with pytest.raises(ProcessGroupError) as refused:
        ProcessGroupGloo(LIMIT).configure(f"{LOOPBACK}:1/x/secret={key}", 0, 2)
    texts.append(str(refused.value))
    server, address = serve_store(LOOPBACK, LIMIT)
    group = ProcessGroupGloo(timedelta(seconds=1))
    group.configure(f"{address}/x/secret={key}", 0, 1)
    with pytest.raises(Exception, match="nobody sets this") as timed_out:  # torch's own
        group.get_group_store().get("nobody sets this")
    texts.append(str(timed_out.value))
    group.shutdown()
    del server
    assert all(one not in text for text in texts for one in (key, repr(bytes(SECRET))[2:-1]))


def test_a_false_member_meets_nobody() -> None:
    """Neither the store's keys nor the referee of the check of collectives are where it looks."""
    server, address = serve_store(LOOPBACK, LIMIT)
    place = quorum_result(store_address=str(address), secret=SECRET).meeting_place("torchft/7/0")
    with ThreadPoolExecutor(3) as pool:
        true, false = (ProcessGroupGloo(seconds) for seconds in (LIMIT, timedelta(seconds=1)))
        first = pool.submit(true.configure, place, 0, 2)
        with pytest.raises((ProcessGroupError, TimeoutError)):
            false.configure(f"{address}/torchft/7/0", 1, 2)
        assert not first.done()
        second = ProcessGroupGloo(LIMIT)
        second.configure(place, 1, 2)
        first.result()
    for group in (true, second):
        group.shutdown()
    del server
