"""What a lighthouse costs: CPU for a quorum round of N replicas, for idle sessions, for tokens and TLS.

The replicas are simulated: a gRPC channel each, with a TCP connection of its own, and nothing behind
it. All lighthouses answer the same clients over torchft's unary wire. The CPU is that of the
lighthouse's process, user and system time, as the kernel counts it; what the clients use is not in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc.aio
import psutil

from benchmarks.processes import Fleet
from benchmarks.report import Bar, Result
from benchmarks.systems import (
    OURS,
    PEER_VERSIONS,
    PEERS,
    Lighthouse,
    System,
    start_lighthouse,
    with_and_without_trust,
)
from lighthouse import wire
from lighthouse.address import parse_address
from lighthouse.net import Keepalive, credentials, make_aio_channel
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.runtime.environment import environment

BAR_REPLICAS = 1000
MEMBERS_STEP = 123_456  # at which the simulated replicas ask for a quorum
CPU_RATIO_MAX = 0.35
IDLE_CPU_PERCENT_MAX = 8.0
IDLE_MEMORY_MB_MAX = 100.0
ROUND_SECONDS_MAX = 60.0

# The simulated replicas send no PINGs of their own: a torchft replica does not either, and in the
# idle row it is the lighthouse's PINGs that are to be paid for.
_NO_PINGS = Keepalive(time_ms=24 * 3_600_000, timeout_ms=20_000)

METHOD = [
    "N simulated replicas, one TCP connection each, all in one client process; the lighthouse is a process "
    "of its own with default settings, except min_replicas = N and a heartbeat timeout of 10 minutes. "
    f"{PEER_VERSIONS}",
    "A round: every replica calls Quorum (unary, torchft's wire) and has read the whole answer. A sample is "
    "the lighthouse's CPU time (user + system) over a block of rounds, divided by their number; one block "
    "before is not counted. Members carry a 41-character id and two addresses, as in a real job.",
    "Idle: N registered sessions that send nothing, keepalive PINGs from the lighthouse at their default; "
    "CPU time over the stated seconds, then resident memory.",
    "Tokens and TLS: two lighthouses, one with a token and a certificate, take turns. In a step each session "
    "says join, and has read the quorum; no quorum stands. The latency is that of all together, and the "
    "clients' process is in it. Coming: the handshake and the registration of each of 1,000 sessions, once.",
]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    replicas: Sequence[int] = (64, 256, 1000)
    blocks: int = 5
    rounds: int = 4
    idle_seconds: float = 20.0
    idle_blocks: int = 3
    steps: int = 100


QUICK = Plan(replicas=(64, 256), blocks=2, rounds=2, idle_seconds=5.0, idle_blocks=1, steps=20)
STEP_SESSIONS = 64


def main(plan: Plan | None = None) -> Result:
    """Measure, check against the bars, and save results/lighthouse_cost.json."""
    plan = plan or Plan()
    result = Result(
        "lighthouse_cost",
        "How much CPU does a lighthouse use for a quorum round, and for sessions that are idle?",
        METHOD,
    )
    for replicas in plan.replicas:
        for system in (OURS, *PEERS):
            samples = asyncio.run(_round_costs(system, replicas, plan))
            result.add(_round_case(replicas), system.name, "ms of CPU", samples)
    percents, megabytes = asyncio.run(_idle_costs(plan))
    result.add("1,000 idle sessions: CPU", OURS.name, "% of a core", percents)
    result.add("1,000 idle sessions: memory", OURS.name, "MB", megabytes)
    for case, unit, samples in asyncio.run(_trust_costs(plan)):
        result.add(case, OURS.name, unit, samples)
    result.bars += _bars(result, plan)
    result.save()
    return result


def _round_case(replicas: int) -> str:
    return f"quorum round, {replicas:,} replicas"


def _bars(result: Result, plan: Plan) -> list[Bar]:
    cpu = result.median("1,000 idle sessions: CPU", OURS.name)
    memory = result.median("1,000 idle sessions: memory", OURS.name)
    return [
        *(
            Bar(
                f"{_round_case(replicas)}: over that of {peer.name}",
                result.ratio(_round_case(replicas), OURS.name, peer.name),
                CPU_RATIO_MAX,
                "x",
            )
            for replicas in plan.replicas
            if replicas == BAR_REPLICAS
            for peer in PEERS
        ),
        Bar("1,000 idle sessions: CPU", cpu, IDLE_CPU_PERCENT_MAX, "% of a core"),
        Bar("1,000 idle sessions: memory", memory, IDLE_MEMORY_MB_MAX, "MB"),
    ]


async def _round_costs(system: System, replicas: int, plan: Plan) -> list[float]:
    """Return the milliseconds of the lighthouse's CPU for each round, one value for each block."""
    with Fleet() as fleet:
        lighthouse = start_lighthouse(fleet, system, replicas, extra=("--heartbeat_timeout_ms=600000",))
        async with channels_to(lighthouse.address, replicas) as channels:
            await _rounds(channels, plan.rounds)
            samples = []
            for _ in range(plan.blocks):
                before = cpu_seconds(lighthouse)
                await _rounds(channels, plan.rounds)
                samples.append((cpu_seconds(lighthouse) - before) * 1000 / plan.rounds)
            return samples


