"""The settings of a Manager, from the operator of the job, from the script, or by default.

`TORCHFT_*` variables beat arguments: the operator of a job cannot reach the arguments that a library passes.
Arguments beat the variables of the launcher (RANK, MASTER_ADDR, ...): a script may make several groups.

The environment is read here and nowhere else, and only through the mapping that is passed in.
"""

from __future__ import annotations

import math
import os
import resource
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from lighthouse.address import Address, parse_address, parse_host
from lighthouse.core.identity import about_job_id
from torchft_like.core.restarts import SPARE_ENV, SPARE_RANK
from torchft_like.core.step import StepRules, WorldSizeMode
from torchft_like.errors import ConfigError
from torchft_like.futures import watchdog_s
from torchft_like.manager_server.suspicion import DEAD_S
from torchft_like.runtime.durations import seconds_of
from torchft_like.runtime.hosts import HOSTNAME_ENV, given_host, local_host_towards
from torchft_like.runtime.numbers import whole_number

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 60.0
# Others have to wait for twice the join_timeout of the lighthouse until a member that hangs is left behind.
DEFAULT_QUORUM_TIMEOUT_S = 180.0
_OPERATORS = "TORCHFT_"
MANAGER_PORT_ENV = "TORCHFT_MANAGER_PORT"
TIMEOUT_SEC_ENV = "TORCHFT_TIMEOUT_SEC"
QUORUM_TIMEOUT_SEC_ENV = "TORCHFT_QUORUM_TIMEOUT_SEC"
CONNECT_TIMEOUT_SEC_ENV = "TORCHFT_CONNECT_TIMEOUT_SEC"
DEAD_AFTER_SEC_ENV = "TORCHFT_DEAD_AFTER_SEC"
AGENT_STORE_ENV = "TORCHELASTIC_USE_AGENT_STORE"
OF_TORCHRUN = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"  # which tell a start of a group from others
QUORUM_RETRIES_ENV = "TORCHFT_QUORUM_RETRIES"
PORT_MAX = 65535
# A Manager of two replica groups has 35 open in a step, and gRPC aborts where one is missing.
FREE_FILES_MIN = 64
LIGHTHOUSE_ENV = "TORCHFT_LIGHTHOUSE"
LIGHTHOUSE, MASTER = f"lighthouse_addr ({LIGHTHOUSE_ENV})", "store_addr (MASTER_ADDR)"
CONTINUE, WAIT = "continue", "wait"


@dataclass(frozen=True)
class ManagerArguments:
    """The arguments of `Manager` that the environment can also give; None means not given."""

    timeout: timedelta | float | None = None
    quorum_timeout: timedelta | float | None = None
    connect_timeout: timedelta | float | None = None
    rank: int | None = None
    world_size: int | None = None
    store_addr: str | None = None
    store_port: int | None = None
    lighthouse_addr: str | None = None
    replica_id: str | None = None
    port: int | None = None
    hostname: str | None = None
    quorum_retries: int | None = None
    lighthouse_absence: str | None = None
    job_id: str | None = None
    dead_after: timedelta | float | None = None
    spare: bool = False


@dataclass(frozen=True)
class GroupPlace:
    """The place of a process in its replica group.

    Attributes:
        store: the replica group's TCPStore; None if rank 0 has to make one.
        run: a text that all starts of the group on the same store have in common.
        start: a text that distinguishes this process from those that its launcher has started before in its
          place. Ranks that several agents of torchrun have started may have different ones: an agent counts
          only the restarts for which its own ranks were to blame.
    """

    group_rank: int
    group_world_size: int
    store: Address | None
    store_is_agents: bool
    run: str
    start: str


@dataclass(frozen=True)
class ManagerConfig(GroupPlace):
    """Resolved and validated settings of one Manager.

    Attributes:
        timeout_s: the limit of a collective, of a vote and of a state transfer, in seconds.
        given_timeout_s: the same if it was given, None where it is the default.
        quorum_timeout_s: the limit of a wait for a quorum, in seconds, lighthouse outages included.
        connect_timeout_s: the limit of the first contact with the lighthouse and the ManagerServer, in
          seconds.
        dead_after_s: how long a rank of this replica group may be silent before the group is lost, in
          seconds.
        lighthouse: the lighthouse's address; None on ranks other than 0, which never call it.
        host: the address that this process binds to and advertises.
        lighthouse_absence: CONTINUE or WAIT.
        job_id: the name of the job, "" if none was given.
        spare: whether the replica group waits for a free place before it takes part.
        replica_id: the user's name for the group, made unique for this incarnation.
        sources: each setting with its value and its source, for the log.
    """

    timeout_s: float
    given_timeout_s: float | None
    quorum_timeout_s: float
    connect_timeout_s: float
    dead_after_s: float
    lighthouse: Address | None
    host: str
    port: int
    replica_id: str
    quorum_retries: int
    lighthouse_absence: str
    job_id: str
    spare: bool
    sources: tuple[str, ...]


def place_in_group(environ: Mapping[str, str]) -> GroupPlace:
    """Return the place that the launcher has given to this process.

    Raises:
        ConfigError, AddressError: as in `resolve`.
    """
    return _place(ManagerArguments(), _Settings(environ))


