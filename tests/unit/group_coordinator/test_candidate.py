"""How members decide, with the lighthouse's own core: by cases, and with faults at random."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable

import pytest

from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import Decision, Member, Quorum, QuorumFormed, SessionSuperseded
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import QuorumCore
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.candidate import Answer, Candidate, Stage, request
from torchft_like.core.peer_links import Probe
from torchft_like.core.replica_group import Effect, GroupJoin, RankJoin, RankQuorum, ReplicaGroup


def proposed(quorum_id: int = 7, *, epoch: int = 5) -> Candidate:
    candidate = Candidate(epoch=epoch)
    candidate.ask()
    assert candidate.answered(quorum_id) is Answer.PROPOSAL
    return candidate


def test_an_id_that_is_kept_is_a_switch() -> None:
    candidate = proposed()
    assert candidate.vote() == request(True, 7, 0)
    assert candidate.answered(7) is Answer.SWITCH
    assert (candidate.epoch, candidate.stage) == (7, Stage.IDLE)


def test_an_id_that_is_kept_is_none_where_somebody_has_voted_for_another() -> None:
    candidate = proposed()
    candidate.vote()
    assert candidate.answered(7, is_unanimous=False) is Answer.SPOILED
    assert candidate.ask() == request(False, 5, 7)


def test_who_lost_its_line_after_its_vote_is_in_doubt() -> None:
    candidate = proposed()
    candidate.vote()
    assert candidate.disconnected() == request(False, 7, 0)  # to be let in again
    assert candidate.answered(8) is Answer.IN_DOUBT
    assert (candidate.epoch, candidate.proposed) == (0, 8)


def test_who_lost_its_line_before_its_vote_is_not() -> None:
    candidate = proposed()
    assert candidate.disconnected() is None
    candidate.vote()
    assert candidate.answered(8) is Answer.ROLL_BACK


# --------------------------------------------------------------------------- with faults at random


class Process:
    """A member: its part in the changes, its replica group, its line to the lighthouse."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.candidate = Candidate()
        self.group = ReplicaGroup(name, 1)
        self.session: int | None = None
        self.heard: deque[object] = deque()  # what the lighthouse has sent
        self.said: deque[pb.QuorumMember] = deque()
        self.probes: list[Probe] = []


