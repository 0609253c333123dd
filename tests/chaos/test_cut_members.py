"""One of three hosts hears nothing from another one, and all reach the lighthouse: the call of a coordinator
or a gang that waits for that link ends long before its timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import cut_members
from tests.managers import PATIENCE_MS
from torchft_like.testing.chaos.network import Network, Rules, why_unavailable
from torchft_like.testing.cluster import LIGHTHOUSE
from torchft_like.testing.ranks import Rank, Ranks, end_all

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(why_unavailable()), reason=str(why_unavailable())),
]
NAMES = "abc"
FROM_A_TO_C = Rules(cut=frozenset({("a", "c")}))


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network((LIGHTHOUSE, *NAMES), tmp_path, seed=1) as network:
        yield network


@pytest.fixture
def ranks(network: Network) -> Iterator[Ranks]:
    """A rank on each host. Nobody is lost for a late answer of a busy machine: the link alone decides."""
    own = {name: {"TORCHFT_HOSTNAME": network.address(name), "OMP_NUM_THREADS": "1"} for name in NAMES}
    patient = {"TORCHFT_KEEPALIVE_TIMEOUT_MS": str(PATIENCE_MS)}
    ranks = Ranks(Rank(variables=own[name] | patient, namespace=network.namespace(name)) for name in NAMES)
    try:
        yield ranks
    finally:
        end_all(ranks)


def each(ranks: Ranks) -> Iterator[tuple[str, Rank]]:
    return zip(NAMES, ranks, strict=False)


def test_members_of_an_elastic_coordinator(network: Network, lighthouse: str, ranks: Ranks) -> None:
    a, b, c = ranks
    for name, rank in each(ranks):
        rank.ask(cut_members.make_member, name, lighthouse)
        rank.tell(cut_members.follow, NAMES)
    ranks.answers()
    for rank in ranks:
        rank.tell(cut_members.serve)
    network.apply(FROM_A_TO_C)
    errors = ranks.answers()
    assert any("cannot reach a;" in error or "cannot reach c;" in error for error in errors), errors

    for rank in (a, b):
        rank.tell(cut_members.follow, "ab")
    c.tell(cut_members.follow, NAMES)
    Ranks([a, b]).answers()
    assert not c.has_answer()
    network.apply(Rules())
    for rank in (a, b):
        rank.tell(cut_members.serve_until, NAMES)
    ranks.answers()


@pytest.mark.parametrize("face", ["gang", "coordinator"])
def test_replicas_with_a_managed_one(face: str, network: Network, lighthouse: str, ranks: Ranks) -> None:
    a, b, c = ranks
    for name, rank in each(ranks):
        rank.ask(cut_members.make_replica, name, lighthouse)
        rank.tell(cut_members.train, face, len(NAMES))
    ranks.answers()
    network.apply(FROM_A_TO_C)
    for rank, size in ((a, 2), (b, 2), (c, 3)):
        rank.tell(cut_members.train, face, size)
    errors = [*a.answer(), *b.answer()]
    assert not c.has_answer()
    network.apply(Rules())
    for rank in (a, b):
        rank.tell(cut_members.train, face, len(NAMES))
    ranks.answers()
    assert errors


def test_two_members_who_cannot_join_a_group_are_named(network: Network, ranks: Ranks) -> None:
    network.apply(FROM_A_TO_C)
    store = ranks[1].ask(cut_members.serve_store, network.address("b"))
    for number, rank in enumerate(ranks):
        rank.tell(cut_members.configure, store, number, len(NAMES))
    of_a, _, of_c = ranks.answers()
    named = f"ranks 0 ({network.address('a')}) and 2 ({network.address('c')}) do not reach each other"
    assert named in of_a
    assert named in of_c
    network.apply(Rules())
    for number, rank in enumerate(ranks):
        rank.tell(cut_members.configure, f"{store}/again", number, len(NAMES))
    assert ranks.answers() == [""] * len(NAMES)


def test_a_third_that_waits_for_them_to_have_collectives_checked_names_two_who_cannot_join(
    network: Network, ranks: Ranks
) -> None:
    """It is connected to both. In a job its error is the first, and all others are aborted for it."""
    network.apply(Rules(cut=frozenset({("a", "b")})))
    store = ranks[2].ask(cut_members.serve_store, network.address("c"))
    for number, rank in enumerate(ranks):
        rank.tell(cut_members.configure, store, number, len(NAMES), True)
    errors = ranks.answers()
    named = f"ranks 0 ({network.address('a')}) and 1 ({network.address('b')}) do not reach each other"
    assert [named in error for error in errors] == [True] * 3, errors


def test_an_operation_whose_time_is_up_names_the_member_out_of_reach(network: Network, ranks: Ranks) -> None:
    a, b, c = ranks
    store = b.ask(cut_members.serve_store, network.address("b"))
    for number, rank in enumerate((a, c)):
        rank.tell(cut_members.configure, store, number, 2)
    assert [a.answer(), c.answer()] == [""] * 2
    network.apply(FROM_A_TO_C)
    for rank in (a, c):
        rank.tell(cut_members.reduce)
    errors = [a.answer(), c.answer()]  # the connections of the first end the wait of the other
    named = f"ranks 0 ({network.address('a')}) and 1 ({network.address('c')}) do not reach each other"
    assert any(named in error for error in errors), errors
