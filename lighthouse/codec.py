"""Translation between the values of the quorum core and the messages on the wire."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import (
    HoldQuorum,
    LeftOut,
    Member,
    MemberLost,
    Quorum,
    QuorumBroken,
    QuorumOver,
    QuorumReleased,
)
from lighthouse.core.history import Report
from lighthouse.core.identity import Identity
from lighthouse.core.state_form import StateForm
from lighthouse.events import printable
from lighthouse.wire import torchft_pb2 as pb

M = TypeVar("M")
TEXT_MAX = 400  # characters of what a replica says of its progress


def reader(kind: type[M]) -> Callable[[bytes], M | None]:
    """Make a parser of messages of one kind, which returns None for bytes that are no such message.

    gRPC's own answer to an exception in a parser is a traceback in the log for each such message.
    """
    parse: Any = kind.FromString  # type: ignore[attr-defined]

    def read(data: bytes) -> M | None:
        try:
            message: M = parse(data)
        except DecodeError:
            return None
        return message

    return read


def unknown_fields(message: Message) -> bytes:
    """Return the fields of a message that this version does not know, serialized, to be passed on with it."""
    rest = type(message)()
    rest.CopyFrom(message)
    for known in message.DESCRIPTOR.fields:
        rest.ClearField(known.name)
    return rest.SerializeToString()


def fields_of(message: Message, kind: type) -> dict[str, Any]:
    """Read the fields of a message that a NamedTuple or dataclass has under the same names, to make one.

    A repeated field is a tuple, and an optional one that is not set None. Messages within it are left out.
    """
    found: dict[str, Any] = {}
    of: Any = type(message)
    for name, has_presence in _common(of, kind):
        value = getattr(message, name)
        if has_presence and not message.HasField(name):
            value = None
        elif not isinstance(value, int | float | str | bytes):
            value = tuple(value)
        found[name] = value
    return found


@lru_cache
def _common(message: Any, kind: Any) -> list[tuple[str, bool]]:
    """Return the names that a message and a class have in common, and whether the field may be unset."""
    fields = (field for field in message.DESCRIPTOR.fields if field.message_type is None)
    return [(field.name, field.has_presence) for field in fields if field.name in kind.__match_args__]


def member_from_wire(message: pb.QuorumMember) -> Member:
    """Read a replica group's join.

    The member keeps the whole message as bytes, with the fields that this version does not know.
    """
    return Member(
        message.replica_id,
        message.step,
        message.shrink_only,
        message.commit_failures,
        message.commit_quorum_id,
        message.broken_quorum_id,
        message.SerializeToString(),
        message.may_stand,
        message.own_failure,
        message.own_failures,
        message.takes_secret,
        message.timeout_ms,
    )


def report_from_wire(message: pb.Progress) -> Report:
    """Read how far a replica group says that it is; operators read its texts, so they are cut."""
    waits_for, heals_from = (printable(t[:TEXT_MAX]) for t in (message.waits_for, message.heals_from))
    return Report(message.quorum_id, message.step, waits_for, message.waiting_permille, heals_from)


def identity_from_wire(message: pb.Identity) -> Identity:
    """Read the identity that a replica group claims."""
    forms: list[StateForm] = []
    for form in message.forms:
        is_as_before = forms and not form.digest
        forms.append(forms[-1] if is_as_before else form_from_wire(form))
    return Identity(message.job_id, message.first_quorum_id, tuple(forms), message.protocol)


def identity_to_wire(identity: Identity) -> pb.Identity:
    """Write the identity of a replica group."""
    message = pb.Identity(
        job_id=identity.job_id, first_quorum_id=identity.first_quorum_id, protocol=identity.protocol
    )
    for rank, form in enumerate(identity.forms):
        is_as_before = rank > 0 and form == identity.forms[rank - 1]
        message.forms.append(pb.StateForm() if is_as_before else form_to_wire(form))
    return message


def form_from_wire(message: pb.StateForm) -> StateForm:
    """Read the form of a rank's state; ranks that say the same share one value."""
    return _form(message.SerializeToString())


def form_to_wire(form: StateForm) -> pb.StateForm:
    """Write the form of a rank's state."""
    return pb.StateForm(
        digest=form.digest, paths=form.rows, descriptions=form.rows.values(), left_out=form.left_out
    )


@lru_cache(maxsize=256)
def _form(data: bytes) -> StateForm:
    message = pb.StateForm.FromString(data)
    rows = dict(zip(message.paths, message.descriptions, strict=False))
    return StateForm(rows, message.digest, message.left_out)


def quorum_to_wire(quorum: Quorum, created: float) -> pb.Quorum:
    """Serialize the quorum with every member as it joined, and with the version that its state is believed to
    have; `created` is in seconds since the Unix epoch.
    """
    message = pb.Quorum(
        quorum_id=quorum.quorum_id,
        round=quorum.round,
        stands=quorum.stands,
        first_quorum_id=quorum.first_quorum_id,
    )
    message.created.FromNanoseconds(int(created * 1e9))
    for member in quorum.participants:
        participant = message.participants.add()
        participant.MergeFromString(cast(bytes, member.message))
        participant.step, participant.commit_quorum_id = member.step, member.commit_quorum_id
    return message


def told(**what: Any) -> bytes:
    """Serialize what a session is told: one field of a SessionResponse."""
    return pb.SessionResponse(**what).SerializeToString()


def job_config(config: LighthouseConfig, is_watched: bool) -> pb.JobConfig:
    """Write the settings that members need; `is_watched`: a client looks at the page."""
    return pb.JobConfig(
        min_replicas=config.min_replicas,
        join_timeout_ms=config.join_timeout_ms,
        standing_lease_ms=config.standing_lease_ms,
        progress_interval_ms=config.progress_interval_ms,
        is_watched=is_watched,
    )


def news(of: MemberLost | QuorumOver | QuorumBroken | HoldQuorum | QuorumReleased) -> bytes:
    """Serialize what becomes of the last quorum. A member that gave it up is lost in it for the others, and
    a replica that has missed an alarm is told of its own loss.
    """
    more: dict[str, Any]
    match of:
        case HoldQuorum():
            return told(hold=pb.HoldQuorum(quorum_id=of.quorum_id, round=of.round))
        case QuorumReleased():
            return told(release=pb.ReleaseQuorum(quorum_id=of.quorum_id, round=of.round, ask_at=of.ask_at))
        case MemberLost():
            more = {"reason": of.reason}
        case QuorumBroken():
            reason = "its process group of this quorum broke, and it asks for the next quorum, or has left"
            more = {"reason": reason, "is_alive": True}
        case QuorumOver(must_answer=True):
            more = {"reason": "others wait for it, and it is to give this quorum up", "must_answer": True}
        case QuorumOver():
            more = {"reason": "it was away, and the others gave this quorum up"}
    return told(member_lost=pb.MemberLost(quorum_id=of.quorum_id, replica_id=of.replica_id, **more))


def left_out(left: LeftOut, replica_id: str) -> bytes:
    """Serialize the news that a quorum was formed without this replica, and why."""
    own = [link for link in left.links if replica_id in link]
    unreachable = [one if other == replica_id else other for one, other in own]
    message = pb.LeftOut(
        quorum_id=left.quorum_id,
        replica_id=replica_id,
        unreachable_replica_ids=unreachable,
        reason=dict(left.reasons).get(replica_id, ""),
    )
    return told(left_out=message)
