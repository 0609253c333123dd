"""Structured records of what happened: one form for logs, the demo, metrics and tests.

A record has a kind, the time, its source, and fields of its kind. It is written once, by the
Manager or by the lighthouse, and read by everything else: the text logger prints one line per
record, `TORCHFT_EVENT_FILE` collects them as JSON lines, and any callable can subscribe.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lighthouse.core.json_text import read_json
from lighthouse.errors import ConfigError

EVENT_FILE_ENV = "TORCHFT_EVENT_FILE"

NAMES_MAX = 32  # names in a line of text

_logger = logging.getLogger(__name__)

Field = str | int | float | bool | None | list[str]


@dataclass(frozen=True)
class Event:
    """One thing that happened. `time` is seconds since the Unix epoch."""

    kind: str
    source: str  # "manager" or "lighthouse"
    time: float
    replica_id: str = ""
    group_rank: int = 0
    step: int = -1
    quorum_id: int = -1
    fields: Mapping[str, Field] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Field]:
        """Return the record as plain values; the fields of the kind stand beside the common ones."""
        return {**{k: v for k, v in vars(self).items() if k != "fields"}, **self.fields}

    def to_json(self) -> str:
        """Return `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def to_text(self) -> str:
        """Return the record as one readable line, in which `short_name` abbreviates ids."""
        who = f"{short_name(self.replica_id)}/{self.group_rank}" if self.replica_id else self.source
        where = f" step {self.step}" if self.step >= 0 else ""
        quorum = f" quorum {self.quorum_id}" if self.quorum_id > 0 else ""
        return f"[{printable(who)}{where}{quorum}] {self.sentence()}"

    def sentence(self) -> str:
        """Return what happened, as one printable line; the replica is not always in it."""
        return printable(KINDS[self.kind][1](self.fields))


def short_name(replica_id: str) -> str:
    """Abbreviate `name:1b4e28ba-2fa1-...` to `name:1b4e`, which tells the restarts of one name apart."""
    name, _, incarnation = replica_id.rpartition(":")
    return f"{name}:{incarnation[:4]}" if name else replica_id[:12]


def printable(text: str) -> str:
    """Return the text on one line that moves no cursor: names that peers choose end up in terminals."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


Fields = Mapping[str, Field]


def _list(value: Field) -> list[str]:
    return value if isinstance(value, list) else []


def _who(fields: Fields, key: str = "member") -> str:
    return short_name(str(fields[key]))


def _names(value: Field) -> str:
    names = _list(value)
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return " ".join(map(short_name, names[:NAMES_MAX])) + more or "nobody"


def _each(before: str, addresses: Field) -> str:
    return f"{before} {', '.join(_list(addresses))}" if addresses else ""


def _quorum_sentence(fields: Fields) -> str:
    parts = [f"in: {_names(fields['members'])}"]
    parts += [f"{key}: {_names(fields[key])}" for key in ("joined", "left", "healing") if fields.get(key)]
    if "participants" in fields:
        parts.append(f"{fields['participants']} participants")
    if "seconds" in fields:
        how = "ready" if fields["reconfigured"] else "FAILED"
        parts.append(f"{how} after {fields['seconds']:.3f} s")
    return "quorum " + ", ".join(parts)


def _left_out_sentence(fields: Fields) -> str:
    """Describe why; each link that does not work is two names with " - " between them."""
    links, why = _list(fields["links"]), [*_list(fields.get("reasons"))]
    if links:
        named = ", ".join(" - ".join(map(short_name, link.split(" - "))) for link in links)
        why.append(f"links that do not work: {named}")
    who = f"left out: {_names(fields['members'])}"
    return "; ".join([who if fields["members"] else "nobody is left out, too few would stay", *why])


def _divergence_sentence(fields: Fields) -> str:
    sides = f"{_names(fields['members'])} from {_names(fields['kept'])}"
    if not fields["comparable"]:
        return f"states cannot be compared, other tensors or slices are watched: {sides}"
    where = f" in rank {' '.join(_list(fields['ranks']))}" if fields["ranks"] is not None else ""
    outcome = "the first take over the others' state" if fields["heals"] else "nothing is done about it"
    doubt = ", though as many are against it" if fields["tied"] and fields["heals"] else ""
    return f"states differ: {sides}{where}; {outcome}{doubt}"


def _heal_sentence(fields: Fields) -> str:
    how = f"{fields['bytes']} B in {fields['seconds']:.3f} s, {fields['gb_per_s']:.2f} GB/s"
    kept = f", {fields['kept']} B had been kept" if fields["kept"] else ""
    where = f"{_each(' from', fields['addresses'])}{kept}{_each('; not from', fields['refused'])}"
    return f"healed from {_who(fields, 'source')}: {how}{where}"


_INFO, _WARN, _ERROR = logging.INFO, logging.WARNING, logging.ERROR

# Each kind, with the level of its lines of text, and its sentence, which names its fields.
KINDS: Mapping[str, tuple[int, Callable[[Fields], str]]] = {
    # A Manager starts; each setting has its value, and where that came from.
    "settings": (_INFO, lambda f: f"settings: {', '.join(_list(f['settings']))}"),
    "quorum": (_INFO, _quorum_sentence),  # one with a new id
    "stands": (_INFO, lambda _: "the quorum stands: its members ask for no other until something happens"),
    "hold": (_INFO, lambda f: f"the quorum stands no more, because of {_who(f)}"),
    "register": (_INFO, lambda f: f"{_who(f)} registered"),
    "spare": (_INFO, lambda f: f"spare rank {_who(f)} of {f['host']} waits for a place"),
    "replaced": (_WARN, lambda f: f"{_who(f)} has taken the place of rank {f['rank']} of {f['group']}"),
    "kill": (_WARN, lambda f: f"{_who(f)} is killed, which {f['by']} asked for"),
    "leave": (_INFO, lambda f: f"{_who(f)} left: {f['reason']}"),  # in good order
    "loss": (_WARN, lambda f: f"lost {_who(f)}: {f['reason']}"),  # it died or fell silent
    "left_out": (_WARN, _left_out_sentence),
    "unproven": (_WARN, lambda f: f"not believed how far it is, as nothing shows it: {_names(f['members'])}"),
    "refused": (_ERROR, lambda f: f"refused {_who(f)}, which is foreign to the job: {f['reason']}"),
    "divergence": (_ERROR, _divergence_sentence),
    "abort": (_WARN, lambda f: f"aborted the process group: {f['reason']}"),
    "error": (_WARN, lambda f: f"error: {f['reason']}"),  # the step will not be committed
    "heal": (_INFO, _heal_sentence),
    "heal_sent": (_INFO, lambda f: f"offers its state to {_names(f['members'])}"),
    "kept": (
        _INFO,
        lambda f: f"kept the averages of step after step, {f['steps']} so far, to take them again",
    ),
    "commit": (
        logging.DEBUG,
        lambda f: f"{'' if f['committed'] else 'NOT '}committed with {f['participants']} participants",
    ),
    "disconnected": (_WARN, lambda f: f"lighthouse {f['address']} is away: {f['reason']}"),
    "connected": (_INFO, lambda f: f"lighthouse {f['address']} is back"),
    "shutdown": (_INFO, lambda f: f"shut down: {f['reason']}"),
}


Subscriber = Callable[[Event], None]
Wants = Callable[[str], bool]


class EventLog:
    """The log into which one component writes its records.

    Subscribers are called on the thread on which the event happened and must be quick. An error
    in one is logged and goes no further: a broken subscriber must not break the component.
    """

    def __init__(self, source: str, logger: logging.Logger) -> None:
        """Open the file that the environment names, if it names one.

        Raises:
            ConfigError: nothing can be written to the file that the environment names.
        """
        self._source = source
        self._logger = logger
        self._subscribers: list[tuple[Subscriber, Wants]] = []
        if path := os.environ.get(EVENT_FILE_ENV):
            try:
                self.subscribe(JsonLinesFile(Path(path)))
            except OSError as error:
                raise ConfigError(
                    f"{EVENT_FILE_ENV} is {path}, to which nothing can be written: {error.strerror}"
                ) from error

    def subscribe(self, subscriber: Subscriber, wants: Wants = lambda _: True) -> None:
        """Call `subscriber` with every record from now on whose kind it `wants`.

        Each step writes a record, which takes longer to make than the rest of a quiet step.
        """
        self._subscribers.append((subscriber, wants))

    def emit(
        self,
        kind: str,
        *,
        replica_id: str = "",
        group_rank: int = 0,
        step: int = -1,
        quorum_id: int = -1,
        **fields: Field,
    ) -> None:
        """Write one record; `kind` is a key of `KINDS`."""
        level, _ = KINDS[kind]
        is_logged = self._logger.isEnabledFor(level)
        subscribers = [subscriber for subscriber, wants in self._subscribers if wants(kind)]
        if not subscribers and not is_logged:
            return
        event = Event(kind, self._source, time.time(), replica_id, group_rank, step, quorum_id, fields)
        if is_logged:
            self._logger.log(level, "%s", event.to_text(), extra={"event": event.to_dict()})
        for subscriber in subscribers:
            try:
                subscriber(event)
            except Exception:
                self._logger.exception("an event subscriber failed on %s", event.kind)


class JsonLinesFile:
    """A subscriber that appends each record to a file, readable while it grows; a script may append its own.

    Lines of several processes may share the file: each is one `write` to a descriptor opened for
    appending. While nothing can be written, on a full disk say, records are lost: one warning says so, and
    another one when it works again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        weakref.finalize(self, os.close, self._descriptor).atexit = False  # a process may make many Managers
        self._lock = threading.Lock()
        self._lost = 0
        self._ends_in_a_line = False  # a part of a record that did not fit

    def __call__(self, event: Event) -> None:
        self.append(event.to_json())

    def append(self, line: str) -> None:
        """Append a line of JSON, which comes without its end."""
        with self._lock:
            record = f"{line}\n".encode()
            data = b"\n" + record if self._ends_in_a_line else record
            try:
                written = os.write(self._descriptor, data)
            except OSError as error:
                self._lose(error.strerror or repr(error))
                return
            self._ends_in_a_line = written < len(data)
            if self._ends_in_a_line:
                self._lose("there is room for a part of a record only")
            elif self._lost:
                _logger.warning("%s: records are written again, %d were lost", self._path, self._lost)
                self._lost = 0

    def _lose(self, why: str) -> None:
        self._lost += 1
        if self._lost == 1:
            _logger.warning("%s: records are lost until they can be written: %s", self._path, why)


def read_events(path: Path) -> Iterator[dict[str, object]]:
    """Yield the records in a file so far, oldest first; a line still being written is left out.

    A line that is no record is left out with a warning: a writer that was killed, or a disk that was full,
    may have left half of one, and what comes after it is still wanted.
    """
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = read_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            yield record
        else:
            _logger.warning("%s:%d is no event record", path, number)
