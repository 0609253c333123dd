"""The settings of a lighthouse: one frozen object, checked when it is made.

All but the last two are whole numbers. Times are whole milliseconds and say so in their names, as on the
command line and in torchft. The defaults of the first five are torchft's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_origin, get_type_hints

from lighthouse.core.hosts import HostList
from lighthouse.core.identity import about_job_id
from lighthouse.errors import ConfigError

_DAY_MS = 24 * 60 * 60 * 1000

# The limit of a gRPC message, in either direction: a quorum of `replicas_max` members has to fit into one,
# and each member says for every one of its ranks how its process group is reached.
MESSAGE_BYTES_MAX = 256 * 1024 * 1024
_MEMBER_BYTES_MAX = 1024 * 1024
_FRAMING_BYTES = 16
_REPORT_BYTES = 256  # one name in a report of the last quorum, with room to spare

# Each number with the smallest and the largest that it may be.
_Milliseconds = Annotated[int, 0, _DAY_MS]


@dataclass(frozen=True)
class LighthouseConfig:
    """The settings of a lighthouse. Times are in milliseconds.

    Raises:
        ConfigError: a value is no whole number or out of its range; the message names the flag.
    """

    min_replicas: Annotated[int, 1, 1_000_000] = 1
    """The smallest quorum that may form."""

    join_timeout_ms: _Milliseconds = 60_000
    """How long the replicas that have joined wait for healthy ones that have not, counted from the first join
    of the round, and from that of the first member of the last quorum. It should be longer than what the
    steps of replica groups differ by, or slow ones are left behind. One that heals is given its own timeout.
    """

    quorum_tick_ms: Annotated[int, 1, _DAY_MS] = 100
    """Accepted because torchft has it, and without effect: nothing ticks here, because the lighthouse answers
    a quorum in the instant in which it becomes possible.
    """

    heartbeat_timeout_ms: Annotated[int, 1, _DAY_MS] = 5_000
    """How long a replica that uses the unary calls of torchft's protocol counts as healthy after its last
    sign of life. Sessions do not need it: the keepalive settings watch them.
    """

    replicas: Annotated[int, 0, 1_000_000] = 0
    """How many replicas the job is meant to have. While fewer are there, spares take their places; there are
    at least `min_replicas` places. Without spares it is without effect.
    """

    reconnect_grace_ms: _Milliseconds = 2_000
    """How long a restarted lighthouse waits for the members of the last quorum, counted from the moment in
    which the first of them is back. It should be longer than the clients' reconnect backoff.
    """

    start_grace_ms: _Milliseconds = 0
    """How long a lighthouse that knows of no quorum forms none, counted from the first replica that it hears
    of. The members of a quorum that stood while it was away have time to come back before newcomers form one
    without them. It should be longer than the clients' reconnect backoff; the daemon's default is 500.
    """

    standing_lease_ms: _Milliseconds = 30_000
    """How long members of a quorum that stands go on without a word from this lighthouse, unless they know
    that its process is gone; and, with time for both sides to notice, how long newcomers wait for silent
    members that alone have the job's steps, unless it is known that their processes are gone. 0 is no limit,
    and no wait.
    """

    sick_pause_ms: _Milliseconds = 1_000
    """How long quorums are formed without a replica that has spoilt two in a row by itself; twice as long
    after each further one. 0 leaves no replica out for that.
    """

    sick_pause_max_ms: _Milliseconds = 60_000
    """The longest time for which quorums are formed without such a replica, before it may try again. It
    should not be longer than the clients' quorum timeout.
    """

    keepalive_time_ms: Annotated[int, 10, _DAY_MS] = 500
    """How long a connection may be silent before an HTTP/2 PING probes it."""

    keepalive_timeout_ms: Annotated[int, 10, _DAY_MS] = 500
    """How long a PING may go unanswered before its connection, and with it the session, is ended."""

    progress_interval_ms: _Milliseconds = 1_000
    """How often a member says how far it is, for operators: in a quorum that stands the lighthouse hears of
    no step otherwise. All members together say it 250 times a second at most, however many there are. 0 is
    never.
    """

    replicas_max: Annotated[int, 1, 100_000] = 10_000
    """The most replicas that are admitted; more are refused."""

    session_queue_max: Annotated[int, 1, 1_000_000] = 64
    """How many messages may wait for one session's reader; with one more the session counts as lost."""

    job_id: str = ""
    """The job of this lighthouse: replicas that were given another job id are refused. Without it, the job is
    that of the replicas that form the first quorum.
    """

    hosts: str = ""
    """The hosts at which replicas may say that they serve, beside the address from which each calls: networks
    as 10.0.0.0/8 and names as *.trainers.svc, with commas between them. Without it, any host.
    """

    @property
    def places(self) -> int:
        """While fewer replicas than these are there, a spare takes part."""
        return max(self.replicas, self.min_replicas)

    @property
    def lease_s(self) -> float:
        """How long no quorum forms without silent members that alone have the job's steps, after the last
        word from them, in seconds. A member notices silence a little later than this lighthouse, by what
        their PINGs take.
        """
        if self.standing_lease_ms == 0:
            return 0.0
        return (self.standing_lease_ms + 2 * (self.keepalive_time_ms + self.keepalive_timeout_ms)) / 1000

    @property
    def member_bytes_max(self) -> int:
        """The longest join of one member, in bytes, with which a quorum of all replicas can still be sent."""
        return min(_MEMBER_BYTES_MAX, MESSAGE_BYTES_MAX // self.replicas_max - _FRAMING_BYTES)

    @property
    def request_bytes_max(self) -> int:
        """The longest request in bytes: a register names all members of the last quorum."""
        return min(MESSAGE_BYTES_MAX, 2 * _MEMBER_BYTES_MAX + _REPORT_BYTES * self.replicas_max)

    @property
    def connections_max(self) -> int:
        """The most connections: one for each replica, as many about to be closed, and some for operators."""
        return 2 * self.replicas_max + 1000

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            if get_origin(hint) is Annotated:
                value, (low, high) = getattr(self, name), hint.__metadata__
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ConfigError(f"--{name} {value!r} is not a whole number")
                if not low <= value <= high:
                    raise ConfigError(f"--{name} {value} is not between {low} and {high}")
        if complaint := about_job_id(self.job_id):
            raise ConfigError(f"--job_id: {complaint}")
        HostList.parse(self.hosts)
        if self.min_replicas > self.replicas_max:
            raise ConfigError(
                f"--min_replicas {self.min_replicas} is more than --replicas_max {self.replicas_max}:"
                " no quorum could ever form"
            )