def resolve(arguments: ManagerArguments, environ: Mapping[str, str]) -> ManagerConfig:
    """Resolve every setting.

    Raises:
        ConfigError: a value is missing or not of its type; the text names the argument and the variable. Or
          this process may open too few files.
        AddressError: an address is malformed.
    """
    _check_open_files()
    watchdog_s(environ)  # if it is malformed, that is an error now and not in each step
    given = _Settings(environ)
    place = _place(arguments, given)
    lighthouse = _lighthouse(arguments, given) if place.group_rank == 0 else None
    timeout_s = given.seconds(arguments.timeout, "timeout", TIMEOUT_SEC_ENV)
    is_given = arguments.timeout is not None or TIMEOUT_SEC_ENV in given.environ
    return ManagerConfig(
        **vars(place),
        timeout_s=timeout_s,
        given_timeout_s=timeout_s if is_given else None,
        quorum_timeout_s=given.seconds(
            arguments.quorum_timeout, "quorum_timeout", QUORUM_TIMEOUT_SEC_ENV, DEFAULT_QUORUM_TIMEOUT_S
        ),
        connect_timeout_s=given.seconds(
            arguments.connect_timeout, "connect_timeout", CONNECT_TIMEOUT_SEC_ENV
        ),
        dead_after_s=dead_after_s(environ, arguments.dead_after),
        lighthouse=lighthouse,
        host=_host(given.text(arguments.hostname, "hostname", HOSTNAME_ENV), lighthouse, place.store),
        port=given.integer(arguments.port, "port", MANAGER_PORT_ENV, most=PORT_MAX),
        replica_id=f"{arguments.replica_id}:{uuid.uuid4()}" if arguments.replica_id else str(uuid.uuid4()),
        quorum_retries=given.integer(arguments.quorum_retries, "quorum_retries", QUORUM_RETRIES_ENV),
        lighthouse_absence=_absence(arguments, given),
        job_id=_job_id(arguments, given),
        spare=_spare(arguments, given),
        sources=tuple(given.sources),
    )


def step_rules(
    min_replica_size: int, use_async_quorum: bool, world_size_mode: WorldSizeMode, max_retries: int | None
) -> StepRules:
    """Return the rules of a step, which only a script gives.

    Raises:
        ConfigError: a value is not of its type, or negative; the text names the argument.
    """
    if not isinstance(world_size_mode, WorldSizeMode):
        kinds = " or ".join(map(str, WorldSizeMode))
        raise ConfigError(f"world_size_mode is {world_size_mode!r:.100}: it must be {kinds}")
    return StepRules(
        whole_number(min_replica_size, "min_replica_size"),
        use_async_quorum,
        world_size_mode,
        None if max_retries is None else whole_number(max_retries, "max_retries"),
    )


def _check_open_files() -> None:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (free := most - len(os.listdir("/proc/self/fd"))) < FREE_FILES_MIN:
        raise ConfigError(
            f"this process may open {most} files, of which {free} are left, and a Manager needs "
            f"{FREE_FILES_MIN} and one for each replica group: raise the limit (ulimit -n)"
        )


def get_timeout(timeout_sec_env: str | None, default_timeout_sec: timedelta) -> timedelta:
    """Return the seconds that a variable's text gives, or the default if it is None (torchft's helper).

    Raises:
        ConfigError: the text is not a number of seconds above 0.
    """
    settings = _Settings({} if timeout_sec_env is None else {TIMEOUT_SEC_ENV: timeout_sec_env})
    return timedelta(seconds=settings.seconds(default_timeout_sec, "default_timeout_sec", TIMEOUT_SEC_ENV))


def _place(arguments: ManagerArguments, given: _Settings) -> GroupPlace:
    rank = given.integer(arguments.rank, "rank", "RANK")
    world_size = given.integer(arguments.world_size, "world_size", "WORLD_SIZE", default=1)
    if rank >= world_size:
        raise ConfigError(
            f"rank (RANK) is {rank}: it must be in [0, world_size), and WORLD_SIZE is {world_size}"
        )
    store = _store(arguments, given, world_size)
    if world_size > 1 and arguments.rank is None and "RANK" not in given.environ:
        raise ConfigError(
            f"world_size (WORLD_SIZE) is {world_size}, and nothing says which of them this process is: "
            "pass rank, or set RANK (torchrun does; the launcher in Lightning's Trainer does not)"
        )
    of_torchrun = given.environ.get
    return GroupPlace(
        rank,
        world_size,
        store,
        of_torchrun(AGENT_STORE_ENV) == "True",
        *(of_torchrun(name, "0") for name in OF_TORCHRUN),
    )


def _lighthouse(arguments: ManagerArguments, given: _Settings) -> Address:
    text = given.text(arguments.lighthouse_addr, "lighthouse_addr", LIGHTHOUSE_ENV)
    if text is None:
        raise ConfigError(
            "no lighthouse: pass lighthouse_addr or set TORCHFT_LIGHTHOUSE to the address that "
            "`python -m lighthouse` prints, such as http://127.0.0.1:29510"
        )
    return parse_address(text, LIGHTHOUSE)