async def _rounds(channels: Sequence[grpc.aio.Channel], rounds: int) -> None:
    calls = [
        channel.unary_unary(
            wire.QUORUM,
            request_serializer=pb.LighthouseQuorumRequest.SerializeToString,
            response_deserializer=bytes,
        )
        for channel in channels
    ]
    requests = [pb.LighthouseQuorumRequest(requester=member_of(index)) for index in range(len(channels))]
    for _ in range(rounds):
        answers = await asyncio.gather(
            *(call(request, timeout=ROUND_SECONDS_MAX) for call, request in zip(calls, requests, strict=True))
        )
        quorum = pb.LighthouseQuorumResponse.FromString(answers[-1]).quorum
        if len(quorum.participants) != len(channels) or len(set(map(len, answers))) != 1:
            raise RuntimeError(f"a quorum of {len(quorum.participants)} instead of {len(channels)}")


def member_of(index: int) -> pb.QuorumMember:
    """Return what a replica says of itself as it asks for a quorum."""
    return pb.QuorumMember(
        replica_id=f"{index:04}:0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9",
        address=f"http://10.0.{index // 250}.{index % 250}:29511",
        store_address=f"10.0.{index // 250}.{index % 250}:29500",
        step=MEMBERS_STEP,
        world_size=8,
    )


async def _idle_costs(plan: Plan) -> tuple[list[float], list[float]]:
    """Return the percent of a core in each block, and the resident megabytes after it."""
    percents, megabytes = [], []
    with Fleet() as fleet:
        lighthouse = start_lighthouse(fleet, OURS, 1)
        async with channels_to(lighthouse.address, BAR_REPLICAS) as channels:
            sessions = [await open_session(channel, i) for i, channel in enumerate(channels)]
            for _ in range(plan.idle_blocks):
                before = cpu_seconds(lighthouse)
                await asyncio.sleep(plan.idle_seconds)
                percents.append((cpu_seconds(lighthouse) - before) * 100 / plan.idle_seconds)
                megabytes.append(psutil.Process(lighthouse.process.pid).memory_info().rss / 1e6)
            if any(session.done() for session in sessions):
                raise RuntimeError("a session ended while it was idle")
    return percents, megabytes


async def _trust_costs(plan: Plan) -> list[tuple[str, str, list[float]]]:
    """Return the cases of a step and of coming, each with its unit and samples."""
    samples: dict[tuple[str, str], list[float]] = {}
    with Fleet() as fleet, with_and_without_trust() as kinds:
        async with contextlib.AsyncExitStack() as stack:
            sides = {}
            for name, variables in kinds.items():
                with environment(variables):
                    lighthouse = start_lighthouse(fleet, OURS, STEP_SESSIONS)
                    channels = await stack.enter_async_context(channels_to(lighthouse.address, STEP_SESSIONS))
                    sides[name] = lighthouse, [await open_session(c, i) for i, c in enumerate(channels)]
            for block in range(plan.blocks + 1):
                for name, (lighthouse, sessions) in sides.items():
                    cpu, began = cpu_seconds(lighthouse), time.perf_counter()
                    for _ in range(plan.steps):
                        await _step(sessions)
                    took = time.perf_counter() - began, cpu_seconds(lighthouse) - cpu
                    for unit, seconds in zip(("ms", "ms of CPU"), took, strict=True):
                        if block:  # the first one is not counted
                            case = f"a step of {STEP_SESSIONS} sessions, {name}", unit
                            samples.setdefault(case, []).append(seconds * 1000 / plan.steps)
        for name, variables in kinds.items():
            with environment(variables):
                spent = await _coming(start_lighthouse(fleet, OURS, 1))
            samples[f"{BAR_REPLICAS:,} sessions come, {name}", "ms of CPU"] = [spent * 1000]
    return [
        (f"{case}: {'CPU' if unit == 'ms of CPU' else 'latency'}", unit, found)
        for (case, unit), found in samples.items()
    ]


async def _coming(lighthouse: Lighthouse) -> float:
    """Return the seconds of CPU that sessions cost as they come."""
    before = cpu_seconds(lighthouse)
    async with channels_to(lighthouse.address, BAR_REPLICAS) as channels:
        for index, channel in enumerate(channels):
            await open_session(channel, index)
        return cpu_seconds(lighthouse) - before


async def _step(sessions: Sequence[grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]]) -> None:
    async def ask(index: int) -> None:
        await sessions[index].write(pb.SessionRequest(join=member_of(index)))
        answer = await sessions[index].read()
        if not isinstance(answer, pb.SessionResponse) or len(answer.quorum.participants) != len(sessions):
            raise RuntimeError(f"no quorum of all, but {answer}")

    await asyncio.gather(*map(ask, range(len(sessions))))


async def open_session(
    channel: grpc.aio.Channel, index: int
) -> grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]:
    """Open a session, and register in it."""
    method = channel.stream_stream(
        wire.SESSION,
        request_serializer=pb.SessionRequest.SerializeToString,
        response_deserializer=pb.SessionResponse.FromString,
    )
    call = method(metadata=credentials())  # type: ignore[call-arg]  # the stubs lack the form with write()
    await call.write(pb.SessionRequest(register=pb.Register(replica_id=member_of(index).replica_id)))
    registered = await call.read()
    if not isinstance(registered, pb.SessionResponse) or not registered.HasField("registered"):
        raise RuntimeError(f"not registered: {registered}")
    return call


@contextlib.asynccontextmanager
async def channels_to(address: str, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Open connections of their own to a lighthouse."""
    channels = [make_aio_channel(parse_address(address), _NO_PINGS) for _ in range(count)]
    try:
        for channel in channels:
            await channel.channel_ready()
        yield channels
    finally:
        await asyncio.gather(*(channel.close(None) for channel in channels))


def cpu_seconds(lighthouse: Lighthouse) -> float:
    """Return the CPU time that the lighthouse's process has used."""
    times = psutil.Process(lighthouse.process.pid).cpu_times()
    return times.user + times.system
