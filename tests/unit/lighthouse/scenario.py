"""Golden scenarios for the quorum core: commands and the transcript that they must give, in one file.

A file is made of blocks: commands, `----`, what they printed, an empty line. `#` begins a comment that
is kept. Run the tests with UPDATE_GOLDEN=1 to write the transcripts anew, then read the diff.

    new KEY=VALUE ...      a lighthouse (another `new` is its restart); keys of LighthouseConfig, or first_id
    wait MS                time passes, and what is due happens
    register R [last=ID/ROUND:A,B] [stands=1] [at=STEP] [stated=1] [spare=1]
                                    what it saw last, if /ROUND it knows of rounds
    join R [FIELD=VALUE ...]        over R's newest session, or over session N as R#N
    links R [S,...]                 R cannot reach these; the same
    hold R ID/ROUND STEP            R has not begun this step of a quorum that stands; the same
    giveup R ID/ROUND               R commits nothing more in this quorum; the same
    identify R [job=ID] [first=ID] [NAME=SIZE ...]          who R is, and the tensors of its state; the same
    leave R [STEP [QUORUM]], lost R the same
    gone R                          the process of R is known to be gone
    call R [FIELD=VALUE ...], withdraw R, heartbeat R       torchft's unary calls
    deadline, describe
"""

from __future__ import annotations

from collections.abc import Callable

from lighthouse.core.claims import Past
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import (
    Decision,
    FindMembers,
    HoldQuorum,
    LeftOut,
    Member,
    MemberLost,
    QuorumBroken,
    QuorumFormed,
    QuorumOver,
    QuorumReleased,
    Refused,
)
from lighthouse.core.identity import Identity
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import QuorumCore
from lighthouse.core.state_form import form_of_rows

SEPARATOR = "----"


def replay(text: str) -> str:
    """Return the file with the transcripts that the core gives now."""
    player = _Player()
    return "\n\n".join(_replay_block(block, player) for block in text.strip().split("\n\n")) + "\n"


def _replay_block(block: str, player: _Player) -> str:
    commands = block.partition(f"\n{SEPARATOR}")[0].splitlines()
    outputs = [player.play(line) for line in commands if line and not line.startswith("#")]
    if not outputs:
        return "\n".join(commands)
    printed = [line for output in outputs for line in output]
    return "\n".join([*commands, SEPARATOR, *(printed or ["-"])])


class _Player:
    def __init__(self) -> None:
        self._now = 0.0
        self._sessions: dict[str, int] = {}
        self._number = 0
        self._core = QuorumCore(LighthouseConfig(), 1)

    def play(self, line: str) -> list[str]:
        command, *words = line.split()
        plain = [word for word in words if "=" not in word]
        named = dict(word.split("=", 1) for word in words if "=" in word)
        if command == "describe":
            return self._core.describe(self._now).splitlines()
        if command == "deadline":
            return [self._deadline()]
        handler: Callable[..., list[Decision]] = getattr(self, f"_{command}")
        return [_show(decision) for decision in handler(*plain, **named)]

    def _deadline(self) -> str:
        deadline = self._core.next_deadline()
        return "no deadline" if deadline is None else f"deadline in {(deadline - self._now) * 1000:.0f} ms"

    def _new(self, first_id: str = "100", **settings: str) -> list[Decision]:
        job_id = settings.pop("job_id", "")
        numbers = {key: int(value) for key, value in settings.items()}
        config = LighthouseConfig(job_id=job_id, **numbers)  # type: ignore[arg-type]
        self._core = QuorumCore(config, int(first_id))
        self._sessions.clear()
        return []

    def _wait(self, milliseconds: str) -> list[Decision]:
        self._now += int(milliseconds) / 1000
        return self._core.advance(self._now)

    def _register(
        self,
        replica_id: str,
        last: str = "0:",
        stands: str = "",
        spare: str = "",
        at: str = "0",
        stated: str = "",
    ) -> list[Decision]:
        self._number += 1
        self._sessions[replica_id] = self._number
        quorum, ids = last.split(":")
        number = _number(quorum)
        last_ids = [i for i in ids.split(",") if i]
        flags = bool(stands), bool(spare)
        past = Past(number.quorum_id, frozenset(last_ids), int(at), bool(stands))
        if stated:
            self._core.reported(replica_id, past)
        return self._core.register(self._number, replica_id, number, last_ids, self._now, *flags)

    def _join(self, who: str, **named: str) -> list[Decision]:
        replica_id, session = self._session(who)
        return self._core.join(session, _member(replica_id, named), self._now)

    def _links(self, who: str, unreachable: str = "") -> list[Decision]:
        ids = [i for i in unreachable.split(",") if i]
        return self._core.report_links(self._session(who)[1], ids, self._now)

    def _hold(self, who: str, number: str, step: str) -> list[Decision]:
        return self._core.hold(self._session(who)[1], _number(number), int(step), self._now)

    def _giveup(self, who: str, number: str) -> list[Decision]:
        return self._core.give_up(self._session(who)[1], _number(number), self._now)

    def _identify(
        self, who: str, job: str = "", first: str = "0", protocol: str = "0", **tensors: str
    ) -> list[Decision]:
        forms = (form_of_rows((name, f"[{size}]") for name, size in tensors.items()),) if tensors else ()
        identity = Identity(job, int(first), forms, int(protocol))
        return self._core.identify(self._session(who)[1], identity, self._now)

    def _leave(self, who: str, step: str = "0", quorum_id: str = "0") -> list[Decision]:
        return self._core.leave(self._session(who)[1], self._now, int(step), int(quorum_id))

    def _lost(self, who: str) -> list[Decision]:
        return self._core.lost(self._session(who)[1], "connection closed", self._now)

    def _gone(self, replica_id: str) -> list[Decision]:
        return self._core.gone(replica_id, self._now)

    def _call(self, replica_id: str, **named: str) -> list[Decision]:
        return self._core.call(_member(replica_id, named), self._now)

    def _withdraw(self, replica_id: str) -> list[Decision]:
        return self._core.withdraw(replica_id, self._now)

    def _heartbeat(self, replica_id: str) -> list[Decision]:
        return self._core.heartbeat(replica_id, self._now)

    def _session(self, who: str) -> tuple[str, int]:
        replica_id, _, number = who.partition("#")
        return replica_id, int(number) if number else self._sessions[replica_id]