def _absence(arguments: ManagerArguments, given: _Settings) -> str:
    name, variable = "lighthouse_absence", "TORCHFT_LIGHTHOUSE_ABSENCE"
    absence = given.text(arguments.lighthouse_absence, name, variable) or CONTINUE
    if absence not in (CONTINUE, WAIT):
        raise ConfigError(f"{name} ({variable}) is {absence!r:.100}: it must be {CONTINUE!r} or {WAIT!r}")
    return absence


def _job_id(arguments: ManagerArguments, given: _Settings) -> str:
    job_id = given.text(arguments.job_id, "job_id", "TORCHFT_JOB_ID") or ""
    if complaint := about_job_id(job_id):
        raise ConfigError(f"job_id (TORCHFT_JOB_ID): {complaint}")
    return job_id


def _spare(arguments: ManagerArguments, given: _Settings) -> bool:
    text = given.text("1" if arguments.spare else None, "spare", SPARE_ENV) or "0"
    if text == SPARE_RANK:
        raise ConfigError(
            f"{SPARE_ENV}={SPARE_RANK} is for a training function that is `restartable`, which waits for a "
            "rank's place before it makes a Manager"
        )
    if text not in ("0", "1"):
        raise ConfigError(f"spare (TORCHFT_SPARE) is {text!r:.100}: it must be 1 or 0")
    return text == "1"


def _store(arguments: ManagerArguments, given: _Settings, world_size: int) -> Address | None:
    host = given.text(arguments.store_addr, "store_addr", "MASTER_ADDR")
    has_port = arguments.store_port is not None or "MASTER_PORT" in given.environ
    if host is not None and has_port:
        port = given.integer(arguments.store_port, "store_port", "MASTER_PORT", most=PORT_MAX)
        return Address(parse_host(host, MASTER), port)
    if world_size > 1:
        raise ConfigError(
            "a replica group of several ranks needs a store that all of them reach: pass store_addr and "
            "store_port, or set MASTER_ADDR and MASTER_PORT (torchrun does)"
        )
    return None


def _host(hostname: str | None, lighthouse: Address | None, store: Address | None) -> str:
    """Return the host to bind to: the given one, which may be an interface, or else the interface that leads
    to the lighthouse.

    For a lighthouse on a loopback address that is the loopback interface.
    """
    if hostname:
        return given_host(hostname, f"hostname ({HOSTNAME_ENV})")
    if lighthouse is not None:
        return local_host_towards(lighthouse.host, what=LIGHTHOUSE)
    return local_host_towards(store.host if store else "127.0.0.1", what=MASTER)


def dead_after_s(environ: Mapping[str, str], argument: timedelta | float | None = None) -> float:
    """Return how long a rank may be silent before its replica group is lost, in seconds.

    Raises:
        ConfigError: TORCHFT_DEAD_AFTER_SEC is no time.
    """
    return _Settings(environ).seconds(argument, "dead_after", DEAD_AFTER_SEC_ENV, DEAD_S)


class _Settings:
    """Looks settings up, and records the source of each one for the log."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # A TORCHFT_* variable that is set to an empty text counts as unset.
        self.environ = {k: v for k, v in environ.items() if v or not k.startswith(_OPERATORS)}
        self.sources: list[str] = []

    def text(self, argument: str | None, name: str, variable: str) -> str | None:
        """Return a text; None if neither source gives one. An empty text counts as none."""
        return self._first(argument or None, name, variable, str, default=None) or None

    def integer(
        self, argument: int | None, name: str, variable: str, *, default: int = 0, most: float = math.inf
    ) -> int:
        def parse(text: str) -> int:
            try:
                return int(text)
            except ValueError:
                raise ConfigError(
                    f"the environment variable {variable} is {text!r:.100}: it must be a whole number"
                ) from None

        return whole_number(
            self._first(argument, name, variable, parse, default), f"{name} ({variable})", most=most
        )

    def seconds(
        self,
        argument: timedelta | float | None,
        name: str,
        variable: str,
        default_s: float = DEFAULT_TIMEOUT_S,
    ) -> float:
        def parse(text: str) -> float:
            try:
                return seconds_of(float(text), f"the environment variable {variable}")
            except ValueError:
                raise ConfigError(
                    f"the environment variable {variable} is {text!r:.99}: it must be a number of seconds "
                    "above 0"
                ) from None

        given = None if argument is None else seconds_of(argument, name)
        return self._first(given, name, variable, parse, default_s)

    def _first(
        self, argument: T | None, name: str, variable: str, parse: Callable[[str], T], default: T
    ) -> T:
        text = self.environ.get(variable)
        if text is not None and (argument is None or variable.startswith(_OPERATORS)):
            value, source = parse(text), variable
            if argument is not None and argument != value:
                source += f" instead of the argument {argument}"
        elif argument is not None:
            value, source = argument, "argument"
        else:
            value, source = default, "default"
        self.sources.append(f"{name}={value} ({source})")
        return value
