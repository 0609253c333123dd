"""What a lighthouse has to do for up to 10,000 replicas: messages, bytes and CPU of whatever can happen.

Thousands of connections do not fit on one machine beside their clients. So the quorum core runs in this
process with as many sessions as are asked for, every message is serialized and parsed as on the wire, and
what a message costs beyond that (gRPC, asyncio, the kernel) is measured on a real lighthouse with a thousand
real sessions.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from benchmarks.lighthouse_cost import MEMBERS_STEP, channels_to, cpu_seconds, member_of, open_session
from benchmarks.processes import Fleet
from benchmarks.report import Result
from benchmarks.systems import OURS, start_lighthouse
from lighthouse import codec
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import Decision, HoldQuorum, MemberLost, QuorumFormed, QuorumReleased
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import QuorumCore
from lighthouse.wire import torchft_pb2 as pb

CONFIG = LighthouseConfig(join_timeout_ms=60_000)
STEPS_PER_SECOND = 10
LINK_BYTES_PER_SECOND = 25e9 / 8  # a lighthouse on a host with 25 Gbit/s
EVENT_SECONDS_MAX = 120.0

METHOD = [
    "In process: the quorum core with N sessions; every message that comes is parsed, every one that "
    "goes is serialized once and counted for each session that gets it. Members have one rank, a "
    "41-character id and two addresses. CPU is that of this process.",
    "A loss: one session ends, the others hear of it and ask for the next quorum. A join: one more "
    "replica asks, the others hold, hear the step at which to ask, and ask. A quorum in every step is "
    "what a lighthouse without quorums that stand has to do.",
    "On a real lighthouse: 1,000 sessions, a TCP connection each, from one client process of Python's "
    "gRPC on the same machine; seconds until the last client has read the last message, which is mostly "
    "the clients' own work; CPU is the lighthouse's.",
    f"The load of {STEPS_PER_SECOND} steps a second: CPU in process, plus what the real lighthouse needs "
    "for each message beyond it. Seconds on the link are bytes over 25 Gbit/s.",
]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    replicas: Sequence[int] = (100, 1_000, 10_000)
    samples: int = 3
    sessions: int = 1_000


QUICK = Plan(replicas=(100, 1_000), samples=1, sessions=200)


def main(plan: Plan | None = None) -> Result:
    """Measure, and save results/lighthouse_scale.json."""
    plan = plan or Plan()
    result = Result(
        "lighthouse_scale", "What does a lighthouse have to do for thousands of replicas?", METHOD
    )
    real = asyncio.run(_real_costs(plan))
    for event, (seconds, cpu) in real.items():
        case = f"{event}, {plan.sessions:,} real sessions"
        result.add(f"{case}: until the last has heard", OURS.name, "s", [seconds])
        result.add(f"{case}: CPU of the lighthouse", OURS.name, "s", [cpu])
    beyond_s = _beyond_the_core(plan, real)
    result.add("a message beyond the core and its bytes: CPU", OURS.name, "us", [beyond_s * 1e6])
    for replicas in plan.replicas:
        for event in EVENTS:
            costs = [_in_process(event, replicas) for _ in range(plan.samples)]
            case = f"{event}, {replicas:,} replicas"
            for what, unit, samples in (
                ("messages", "messages", [float(costs[0].messages)]),
                ("bytes", "MB", [costs[0].nbytes / 1e6]),
                ("on the link", "s", [costs[0].nbytes / LINK_BYTES_PER_SECOND]),
                ("CPU", "s", [c.cpu_s + c.messages * beyond_s for c in costs]),
            ):
                result.add(f"{case}: {what}", OURS.name, unit, samples, at=replicas)
        per_step = result.median(f"{EVERY_STEP}, {replicas:,} replicas: CPU", OURS.name) or 0.0
        case = f"{STEPS_PER_SECOND} steps a second, {replicas:,} replicas: cores that quorums would take"
        note = "a quorum that stands: no message in a quiet step"
        result.add(case, "a quorum in every step", "cores", [per_step * STEPS_PER_SECOND], at=replicas)
        result.add(case, OURS.name, "cores", [0.0], note, at=replicas)
    result.save()
    return result


# ------------------------------------------------------------------------------ in process


@dataclass
class Lighthouse:
    """A lighthouse without a network, which counts what it gets and says."""

    core: QuorumCore = field(default_factory=lambda: QuorumCore(CONFIG, 1))
    stands: bool = True
    messages: int = 0
    nbytes: int = 0

    def hear(self, number: int, message: bytes) -> list[Decision]:
        """Take one message of a session in, and return what follows."""
        self._count(1, message)
        request = pb.SessionRequest.FromString(message)
        match request.WhichOneof("request"):
            case "register":
                last = QuorumNumber(request.register.last_quorum_id, request.register.last_quorum_round)
                return self._say(self.core.register(number, request.register.replica_id, last, (), 0.0))
            case "join":
                return self._say(self.core.join(number, codec.member_from_wire(request.join), 0.0))
            case _:
                quorum = QuorumNumber(request.holds.quorum_id, request.holds.round)
                return self._say(self.core.hold(number, quorum, request.holds.step, 0.0))

    def lose(self, number: int) -> list[Decision]:
        """End a session."""
        return self._say(self.core.lost(number, "its connection ended", 0.0))

    def _say(self, decisions: list[Decision]) -> list[Decision]:
        for decision in decisions:
            match decision:
                case QuorumFormed():
                    message = codec.told(quorum=codec.quorum_to_wire(decision.quorum, 0.0))
                case MemberLost() | HoldQuorum() | QuorumReleased():
                    message = codec.news(decision)
                case _:
                    raise RuntimeError(f"an undisturbed job has no {decision}")
            self._count(len(decision.sessions), message)
        return decisions

    def _count(self, sessions: int, message: bytes) -> None:
        self.messages += sessions
        self.nbytes += sessions * len(message)


@dataclass(frozen=True)
class Cost:
    """What one event costs."""

    messages: int
    nbytes: int
    cpu_s: float


def _quiet_step(lighthouse: Lighthouse, replicas: int) -> None:
    """Do nothing, as the members ask for nothing."""


def _join_all(lighthouse: Lighthouse, numbers: Iterable[int]) -> None:
    for number in numbers:
        decisions = lighthouse.hear(number, _join(number, lighthouse.stands))
    if not any(isinstance(decision, QuorumFormed) for decision in decisions):
        raise RuntimeError("all have asked, and there is no quorum")


def _every_step(lighthouse: Lighthouse, replicas: int) -> None:
    _join_all(lighthouse, range(replicas))


def _loss(lighthouse: Lighthouse, replicas: int) -> None:
    lighthouse.lose(0)
    _join_all(lighthouse, range(1, replicas))


def _newcomer(lighthouse: Lighthouse, replicas: int) -> None:
    lighthouse.hear(replicas, _register(replicas))
    (hold,) = lighthouse.hear(replicas, _join(replicas, True))
    if not isinstance(hold, HoldQuorum) or len(hold.sessions) != replicas:
        raise RuntimeError(f"the quorum does not stand: {hold}")
    holds = pb.SessionRequest(holds=pb.Holds(quorum_id=hold.quorum_id, round=hold.round, step=MEMBERS_STEP))
    for number in range(replicas):
        lighthouse.hear(number, holds.SerializeToString())
    _join_all(lighthouse, range(replicas))


EVERY_STEP = "a quorum in every step"
EVENTS: dict[str, Callable[[Lighthouse, int], None]] = {
    "a quiet step": _quiet_step,
    EVERY_STEP: _every_step,
    "a loss": _loss,
    "a join": _newcomer,
}


def _in_process(event: str, replicas: int) -> Cost:
    """Return what an event costs in a quorum of so many."""
    lighthouse = Lighthouse(stands=event != EVERY_STEP)
    for number in range(replicas):
        lighthouse.hear(number, _register(number))
    _join_all(lighthouse, range(replicas))
    messages, nbytes, began = lighthouse.messages, lighthouse.nbytes, time.process_time()
    EVENTS[event](lighthouse, replicas)
    cpu_s = time.process_time() - began
    return Cost(lighthouse.messages - messages, lighthouse.nbytes - nbytes, cpu_s)


def _register(number: int) -> bytes:
    register = pb.Register(replica_id=member_of(number).replica_id)
    return pb.SessionRequest(register=register).SerializeToString()


def _join(number: int, may_stand: bool) -> bytes:
    return pb.SessionRequest(join=_asking(number, may_stand)).SerializeToString()


def _asking(number: int, may_stand: bool = True) -> pb.QuorumMember:
    member = member_of(number)
    member.may_stand = may_stand
    return member


# ------------------------------------------------------------------------ a real lighthouse

Call = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]


def _beyond_the_core(plan: Plan, real: dict[str, tuple[float, float]]) -> float:
    """Return the seconds of CPU that a real lighthouse needs for a message beyond the core and its bytes."""
    per_message = []
    for event, (_, cpu_s) in real.items():
        cost = _in_process(event, plan.sessions)
        per_message.append(max(0.0, cpu_s - cost.cpu_s) / cost.messages)
    return max(per_message)


async def _real_costs(plan: Plan) -> dict[str, tuple[float, float]]:
    """Return the seconds until the last has heard, and those of the lighthouse's CPU, for each event."""
    with Fleet() as fleet:
        lighthouse = start_lighthouse(fleet, OURS, 1, extra=("--join_timeout_ms=600000",))
        async with channels_to(lighthouse.address, plan.sessions + 1) as channels:
            members = [await open_session(channel, i) for i, channel in enumerate(channels[:-1])]
            everybody = list(enumerate(members))
            await _in_step(itertools.starmap(_ask, everybody))

            async def measured(event: Awaitable[None]) -> tuple[float, float]:
                began, cpu = time.monotonic(), cpu_seconds(lighthouse)
                await asyncio.wait_for(event, EVENT_SECONDS_MAX)
                return time.monotonic() - began, cpu_seconds(lighthouse) - cpu

            newcomer = await open_session(channels[-1], plan.sessions)
            asks = _ask(plan.sessions, newcomer)
            join = await measured(_in_step([asks, *itertools.starmap(_hold_and_ask, everybody)]))
            newcomer.cancel()
            loss = await measured(_in_step(itertools.starmap(_hear_and_ask, everybody)))
            return {"a join": join, "a loss": loss}


async def _in_step(coroutines: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*coroutines)


async def _ask(number: int, call: Call) -> None:
    await call.write(pb.SessionRequest(join=_asking(number)))
    await _read(call, "quorum")


async def _hold_and_ask(number: int, call: Call) -> None:
    hold = (await _read(call, "hold")).hold
    await call.write(
        pb.SessionRequest(holds=pb.Holds(quorum_id=hold.quorum_id, round=hold.round, step=MEMBERS_STEP))
    )
    await _read(call, "release")
    await _ask(number, call)


async def _hear_and_ask(number: int, call: Call) -> None:
    await _read(call, "member_lost")
    await _ask(number, call)


async def _read(call: Call, kind: str) -> pb.SessionResponse:
    response = await call.read()
    if not isinstance(response, pb.SessionResponse) or response.WhichOneof("response") != kind:
        raise RuntimeError(f"not a {kind}: {response}")
    return response
