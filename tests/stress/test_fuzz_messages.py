"""Messages that are well formed and make no sense: what the cores do with them.

The way of a message is that of the real servers: through the reader, through admission, into the core.
`FUZZ_EXAMPLES` (`make fuzz EXAMPLES=...`) says how many inputs each target tries; a case that was found once
stays as an `@example` beside its target.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lighthouse import admission, codec
from lighthouse.core.config import MESSAGE_BYTES_MAX, LighthouseConfig
from lighthouse.core.decisions import LeftOut, MemberLost, QuorumFormed, QuorumOver
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import QuorumCore
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.core.replica_group import RankJoin, RankQuorum, RankVerdict, ReplicaGroup, Verdict
from torchft_like.manager_server.duplex import MalformedMessageError
from torchft_like.manager_server.rank_link import quorum_result_from_wire, quorum_result_to_wire

NOW_MS = 1_800_000_000_000
CONFIG = LighthouseConfig(replicas_max=8)
INT64 = st.integers(-(2**63), 2**63 - 1)

fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "40")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
numbers = st.one_of(INT64, st.sampled_from([0, 1, -1, 2**62, 2**63 - 1, -(2**63), 10**15]))
names = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["a", "b", "", "\x1b[2J", "a\nb", "x" * 5000, "\u202eabc", "a:" + "f" * 36]),
).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))

members = st.builds(
    pb.QuorumMember,
    replica_id=names,
    address=names,
    store_address=names,
    step=numbers,
    world_size=st.integers(0, 2**64 - 1),
    shrink_only=st.booleans(),
    data=names,
    commit_failures=numbers,
    reconfigure_handles=st.lists(names, max_size=3),
    commit_quorum_id=numbers,
    rank_addresses=st.lists(st.builds(pb.RankAddress, group_rank=numbers, address=names), max_size=2),
)
registers = st.builds(
    pb.Register,
    replica_id=names,
    address=names,
    last_quorum_id=numbers,
    last_quorum_round=numbers,
    last_quorum_replica_ids=st.lists(names, max_size=4),
)
events = st.one_of(
    st.tuples(st.just("register"), registers),
    st.tuples(st.just("join"), members),
    st.tuples(st.just("call"), members),
    st.tuples(st.just("heartbeat"), names),
    st.tuples(st.just("lost"), st.integers(0, 9)),
    st.tuples(
        st.just("links"), st.builds(pb.BrokenLinks, unreachable_replica_ids=st.lists(names, max_size=70))
    ),
)


@fuzz
@given(st.lists(events, max_size=25))
@example(
    [
        ("register", pb.Register(replica_id="a", last_quorum_id=2**63 - 1)),
        ("join", pb.QuorumMember(replica_id="a")),  # the next id would fit into no message
    ]
)
@example(
    [
        ("register", pb.Register(replica_id="a", last_quorum_id=2**62)),
        ("join", pb.QuorumMember(replica_id="a")),
    ]
)
@example(
    [
        ("register", pb.Register(replica_id="a", last_quorum_id=NOW_MS + admission.AHEAD_MS_MAX)),
        ("register", pb.Register(replica_id="a", last_quorum_round=NOW_MS + admission.AHEAD_MS_MAX)),
        ("call", pb.QuorumMember(replica_id="a")),
    ]
)
@example(
    [  # groups in groups, just as deep as a reader of one member goes
        ("register", pb.Register(replica_id="a")),
        ("join", pb.QuorumMember.FromString(b"\x0a\x01a" + 99 * b"\xa3\x06" + 99 * b"\xa4\x06")),
    ]
)
def test_a_lighthouse_told_nonsense_forms_quorums_that_can_be_sent(told: list[tuple[str, object]]) -> None:
    core = QuorumCore(CONFIG, NOW_MS)
    for number, (kind, value) in enumerate(told):
        for decision in list(tell(core, number, kind, value)):
            if isinstance(decision, QuorumFormed):
                message = codec.told(quorum=codec.quorum_to_wire(decision.quorum, 1.0))
                assert len(message) <= MESSAGE_BYTES_MAX
                assert codec.reader(pb.SessionResponse)(message) is not None
                can_be_reported(core, decision)
            elif isinstance(decision, MemberLost | QuorumOver):
                codec.news(decision)
            elif isinstance(decision, LeftOut):
                for _, replica_id in decision.sessions:
                    codec.left_out(decision, replica_id)
    assert core.describe(0.0).replace("\n", "").isprintable()


def tell(core: QuorumCore, number: int, kind: str, value: object) -> Iterator[object]:
    """What the server does with a message, and the decisions; sessions have the numbers of their events."""
    limit = admission.believable(NOW_MS, core.highest)
    match value:
        case pb.Register() if admission.about_register(value, CONFIG, limit) is None:
            last = QuorumNumber(value.last_quorum_id, value.last_quorum_round)
            yield from core.register(number, value.replica_id, last, value.last_quorum_replica_ids, number)
        case pb.QuorumMember() if admission.about_member(value, CONFIG, limit) is None:
            member = codec.member_from_wire(value)
            session = core.session_of(member.replica_id)
            if kind == "call" or session is None:
                yield from core.call(member, number)
            else:
                yield from core.join(session, member, number)
        case pb.BrokenLinks() if admission.about_links(value) is None:
            yield from core.report_links(number - 1, value.unreachable_replica_ids, number)
        case str() if admission.about_replica(value) is None:
            yield from core.heartbeat(value, number)
        case int():
            yield from core.lost(value, "gone", number)


def can_be_reported(core: QuorumCore, formed: QuorumFormed) -> None:
    """Or no member could ever come back."""
    register = pb.Register(
        replica_id=formed.quorum.participants[0].replica_id,
        last_quorum_id=formed.quorum.quorum_id,
        last_quorum_round=formed.quorum.round,
        last_quorum_replica_ids=[member.replica_id for member in formed.quorum.participants],
    )
    assert admission.about_register(register, CONFIG, admission.believable(NOW_MS, core.highest)) is None


@fuzz
@given(INT64, INT64, st.lists(members, max_size=4))
@example(2**63 - 1, 2**63 - 1, [pb.QuorumMember(replica_id="me", step=-(2**63))])
@example(-1, -1, [pb.QuorumMember(replica_id="me")] * 3)
def test_a_group_makes_a_result_of_any_quorum_that_it_is_in(
    quorum_id: int, round_number: int, participants: list[pb.QuorumMember]
) -> None:
    group = ReplicaGroup("me", 1)
    own = next((member for member in participants if member.replica_id == "me"), pb.QuorumMember(step=1))
    group.rank_joined(
        RankJoin(0, own.step, "http://127.0.0.1:1", commit_quorum_id=own.commit_quorum_id)
    )  # else it would not be the answer
    effects = group.quorum_formed(quorum_id, participants, round_number)
    if "me" not in {member.replica_id for member in participants}:
        assert effects == []
        return
    (quorum,) = effects
    assert isinstance(quorum, RankQuorum)
    assert quorum_result_from_wire(quorum_result_to_wire(quorum.result)) == quorum.result


responses = st.builds(
    pb.ManagerQuorumResponse,
    quorum_id=numbers,
    replica_rank=numbers,
    recover_src_replica_rank=st.none() | numbers,
    recover_dst_replica_ranks=st.lists(numbers, max_size=3),
    max_replica_rank=st.none() | numbers,
    replica_ids=st.lists(names, max_size=3),
    store_address=names,
)


@fuzz
@given(responses)
@example(pb.ManagerQuorumResponse(replica_rank=7, replica_ids=["a"]))  # an IndexError while configuring
@example(pb.ManagerQuorumResponse(replica_ids=["a"], recover_src_replica_rank=-1))
def test_a_rank_takes_only_a_quorum_whose_ranks_are_members(response: pb.ManagerQuorumResponse) -> None:
    try:
        result = quorum_result_from_wire(response)
    except MalformedMessageError:
        return
    assert result.replica_ids[result.replica_rank] is not None
    assert all(result.replica_ids[rank] is not None for rank in result.recover_dst_replica_ranks)
    assert min((result.replica_rank, *result.recover_dst_replica_ranks)) >= 0


votes = st.builds(pb.ShouldCommitRequest, step=numbers, should_commit=st.booleans(), stop=st.booleans())


@fuzz
@given(st.lists(st.tuples(st.integers(0, 1), votes), max_size=12))
@example([(0, pb.ShouldCommitRequest(step=-(2**63))), (1, pb.ShouldCommitRequest(step=2**63 - 1))])
def test_ranks_that_vote_nonsense_get_one_verdict(said: list[tuple[int, pb.ShouldCommitRequest]]) -> None:
    group = ReplicaGroup("me", 2)
    for rank, vote in said:
        effects = group.rank_voted(rank, Verdict(vote.step, vote.should_commit, vote.stop))
        verdicts = [effect.verdict for effect in effects if isinstance(effect, RankVerdict)]
        assert len({(verdict.committed, verdict.stop) for verdict in verdicts}) <= 1
        assert not any(verdict.committed for verdict in verdicts) or len({v.step for v in verdicts}) == 1
