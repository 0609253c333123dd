"""What the error of a group that could not connect says of the links between its members."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest

from lighthouse.address import Address
from tests.unit.process_group.conftest import LIMIT_S, Party
from torchft_like.process_group import gloo
from torchft_like.process_group.store import AbortableStore, GroupMembers, parse_store_address

pytestmark = pytest.mark.usefixtures("no_operator")
LISTENERS = {rank: Address(f"10.0.0.{rank}", 1) for rank in range(5)}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({1: [3], 3: [1]}, "ranks 1 (10.0.0.1) and 3 (10.0.0.3) do not reach each other; check the network"),
        ({1: [3]}, "ranks 1 (10.0.0.1) and 3 (10.0.0.3) do not reach each other; check the network"),
        ({0: [1, 2, 3], 2: [0]}, "rank 0 (10.0.0.0) and ranks [1, 2, 3] do not reach each other; check"),
        ({0: [1], 2: [3]}, "ranks 0 (10.0.0.0) and 1 (10.0.0.1) do not reach each other, ranks 2 (10.0.0.2)"),
        ({1: [], 3: []}, "rank 4 reaches the hosts of all others"),
    ],
)
def test_the_text_names_those_who_do_not_reach_each_other(found: gloo.Links, text: str) -> None:
    assert gloo.describe_links(4, found, [], LISTENERS).startswith(text)


def test_a_split_of_many_is_told_in_few_words() -> None:
    split = {one: range(500, 1000) for one in range(500)}
    assert len(gloo.describe_links(0, split, [], {})) < 20_000


def test_ranks_that_are_none_of_the_group_are_not_read() -> None:
    assert gloo.read_ranks(b"1,7,-1,x,,2", 4) == [1, 2]
    assert gloo.read_ranks(b"", 4) == []


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield listener


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A listener at which nobody answers: the system drops what a full queue cannot take."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener


def test_a_member_that_reaches_all_hears_from_the_others_who_does_not(
    party: Party, listener: socket.socket, silent: socket.socket
) -> None:
    prefix = parse_store_address(party.prefix())
    at, nowhere = (Address("127.0.0.1", one.getsockname()[1]) for one in (listener, silent))
    reached = {0: at, 1: at, 2: nowhere}, {0: at, 1: at, 2: at}, {0: nowhere, 1: at, 2: at}

    def explain(rank: int) -> str:
        members = GroupMembers(prefix, rank, 3, timedelta(seconds=LIMIT_S))
        with contextlib.closing(AbortableStore(prefix, members.timeout)) as store:
            store.connect()
            return gloo.explain_links(store, members, reached[rank])

    said = [each.result(LIMIT_S) for each in [party.aside(explain, rank) for rank in range(3)]]
    named = "ranks 0 (127.0.0.1) and 2 (127.0.0.1) do not reach each other"
    assert [text.startswith(named) for text in said] == [True] * 3, said


def test_who_is_refused_leaves_word_for_those_that_wait(party: Party, listener: socket.socket) -> None:
    """Rank 1 is refused by two: by rank 0, which the others reach, and by rank 3, which has ended."""
    prefix, at = parse_store_address(party.prefix()), Address("127.0.0.1", listener.getsockname()[1])
    with socket.socket() as closed, contextlib.ExitStack() as stack:
        closed.bind(("127.0.0.1", 0))
        gone = Address("127.0.0.1", closed.getsockname()[1])
        ports = (socket.htons(at.port), socket.htons(gone.port))
        error = " ".join(f"SO_ERROR: Connection refused, remote=[127.0.0.1]:{port}$1" for port in ports)

        def store_of(rank: int) -> tuple[AbortableStore, GroupMembers]:
            members = GroupMembers(prefix, rank, 4, timedelta(seconds=LIMIT_S))
            store = stack.enter_context(contextlib.closing(AbortableStore(prefix, members.timeout)))
            store.connect()
            return store, members

        own = gloo.report_refusal(*store_of(1), {0: at, 3: gone}, error)
        text = gloo.explain_links(*store_of(2), {0: at, 1: gone, 2: at, 3: gone})
    assert own.startswith("ranks [0, 3] refuse connections")
    assert text.startswith("ranks 0 (127.0.0.1) and 1 (127.0.0.1) do not reach each other; "), text


def test_a_rank_whose_host_refuses_has_ended(party: Party, listener: socket.socket) -> None:
    at = Address("127.0.0.1", listener.getsockname()[1])
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refusing = Address("127.0.0.1", closed.getsockname()[1])
        members = GroupMembers(parse_store_address(party.prefix()), 0, 2, timedelta(seconds=LIMIT_S))
        with contextlib.closing(AbortableStore(members.store, members.timeout)) as store:
            store.connect()
            text = gloo.explain_links(store, members, {0: at, 1: refusing})
    assert text.startswith("ranks [1] refuse connections"), text
