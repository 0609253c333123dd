"""Processes that run their training function again, and spares that take the places of those that have ended.

It does what the shells in `torchft_like/in_process` do around the real `MeetingProtocol`, `all_start_again`
and `RestartBudget`, and `lighthouse/server.py` around the real `Vacancies`. A try is one start of a
replica group (`replica.py`), for which all of its processes have met. No wait for another process has a limit
here, but for those that the shells limit to a few seconds. A launcher starts a group again when nobody of it
is left, nor a spare on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from lighthouse.core.vacancies import Decision, Filled, Vacancy
from lighthouse.core.vacancies import Told as SpareTold
from tests.simulation.replica import name_of
from tests.simulation.world import DEAD, LIGHTHOUSE, RUNNING, Process
from torchft_like.core.catch_up import Version
from torchft_like.core.restarts import (
    Ask,
    Check,
    Ending,
    NewsError,
    Open,
    Put,
    RankProcess,
    Read,
    RestartBudget,
    Settle,
    Step,
    Steps,
    StoreLostError,
    Told,
    Write,
    all_start_again,
)
from torchft_like.errors import GroupLostError

if TYPE_CHECKING:
    from tests.simulation.rank import Rank
    from tests.simulation.world import World

# How a rank's try ends, by why it dies; another reason ends the process, too.
ENDINGS = {
    "its replica group is lost": Ending.SECONDHAND,
    "an error of its own": Ending.OWN,
    "an unknown error": Ending.UNKNOWN,
    "a health check failed": Ending.UNFIT,
}
OF_SCRIPT = tuple(ENDINGS)[1:]
DOES_NOT_GO_ON = Told(Ending.LAST, "its group does not go on")


class Store:
    """A store, which a process serves for as long as it lives."""

    def __init__(self, world: World, owner: Trainer) -> None:
        self.owner = owner
        self.is_open = True
        self.address = f"store-{len(world.stores)}"
        self.clients: dict[Talk, None] = {}
        self._values: dict[str, bytes] = {}
        self._readers: list[tuple[Talk, int, list[str]]] = []
        world.stores[self.address] = self

    def serve(self, talk: Talk, number: int, step: Put | Write | Read | Check) -> None:
        """Answer a query, at once or when the keys that it waits for have values."""
        if not self.is_open:
            return
        if isinstance(step, Check):
            talk.send_answer(self, number, all(key in self._values for key in step.keys))
        elif isinstance(step, Read):
            self._readers.append((talk, number, list(step.keys.values())))
        elif isinstance(step, Put):
            talk.send_answer(self, number, self._values.setdefault(step.key, step.value.encode()))
        else:
            self._values[step.key] = step.value.encode()
            talk.send_answer(self, number, None)
        waiting, self._readers = self._readers, []
        for reader in waiting:
            client, asked, keys = reader
            if all(key in self._values for key in keys):
                client.send_answer(self, asked, [self._values[key] for key in keys])
            else:
                self._readers.append(reader)

    def close(self) -> None:
        """End with the process that serves it: connections end, and new ones are refused."""
        self.is_open = False
        owner, world, launch = self.owner, self.owner.world, self.owner.launch
        for talk in self.clients:
            world.send(owner, talk.trainer, talk.hear_store_lost, self)
        for trainer in launch.audience if launch is not None else ():
            world.send(owner, trainer, trainer.hear_ended, owner.protocol.own)

    def greet(self, talk: Talk, number: int) -> None:
        """Answer who connects."""
        talk.send_answer(self, number, None)


class Talk:
    """The steps of a protocol that a process carries out, and what follows them.

    Args:
        watches: whether news of other ranks interrupt it.
    """

    def __init__(
        self,
        trainer: Trainer,
        steps: Steps[Any],
        then: Callable[[Any], object],
        failed: Callable[[str], object],
        watches: bool,
    ) -> None:
        self.trainer = trainer
        self.watches = watches
        self.asked: dict[int, tuple[Ask, float]] = {}  # by call: and until when
        self._steps = steps
        self._then = then
        self._failed = failed
        self._store: Store | None = None
        self._number = 0  # of the step that is waited for
        self._is_brief = self._is_settling = False

    def start(self) -> None:
        """Take the first step, and look for processes that have ended before."""
        trainer, world = self.trainer, self.trainer.world
        for process in trainer.protocol.others if self.watches else ():
            if not (store := world.stores[process.address]).is_open:
                world.send(store.owner, trainer, trainer.hear_ended, process)
        self._advance(None, None)

    def interrupt(self) -> None:
        """Let the protocol look at news."""
        if not self._is_settling:
            self._advance(None, NewsError())

    def send_answer(self, store: Store, number: int, answer: object) -> None:
        """Answer a step from afar."""
        self.trainer.world.send(store.owner, self.trainer, self._hear, number, answer)

    def hear_store_lost(self, store: Store) -> None:
        """Handle the end of the connection to a store."""
        if store is self._store and self.trainer.talk is self:
            self._advance(None, StoreLostError("it has ended"))

    def _hear(self, number: int, answer: object) -> None:
        if number == self._number and self.trainer.talk is self:
            self._advance(answer, None)

    def _hear_lost(self, number: int) -> None:
        if number == self._number and self.trainer.talk is self:
            self._advance(None, StoreLostError("it does not answer"))

    def _advance(self, answer: object, failure: Exception | None) -> None:
        self._number += 1
        result: Any = None
        lost = ""
        try:
            step = self._steps.send(answer) if failure is None else self._steps.throw(failure)
        except StopIteration as done:
            result = done.value
        except GroupLostError as error:
            lost = str(error)
        else:
            self._perform(step)
            return
        self._leave_store()
        self.trainer.end_talk()
        if lost:
            self._failed(lost)
        else:
            self._then(result)

    def _perform(self, step: Step) -> None:
        world, trainer, number = self.trainer.world, self.trainer, self._number
        self._is_settling = isinstance(step, Settle)
        if isinstance(step, Ask):
            trainer.ask(self, step)
            self._advance(None, None)
        elif isinstance(step, Settle):
            self._leave_store()
            store = world.stores[step.address]
            has_ended = not store.is_open and not world.are_apart(trainer, store.owner)
            world.after(2 * world.latency(), trainer, self._hear, number, has_ended)
        elif isinstance(step, Open):
            self._leave_store()
            self._open(world.stores[step.address], step.briefly)
        elif self._store is not None and self._store.is_open:
            world.send(trainer, self._store.owner, self._store.serve, self, number, step)
        else:
            world.after(world.latency(), trainer, self._hear_lost, number)
        if self._is_brief and number == self._number:
            world.after(world.scenario.brief_s, trainer, self._hear_lost, number)

    def _open(self, store: Store, is_brief: bool) -> None:
        world, number = self.trainer.world, self._number
        self._store, self._is_brief = store, is_brief
        store.clients[self] = None
        if store.is_open:
            world.send(self.trainer, store.owner, store.greet, self, number)
        elif is_brief and not world.are_apart(self.trainer, store.owner):
            world.after(2 * world.latency(), self.trainer, self._hear_lost, number)
        # else it tries again and again, until there is news

    def _leave_store(self) -> None:
        if self._store is not None:
            self._store.clients.pop(self, None)
            self._store = None


class Try:
    """What the ranks of one try find each other by: what rank 0 serves."""

    def __init__(self, attempt: int, members: tuple[str, ...]) -> None:
        self.attempt = attempt
        self.members = members
        self.arrived: dict[int, Trainer] = {}

    def is_torn(self, world: World) -> bool:
        """Return whether any two of those that have come do not hear each other."""
        come = list(self.arrived.values())
        return any(world.are_apart(one, other) for one in come for other in come)


class Launch:
    """One start of a replica group by its launcher, and the spares that have taken places in it.

    Attributes:
        audience: the processes of it that live, and spares on their way.
    """

    def __init__(self, world: World, slot: int, number: int) -> None:
        self._world = world
        self.slot = slot
        self.group_id = f"{slot}#{number}"
        self.trainers = [Trainer(world, self, rank) for rank in range(world.scenario.ranks)]
        self.audience = list(self.trainers)
        self.tries: dict[str, Try] = {}
        processes = [RankProcess(t.number, t.store.address) for t in self.trainers]
        for trainer, own in zip(self.trainers, processes, strict=True):
            trainer.protocol = world.cores.meeting(own, processes)
            world.after(world.latency(), trainer, trainer.begin, 0)


class Trainer(Process):
    """A process that runs its training function again: a rank of a replica group, or a spare rank.

    Attributes:
        launch: the start of a replica group of which it is a rank, or to which it is on its way.
        rank: its try.
        talk: what it does between tries.
        kept: the state of its last try that was certain: version and parameters.
    """

    def __init__(self, world: World, launch: Launch | None, number: int) -> None:
        super().__init__()
        self.world = world
        self.launch = launch
        self.number = number
        self.store = Store(world, self)
        self.name = f"process {world.next_process()}"
        own = RankProcess(number, self.store.address)
        self.protocol = world.cores.meeting(own, [own])
        self.attempt = 0
        self.rank: Rank | None = None
        self.talk: Talk | None = None
        self.kept: tuple[Version, int] | None = None
        self._try: Try | None = None
        self._budget = RestartBudget(world.scenario.restarts_max, None)
        self._desk: Desk | None = None
        self._heard: dict[str, float] = {}  # by process: when it was heard last
        self._up_at = 0.0

    @property
    def parts(self) -> tuple[Process, ...]:
        """It and its try."""
        return (self,) if self.rank is None else (self, self.rank)

    @property
    def is_spare(self) -> bool:
        """Whether it is no rank yet."""
        return self.launch is None or self not in self.launch.trainers

    @property
    def is_torn(self) -> bool:
        """Whether it is in a try with processes that do not hear each other."""
        return self.rank is not None and self._try is not None and self._try.is_torn(self.world)

    # -- tries

    def begin(self, attempt: int) -> None:
        """Begin a try: rank 0 says where the others find it."""
        launch, protocol = self._of_launch(), self.protocol
        self.attempt = attempt
        members = tuple(process.address for _, process in sorted(protocol.processes.items()))
        self.world.tell(
            self.name, f"begins try {attempt} of {launch.group_id} as rank {self.number}, with", *members
        )
        self.world.checker.begins_try(launch.group_id, attempt, self.number, self.store.address, members)
        if self.number > 0:
            self._talk(protocol.find(attempt), self._found, self._lost)
        else:
            name = f"{self.store.address}/{attempt}"
            launch.tries[name] = Try(attempt, members)
            self._talk(protocol.publish(attempt, name), lambda _: self._found(name), self._lost)

    def _found(self, name: str) -> None:
        """Come to the try, which begins with the last one; a rank waits for the others for some time."""
        launch, world = self._of_launch(), self.world
        this = self._try = launch.tries[name]
        world.checker.comes_to_try(self.store.address, this.attempt, this.members)
        this.arrived[self.number] = self
        if len(this.arrived) == world.scenario.ranks and not this.is_torn(world):
            world.checker.try_begins(launch.group_id, this.members, name_of(launch.slot))
            world.launcher.begin_try(launch, [this.arrived[rank] for rank in sorted(this.arrived)])
        else:
            world.after(world.scenario.meet_s, self, self._stop_waiting, this)

    def _stop_waiting(self, this: Try) -> None:
        if self._try is this and self.rank is None:
            self._end_try(Told(Ending.SECONDHAND, "a rank is missing"))

    def _lost(self, reason: str) -> None:
        self._end_try(Told(Ending.SECONDHAND, reason))

    def rank_ended(self, why: str) -> None:
        """Handle the end of a try, or of the process with it."""
        self.rank = None
        if why == "SIGKILL":
            self.die(why)
        else:
            self._end_try(Told(ENDINGS.get(why, Ending.LAST), why))

    def _end_try(self, told: Told) -> None:
        self._leave_try()
        if told.ending in (Ending.LAST, Ending.UNFIT):
            self._exit(told)
            return
        if self._budget.is_spent(self.world.now):
            told = Told(Ending.SPENT, told.reason)
        self.world.tell(self.name, f"ends try {self.attempt}: {told.ending.value}, {told.reason}")
        self.world.after(self.world.latency(), self, self._agree, told)

    def _agree(self, told: Told) -> None:
        def failed(reason: str) -> None:
            self._agreed((attempt + 1, [Told(Ending.LAST, reason)]))

        attempt = self.attempt
        self._talk(self.protocol.agree(attempt, told), self._agreed, failed)

    def _agreed(self, result: tuple[int, list[Told]]) -> None:
        self.attempt, everybody = result
        if not all_start_again(everybody):
            self._exit(DOES_NOT_GO_ON)
            return
        if all(each.ending is not Ending.REPLACED for each in everybody):
            self._budget.count(self.world.now)
        self.world.felt["started_again"] += 1
        self.begin(self.attempt)

    def _leave_try(self) -> None:
        self.world.checker.ends_try(self.store.address)
        if self._try is not None:
            self._try.arrived.pop(self.number, None)
            self._try = None

    def _exit(self, told: Told) -> None:
        """Say that this rank is not in the next try, and end the process."""
        self._talk(self.protocol.say(self.attempt, told), self._exited, self._exited, watches=False)

    def _exited(self, _: object) -> None:
        self.die("its function has ended")

    # -- what is asked of stores and of the lighthouse

    def _talk(
        self,
        steps: Steps[Any],
        then: Callable[[Any], object],
        failed: Callable[[str], object],
        watches: bool = True,
    ) -> None:
        talk = self.talk = Talk(self, steps, then, failed, watches)
        talk.start()
        if watches:
            self._heard.clear()
            self._listen(talk)
            self.world.after(self.world.scenario.look_again_s, self, self._look_again, talk)

    def _look_again(self, talk: Talk) -> None:
        """Let the protocol look again: this process may have been away, and passed over."""
        if talk is self.talk:
            self.world.after(self.world.scenario.look_again_s, self, self._look_again, talk)
            talk.interrupt()

    def _listen(self, talk: Talk) -> None:
        """Find out who answers and who does not, while this process waits for others."""
        if talk is not self.talk:
            return
        world, protocol = self.world, self.protocol
        now, has_news = world.cores.heard(world, self), False
        for process in protocol.others:
            other = world.stores[process.address].owner
            if other.state == RUNNING and not world.are_apart(self, other):
                self._heard[process.address] = now
            is_silent = now - self._heard.setdefault(process.address, now) > world.scenario.dead_s
            if is_silent:
                world.checker.is_unheard(self._of_launch().group_id)
            has_news |= protocol.silent(process, "it answers nothing" if is_silent else "")
        world.after(world.scenario.keepalive_s * 0.25, self, self._listen, talk)
        if has_news:
            world.felt["passed_over"] += 1
            world.tell(
                self.name, "goes on without", *(set(self._heard) - {p.address for p in protocol.others})
            )
            talk.interrupt()

    def end_talk(self) -> None:
        """Ask for spares no more."""
        talk, self.talk = self.talk, None
        for number in talk.asked if talk is not None else ():
            self._send_up(self.world.lighthouse.desk.hear_withdrawn, number)

    def hear_ended(self, process: RankProcess) -> None:
        """Handle that another process has ended, while this one listens."""
        talk = self.talk
        if talk is not None and talk.watches and self.protocol.ended(process):
            talk.interrupt()

    def ask(self, talk: Talk, step: Ask) -> None:
        """Ask the lighthouse for a spare, until there is an answer, or for some time."""
        world, number = self.world, self.world.next_process()
        talk.asked[number] = step, world.now + world.scenario.spare_wait_s
        if world.scenario.waits_for_spares:
            world.after(world.scenario.spare_wait_s, self, self._ask_no_longer, talk, number)
        self.call(talk, number)

    def call(self, talk: Talk, number: int) -> None:
        """Ask once more, as there was no answer."""
        world = self.world
        if number not in talk.asked or talk is not self.talk:
            return
        step, until = talk.asked[number]
        if world.now >= until:
            self._ask_no_longer(talk, number)
            return
        if world.lighthouse.state == DEAD or world.is_cut(self._of_launch().slot, LIGHTHOUSE):
            world.after(world.scenario.keepalive_s * 0.2, self, self.call, talk, number)
            return
        place = Place(self._of_launch(), step.lost.rank, step.meets_in.address, step.attempt)
        desk = world.lighthouse.desk
        desk.calls[number] = talk
        self._send_up(desk.hear_ask, number, place)

    def _ask_no_longer(self, talk: Talk, number: int) -> None:
        self._send_up(self.world.lighthouse.desk.hear_withdrawn, number)
        self.hear_answer(talk, number, "no spare has come in time")

    def hear_answer(self, talk: Talk, number: int, reason: str) -> None:
        """Take the answer of the lighthouse, or that there is none."""
        if number in talk.asked and talk is self.talk:
            step, _ = talk.asked.pop(number)
            self.protocol.answered(step, reason)
            talk.interrupt()

    def _send_up(self, action: Callable[..., object], *args: Any) -> None:
        """Send a message to the lighthouse, after all earlier ones."""
        world = self.world
        self._up_at = max(world.now + world.latency(), self._up_at)
        world.at(self._up_at, world.lighthouse, action, *args)

    # -- as a spare

    def offer(self) -> None:
        """Wait for a place."""
        world = self.world
        if world.lighthouse.state == DEAD:
            world.after(world.scenario.keepalive_s * 0.2, self, self.offer)
            return
        desk = self._desk = world.lighthouse.desk
        desk.visitors[self] = None
        self._send_up(desk.hear_register, self)

    def hear_desk_over(self, desk: Desk) -> None:
        """Handle the end of the lighthouse: a spare on its way looks for another one afterwards."""
        if desk is self._desk:
            self._desk = None
            if self.talk is None:
                self.offer()

    def hear_place(self, desk: Desk, place: Place) -> None:
        """Go to a place of which the lighthouse has told."""
        if desk is not self._desk:
            return
        world = self.world
        world.tell(
            self.name, f"is told of rank {place.rank} of {place.launch.group_id}, after try {place.attempt}"
        )
        self.store = Store(world, self)
        own = RankProcess(place.rank, self.store.address, "", place.attempt + 1)
        self.protocol, self.launch = world.cores.meeting(own, [own]), place.launch
        place.launch.audience.append(self)
        visit = self.protocol.visit(place.store, world.scenario.ranks)
        self._talk(visit, self._enter, self._decline, watches=False)

    def _enter(self, _: object) -> None:
        self._talk(self.protocol.enter(), self._entered, self._decline)

    def _decline(self, reason: str) -> None:
        self.world.tell(self.name, "does not take it:", reason)
        self.store.close()
        self._leave_launch()
        if self._desk is None:
            self.offer()
        else:
            self._send_up(self._desk.hear_declined, self)

    def _entered(self, attempt: int) -> None:
        launch, self.number = self._of_launch(), self.protocol.own.rank
        if self._desk is not None:
            self._send_up(self._desk.hear_end, self, True)
            self._desk = None
        launch.trainers.append(self)
        self.world.felt["place_taken"] += 1
        self.world.launcher.spare_over()
        self.begin(attempt)

    # -- ends

    def kill(self) -> None:
        """Kill the process."""
        if self.rank is not None:
            self.rank.die("SIGKILL")
        else:
            self.die("SIGKILL")

    def die(self, why: str) -> None:
        """End, by SIGKILL or because the function has ended."""
        world, launch = self.world, self.launch
        was_spare = self.is_spare
        self.state = DEAD
        self.inbox.clear()
        world.tell(self.name, "ends:", why)
        self._leave_try()
        self.world.checker.process_ended(self.store.address)
        self.end_talk()
        self.store.close()
        if self._desk is not None:
            self._send_up(self._desk.hear_end, self, False)
        if was_spare:
            world.launcher.spare_over()
        if launch is not None:
            self._leave_launch()

    def _leave_launch(self) -> None:
        launch, self.launch = self._of_launch(), None
        launch.audience.remove(self)
        if not launch.audience:
            self.world.launcher.launch_over(launch)

    def _of_launch(self) -> Launch:
        assert self.launch is not None
        return self.launch


class Place(NamedTuple):
    """A vacant place, as a spare is told of it."""

    launch: Launch
    rank: int
    store: str
    attempt: int


class Desk:
    """The lighthouse's desk for spares, for one life of it.

    Attributes:
        visitors: spares with a session, or on their way to one.
        calls: those who ask for a spare, by the number of the call.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._vacancies = world.cores.vacancies()
        self._numbers = 0
        self._sessions: dict[Trainer, int] = {}
        self._spares: dict[int, Trainer] = {}
        self._places: dict[bytes, Place] = {}
        self.visitors: dict[Trainer, None] = {}
        self.calls: dict[int, Talk] = {}

    def end(self) -> None:
        """Let everybody who talks to it see that the lighthouse is gone."""
        world = self._world
        for spare in self.visitors:
            world.after(world.latency(), spare, spare.hear_desk_over, self)
        for number, talk in self.calls.items():
            world.after(world.latency(), talk.trainer, talk.trainer.call, talk, number)
        self.visitors, self.calls = {}, {}

    def hear_register(self, spare: Trainer) -> None:
        """Handle a spare that offers itself."""
        if spare in self.visitors:
            self._numbers = session = self._numbers + 1
            self._sessions[spare], self._spares[session] = session, spare
            self._apply(self._vacancies.register(session, spare.name, ""))

    def hear_declined(self, spare: Trainer) -> None:
        """Handle a spare that could not take its place."""
        if spare in self.visitors:
            self._world.checker.spare_is_free(spare.name)
            self._apply(self._vacancies.declined(self._sessions[spare]))

    def hear_end(self, spare: Trainer, has_left: bool) -> None:
        """Handle the end of a spare's session, in good order or not."""
        if spare in self.visitors:
            del self.visitors[spare]
            session = self._sessions.pop(spare)
            del self._spares[session]
            self._world.checker.spare_is_free(spare.name)
            end = self._vacancies.taken if has_left else self._vacancies.lost
            self._apply(end(session))

    def hear_ask(self, number: int, place: Place) -> None:
        """Handle a rank that asks for a spare."""
        if number in self.calls:
            launch = place.launch.group_id
            meeting = f"{place.store} {place.attempt}"
            message = f"{launch} {place.rank} {meeting}".encode()
            self._places[message] = place
            vacancy = Vacancy(launch, place.rank, "", meeting, message)
            self._apply(self._vacancies.ask(number, vacancy, waits=self._world.scenario.waits_for_spares))

    def hear_withdrawn(self, number: int) -> None:
        """Handle a rank that asks no more."""
        if self.calls.pop(number, None) is not None:
            self._vacancies.withdraw(number)

    def _apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, SpareTold):
                self._tell(decision)
            elif isinstance(decision, Filled):
                self._answer(decision.callers, "")
            else:
                self._answer(decision.callers, "no spare is free")

    def _tell(self, told: SpareTold) -> None:
        world, spare = self._world, self._spares.get(told.session)
        world.checker.spare_is_told(told.spare_id, told.vacancy.key)
        if spare is not None:
            world.after(world.latency(), spare, spare.hear_place, self, self._places[told.vacancy.message])

    def _answer(self, numbers: tuple[int, ...], reason: str) -> None:
        world = self._world
        for number in numbers:
            talk = self.calls.pop(number, None)
            if talk is not None:
                world.after(world.latency(), talk.trainer, talk.trainer.hear_answer, talk, number, reason)
            self._vacancies.withdraw(number)