class World:
    """A lighthouse, members, and what is under way between them."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.now = 0.0
        self.has_faults = True
        self.sessions = 0
        self.lighthouse = self.start_lighthouse()
        self.processes = {name: Process(name) for name in "abcd"}
        self.switched: dict[int, set[str]] = defaultdict(set)
        self.kept_back: dict[int, set[str]] = defaultdict(set)  # knew for certain that nobody switches
        self.members: dict[int, tuple[str, ...]] = {}

    def start_lighthouse(self) -> QuorumCore:
        config = LighthouseConfig(min_replicas=1, join_timeout_ms=2000, reconnect_grace_ms=1000)
        return QuorumCore(config, first_quorum_id=1 + int(1000 * self.now))

    # -- the line

    def connect(self, process: Process) -> None:
        self.sessions += 1
        process.session = self.sessions
        process.heard.clear()
        process.said.clear()
        group = process.group
        last = QuorumNumber(group.last_quorum_id, group.last_quorum_round)
        self.tell(
            self.lighthouse.register(
                process.session, process.name, last, group.last_quorum_replica_ids, self.now
            )
        )
        self.perform(process, group.lighthouse_connected())

    def cut(self, process: Process) -> None:
        """The line is lost, with all that is under way."""
        session, process.session = process.session, None
        process.heard.clear()
        process.said.clear()
        self.say(process, process.candidate.disconnected())
        if session is not None:
            self.tell(self.lighthouse.lost(session, "cut", self.now))

    def tell(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, SessionSuperseded):
                continue
            sessions = getattr(decision, "sessions", None) or [getattr(decision, "session", None)]
            what = decision.quorum if isinstance(decision, QuorumFormed) else decision
            for process in self.processes.values():
                if process.session is not None and process.session in sessions:
                    process.heard.append(what)

    def deliver(self, process: Process) -> None:
        what = process.heard.popleft()
        if isinstance(what, Quorum):
            participants = [member.message for member in what.participants]
            formed = process.group.quorum_formed(what.quorum_id, participants, what.round)  # type: ignore[arg-type]
            self.perform(process, formed)
        elif (lost := getattr(what, "replica_id", None)) is not None:
            process.group.member_lost(what.quorum_id, lost, "lost")  # type: ignore[attr-defined]

    def hand_in(self, process: Process) -> None:
        message = process.said.popleft()
        member = Member(
            message.replica_id,
            0,
            message.shrink_only,
            message.commit_failures,
            message.commit_quorum_id,
            message.broken_quorum_id,
            message,
        )
        if process.session is not None:
            self.tell(self.lighthouse.join(process.session, member, self.now))

    def perform(self, process: Process, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Probe):
                process.probes.append(effect)
            elif isinstance(effect, GroupJoin) and process.session is not None:
                process.said.append(
                    pb.QuorumMember(
                        replica_id=process.name,
                        shrink_only=effect.shrink_only,
                        commit_failures=effect.commit_failures,
                        commit_quorum_id=effect.commit_quorum_id,
                        broken_quorum_id=effect.broken_quorum_id,
                    )
                )
            elif isinstance(effect, RankQuorum):
                self.answer(process, effect.result)

    # -- the member

    def say(self, process: Process, join: RankJoin | None) -> None:
        if join is not None:
            self.perform(process, process.group.rank_joined(join))

    def answer(self, process: Process, result: QuorumResult) -> None:
        candidate, quorum_id, members = process.candidate, result.quorum_id, result.replica_ids
        before, has_voted = candidate.proposed, candidate.stage is Stage.VOTED
        is_unanimous = result.max_world_size == result.replica_world_size
        answer = candidate.answered(quorum_id, is_unanimous=is_unanimous)
        if answer in (Answer.OUTDATED, Answer.SPOILED):
            self.say(process, candidate.ask())
        elif answer is Answer.SWITCH:
            assert self.members.setdefault(quorum_id, members) == members
            self.switched[quorum_id].add(process.name)
        if answer in (Answer.ROLL_BACK, Answer.SPOILED):
            assert has_voted
            self.kept_back[before].add(process.name)

    def act(self, process: Process) -> None:
        """Do what a user may do next; without faults users neither give up nor lose patience."""
        candidate, dice = process.candidate, self.choose.random() if self.has_faults else 1.0
        if candidate.stage is Stage.IDLE:
            self.say(process, candidate.ask(shrink_only=dice < 0.1))
        elif candidate.stage is Stage.MEETING and dice < 0.1:
            self.kept_back[candidate.proposed].add(process.name)
            self.say(process, candidate.give_up())
        elif candidate.stage is Stage.MEETING:
            self.say(process, candidate.vote())
        elif candidate.stage is Stage.VOTED and dice < 0.02:
            candidate.withdraw()
            candidate.lose_members()
        elif candidate.stage is Stage.ASKED and dice < 0.02:
            candidate.lose_members()

    def settle_probe(self, process: Process) -> None:
        self.perform(process, process.group.probed(process.probes.pop(), ()))

    def restart(self, process: Process) -> None:
        self.cut(process)
        self.processes[process.name] = Process(process.name)

    def crash_lighthouse(self, _: object = None) -> None:
        for process in self.processes.values():
            process.session = None
            process.heard.clear()
            process.said.clear()
            self.say(process, process.candidate.disconnected())
        self.lighthouse = self.start_lighthouse()

    # -- time

    def step(self) -> None:
        self.now += 0.01
        self.tell(self.lighthouse.advance(self.now))
        process = self.choose.choice(list(self.processes.values()))
        possible: list[Callable[[Process], None]] = [self.act]
        possible += [self.connect] if process.session is None else []
        possible += [self.deliver] * 3 if process.heard else []
        possible += [self.hand_in] * 3 if process.said else []
        possible += [self.settle_probe] if process.probes else []
        act = self.choose.choice(possible)
        act(process)
        dice = self.choose.random()
        if self.has_faults and dice < 0.01:
            faults: list[Callable[[Process], None]] = [self.cut, self.restart, self.crash_lighthouse]
            self.choose.choice(faults)(process)
        for quorum_id, names in self.switched.items():
            assert not self.kept_back[quorum_id], f"{names} have switched to {quorum_id}"


@pytest.mark.parametrize("seed", range(40))
def test_all_switch_or_none_and_in_the_end_all_do(seed: int) -> None:
    world = World(seed)
    for _ in range(3000):
        world.step()
    assert world.switched
    assert any(world.kept_back.values())
    world.has_faults = False
    for _ in range(20_000):
        world.step()
        epochs = {process.candidate.epoch for process in world.processes.values()}
        if len(epochs) == 1 and 0 not in epochs and len(world.members[max(epochs)]) == len(world.processes):
            return
    raise AssertionError(f"they have not met: {world.lighthouse.describe(world.now)}")
