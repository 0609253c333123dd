"""The quorum core's limits and settings: a thousand replicas, input of a broken peer, what is let in."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from lighthouse import admission, net
from lighthouse.cli import main
from lighthouse.core.claims import QUORUMS_MAX, Claims, Past
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import Member, MemberLost, QuorumFormed
from lighthouse.core.identity import Identity, why_foreign
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import ALARMS_PER_QUORUM_MAX, QuorumCore
from lighthouse.core.state_form import StateForm
from lighthouse.errors import ConfigError
from lighthouse.trust import INSECURE_ENV
from lighthouse.wire import torchft_pb2 as pb

REPLICAS = 1000
NONE = QuorumNumber(0, 0)


def _core_with_quorum() -> QuorumCore:
    core = QuorumCore(LighthouseConfig(min_replicas=REPLICAS // 4), 1)
    for number in range(REPLICAS):
        core.register(number, f"{number:04}", NONE, [], now=0.0)
    decisions = [core.join(n, Member(f"{n:04}"), now=1.0) for n in range(REPLICAS)]
    assert [len(d) for d in decisions] == [0] * (REPLICAS - 1) + [1]
    return core


def test_a_mass_loss_alarms_survivors_a_bounded_number_of_times() -> None:
    core = _core_with_quorum()
    told = []
    for number in range(REPLICAS // 2):
        [lost] = core.lost(number, "gone", now=2.0)
        assert isinstance(lost, MemberLost)
        told.append(len(lost.sessions))
    assert told[0] == REPLICAS - 1
    assert sum(count > 0 for count in told) == ALARMS_PER_QUORUM_MAX


@pytest.mark.progress
def test_the_survivors_of_a_mass_loss_form_a_quorum_at_once() -> None:
    core = _core_with_quorum()
    for number in range(REPLICAS // 2):
        core.lost(number, "gone", now=2.0)
    decisions = [d for n in range(REPLICAS // 2, REPLICAS) for d in core.join(n, Member(f"{n:04}"), now=3.0)]
    [formed] = decisions
    assert isinstance(formed, QuorumFormed)
    assert len(formed.sessions) == len(formed.left) == REPLICAS // 2


def test_a_refusal_names_its_cure() -> None:
    one, two = Identity(forms=(StateForm(),)), Identity(forms=(StateForm(), StateForm()))
    assert "the same number of ranks (WORLD_SIZE)" in why_foreign(two, one)
    assert "give all replicas the same job_id" in why_foreign(Identity("red"), Identity("blue"))


@pytest.mark.no_leak
def test_a_bounded_number_of_different_reports_is_kept() -> None:
    claims, liar = Claims(), Member("x", step=10**6)
    made_up = {f"y{n}": Past(90, frozenset({f"y{n}"}), 1, stood=False) for n in range(QUORUMS_MAX)}
    for replica_id, past in made_up.items():
        claims.reported(replica_id, past)
    true = Past(100, frozenset("abc"), 49, stood=False)
    members = [Member(i, step=50, commit_quorum_id=100) for i in "ab"]
    for expected in (set(), {"x"}):
        for member in members:
            claims.reported(member.replica_id, true)
        assert claims.unproven([*members, liar]) == expected
        claims.forget("y0")


@pytest.mark.no_leak
def test_nothing_remains_when_everybody_is_gone() -> None:
    core = _core_with_quorum()
    for number in range(REPLICAS):
        core.leave(number, now=2.0)
    assert len(core) == 0
    assert core.next_deadline() is None


def test_a_description_names_a_bounded_number_of_replicas() -> None:
    text = _core_with_quorum().describe(now=2.0)
    assert "and 968 more" in text
    assert len(text) < 1000


# What is let in is as long as docs/security.md says, and no longer.


LIMIT = admission.believable(0, QuorumNumber(1, 1))


def about_links(*ids: str) -> str | None:
    return admission.about_links(pb.BrokenLinks(unreachable_replica_ids=ids))


def about_register(**fields: object) -> str | None:
    register = pb.Register(replica_id="a", **fields)  # type: ignore[arg-type]
    return admission.about_register(register, LighthouseConfig(), LIMIT)


def about_replica_at(address: str, hosts: str = "", caller: str = "10.0.0.7") -> str | None:
    register = pb.Register(replica_id="a", address=address)
    return admission.about_register(register, LighthouseConfig(hosts=hosts), LIMIT, caller)


@pytest.mark.parametrize(
    "address", ["ftp://h:1", "http://h", "http://a b:1", "h:99999", "file:///etc/passwd"]
)
def test_an_address_that_is_none_of_a_server_is_refused(address: str) -> None:
    assert "is not host:port" in (about_replica_at(address) or "")


@pytest.mark.parametrize(
    ("address", "hosts", "is_admitted"),
    [
        ("http://169.254.169.254:80", "", True),
        ("http://10.0.0.7:29511", "192.168.0.0/16", True),
        ("http://169.254.169.254:80", "192.168.0.0/16", False),
        ("tls://192.168.3.4:29500", "192.168.0.0/16", True),
        ("http://[::ffff:192.168.3.4]:29500", "192.168.0.0/16", True),
        ("node-3.trainers.svc:29500", "192.168.0.0/16, *.Trainers.svc", True),
        ("node-3.elsewhere.svc:29500", "192.168.0.0/16, *.trainers.svc", False),
    ],
)
def test_a_host_is_the_callers_or_in_the_list_without_a_look_up(
    address: str, hosts: str, is_admitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ask in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo"):
        monkeypatch.delattr(socket, ask)
    assert (about_replica_at(address, hosts) is None) == is_admitted


def test_so_are_the_hosts_of_a_groups_other_ranks() -> None:
    def about(*hosts: str) -> str | None:
        of_ranks = [pb.RankAddress(group_rank=8, address=f"{host}:29500") for host in hosts]
        member = pb.QuorumMember(replica_id="a", rank_addresses=of_ranks)
        return admission.about_member(member, LighthouseConfig(hosts="10.0.0.0/8"), LIMIT, "10.0.0.7")

    assert about("10.0.0.8", "10.0.0.9") is None
    assert "neither at the caller's" in (about("10.0.0.8", "169.254.169.254") or "")
    assert "more than 1024" in (about(*["10.0.0.8"] * 1025) or "")


@pytest.mark.parametrize("hosts", ["10.0.0.0/33", "a b", "10.0.0.1/8"])
def test_a_list_of_hosts_that_cannot_be_read_is_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        LighthouseConfig(hosts=hosts)


@pytest.mark.parametrize(
    ("most", "check"),
    [
        (4096, lambda length: admission.about_replica("x" * length)),
        (4096, lambda length: about_replica_at("127.0.0.1:29510".rjust(length))),
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


# Settings are checked when they are made, and errors name the flag and the value.


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("min_replicas", 0),
        ("min_replicas", True),
        ("join_timeout_ms", -1),
        ("join_timeout_ms", 1.5),
        ("heartbeat_timeout_ms", "5000"),
        ("keepalive_time_ms", 0),
        ("reconnect_grace_ms", None),
        ("start_grace_ms", -1),
    ],
)
def test_a_bad_setting_is_an_error_that_names_flag_and_value(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--{setting} {value!r} is not"):
        LighthouseConfig(**{setting: value})  # type: ignore[arg-type]


def test_a_quorum_that_could_never_form_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--min_replicas 11 is more than --replicas_max 10"):
        LighthouseConfig(min_replicas=11, replicas_max=10)


def test_a_time_of_zero_is_allowed_where_it_means_at_once() -> None:
    assert LighthouseConfig(join_timeout_ms=0, reconnect_grace_ms=0).join_timeout_ms == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--bnd", "127.0.0.1:0"], "unrecognized arguments: --bnd"),
        (["--bin", "127.0.0.1:0"], "unrecognized arguments: --bin"),
        (["--bind", "somewhere"], "--bind 'somewhere' is not host:port"),
        (["--bind", "127.0.0.1:70000"], "--bind '127.0.0.1:70000' is not host:port"),
        (["--min_replicas", "two"], "invalid int value: 'two'"),
        (["--min-replicas", "0"], "--min_replicas 0 is not between 1 and"),
        (["--min_replicas"], "expected one argument"),
        (["--log-level", "LOUD"], "invalid choice: 'LOUD'"),
        (["--bind", "0.0.0.0:0"], "0.0.0.0:0 asks for no token and no certificate"),
        (["--page", "[::]:0"], "[::]:0 asks for no token and no certificate"),
        (["--bind", "192.0.2.1:1", "--insecure"], "cannot listen on 192.0.2.1:1: "),
        (["--replicas_max", "401"], "may open 656 files, and --replicas_max 401 needs 657"),
        (["--min_replicas", "401"], "and --replicas_max 10000 needs 10256"),
    ],
)
def test_a_bad_argument_is_one_line_and_status_2(
    arguments: list[str], complaint: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if " needs " in complaint:
        monkeypatch.setattr(net, "allow_many_files", lambda: 656)
    monkeypatch.setenv(INSECURE_ENV, "")
    assert main(arguments) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert complaint in error
    assert error.count("\n") == 1
