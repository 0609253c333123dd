"""The lighthouse gives each quorum a secret of its own, and states who was in it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lighthouse.core.trust import Role, make_texts
from lighthouse.trust import TOKEN_FILE_ENV
from lighthouse.wire import torchft_pb2 as pb
from tests.integration.cluster import CHECKED, Cluster
from tests.integration.lighthouse_clients import SessionClient, UnaryClient, ids_of, registered
from tests.integration.options import WorkerOptions
from tests.managers import lighthouse_here
from torchft_like.coordination import LighthouseServer

pytestmark = [pytest.mark.integration, *CHECKED]

FAR = 1_000_000


def joined(*clients: SessionClient, **fields: object) -> list[pb.Quorum]:
    for client in clients:
        client.join(**fields)
    return [client.quorum() for client in clients]


def test_members_share_a_secret_for_as_long_as_the_quorum_keeps_its_id(
    lighthouse: LighthouseServer,
) -> None:
    """Nor does the lighthouse keep it in what its page and its events are made of."""
    with registered(lighthouse.address(), "a", "b") as (a, b):
        first, same = joined(a, b, takes_secret=True)
        assert first.secret not in lighthouse._lighthouse.quorum.SerializeToString()
        again, _ = joined(a, b, takes_secret=True)
        later, _ = joined(a, b, takes_secret=True, commit_failures=1)
    assert first.secret == same.secret == again.secret
    assert len(first.secret) == 32
    assert (first.quorum_id, len(later.secret)) == (again.quorum_id, 32)
    assert later.secret != first.secret


def test_a_member_that_does_not_take_it_leaves_all_without_a_secret(lighthouse: LighthouseServer) -> None:
    address = lighthouse.address()
    with registered(address, "a") as (a,), UnaryClient(address) as client:
        call = client.join("torchft")
        a.join(takes_secret=True)
        assert (a.quorum().secret, call.result().quorum.secret) == (b"", b"")


@pytest.mark.parametrize(
    ("statement", "believed"),
    [("none", FAR), ("another", FAR), ("its own", 50), ("from before the token was replaced", FAR)],
)
def test_a_restarted_lighthouse_believes_its_own_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, believed: int
) -> None:
    """A stranger with the participants' token says that it was in a later quorum, and is far ahead."""
    file = tmp_path / "tokens"
    file.write_text(make_texts()[Role.OPERATE])
    monkeypatch.setenv(TOKEN_FILE_ENV, str(file))
    with lighthouse_here() as server, registered(server.address(), "a", "b") as (a, b):
        last, _ = joined(a, b, step=50)
    if "replaced" in statement:
        file.write_text(make_texts()[Role.OPERATE])
    other = pb.Statement(step=50, digest=bytes(32))
    shown = {"another": other, "none": None}.get(statement, last.statement)
    seen, false = (last.quorum_id, 1, ids_of(last)), (last.quorum_id + 1, 2, ["x"])
    with (
        lighthouse_here() as server,
        SessionClient(server.address(), "x", false, statement=last.statement) as x,
        SessionClient(server.address(), "a", seen, statement=shown) as a,
    ):
        x.registered()
        x.join(step=FAR, commit_quorum_id=false[0])
        a.registered()
        a.join(step=50, commit_quorum_id=last.quorum_id)
        while not isinstance(quorum := a.quorum_or_loss(), pb.Quorum):
            pass
    assert ids_of(quorum) == ["a", "x"]
    assert max(member.step for member in quorum.participants) == believed


@pytest.mark.parametrize("size", [1, 2])
def test_a_member_that_claims_a_far_step_is_no_source_and_costs_no_step(tmp_path: Path, size: int) -> None:
    """Real replica groups, and one that has everything a member has, and lies."""
    with Cluster(tmp_path, min_replicas=2) as cluster:
        a, b = cluster.start_all("ab", size=size)
        since = time.time()  # until then they have begun with the same state
        liar = cluster.start("liar", size=size, options=WorkerOptions(claims=FAR))
        cluster.wait_for_quorum_of(a, b, liar)
        assert [len(rank.events("heal")) for rank in liar.ranks] == [1] * size
        assert not any(group.events("heal", since) for group in (a, b))
        assert [group.failures(since) for group in (a, b)] == [[], []]
        assert max(group.step for group in (a, b, liar)) < FAR
        (told,) = cluster.lighthouse_events.records("unproven")
        assert told["members"] == [liar.replica_id]