def _number(text: str) -> QuorumNumber:
    quorum_id, _, round_number = text.partition("/")
    return QuorumNumber(int(quorum_id), int(round_number or 0))


def _member(replica_id: str, named: dict[str, str]) -> Member:
    fields = {field: value if field == "own_failure" else int(value) for field, value in named.items()}
    return Member(replica_id, **fields)  # type: ignore[arg-type]


def _show(decision: Decision) -> str:
    if isinstance(decision, QuorumFormed):
        members = " ".join(m.replica_id for m in decision.quorum.participants)
        number = f"{decision.quorum.quorum_id}/{decision.quorum.round}"
        number += ", which stands," if decision.quorum.stands else ""
        text = f"quorum {number} of {members}; answers {_sessions(decision.sessions)}"
        text += f" and calls of {' '.join(sorted(decision.callers))}" if decision.callers else ""
        text += f"; unproven: {' '.join(decision.unproven)}" if decision.unproven else ""
        if not decision.new_id:
            return f"{text}; same id"
        joined, left = " ".join(decision.joined) or "nobody", " ".join(decision.left) or "nobody"
        return f"{text}; new id, joined: {joined}, left: {left}"
    if isinstance(decision, MemberLost):
        told = _sessions(decision.sessions)
        return f"lost {decision.replica_id} of quorum {decision.quorum_id} ({decision.reason}); tells {told}"
    if isinstance(decision, QuorumBroken):
        told = _sessions(decision.sessions)
        return f"quorum {decision.quorum_id} broke for {decision.replica_id}; tells {told}"
    if isinstance(decision, LeftOut):
        links = ", ".join(" - ".join(link) for link in decision.links)
        told = _sessions(tuple(number for number, _ in decision.sessions))
        why = "; ".join([*([f"for {links}"] if links else []), *(f"{i} {r}" for i, r in decision.reasons)])
        return f"left out: {' '.join(decision.replica_ids) or 'nobody'}, {why}; tells {told}"
    if isinstance(decision, HoldQuorum):
        number = f"{decision.quorum_id}/{decision.round}"
        return f"asks {_sessions(decision.sessions)} to hold in quorum {number}, for {decision.replica_id}"
    if isinstance(decision, QuorumReleased):
        number = f"{decision.quorum_id}/{decision.round}"
        return f"tells {_sessions(decision.sessions)} of quorum {number} to ask at step {decision.ask_at}"
    if isinstance(decision, QuorumOver):
        text = f"tells #{decision.session} of {decision.replica_id} that quorum {decision.quorum_id} is over"
        return text + (", and to say that it gives it up" if decision.must_answer else "")
    if isinstance(decision, Refused):
        return f"refuses #{decision.session} of {decision.replica_id}: {decision.reason}"
    if isinstance(decision, FindMembers):
        return f"finds out whether one is gone: {' '.join(decision.replica_ids)}"
    return f"superseded #{decision.session} of {decision.replica_id}"


def _sessions(numbers: tuple[int, ...]) -> str:
    return " ".join(f"#{number}" for number in sorted(numbers)) or "nobody"
