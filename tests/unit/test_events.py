"""Event records: one form for logs, files and subscribers."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import pytest

from lighthouse.errors import ConfigError
from lighthouse.events import (
    EVENT_FILE_ENV,
    KINDS,
    Event,
    EventLog,
    Field,
    JsonLinesFile,
    read_events,
    short_name,
)
from tests.descriptors import left_open_since, open_descriptors
from tests.faults import raising

EXAMPLES: dict[str, dict[str, Field]] = {
    "settings": {"settings": ["timeout=5.0 (TORCHFT_TIMEOUT_SEC instead of the argument 7.0)"]},
    "quorum": {
        "members": ["a:1234567", "b:89abcde"],
        "joined": ["b:89abcde"],
        "left": [],
        "healing": ["b:89abcde"],
        "participants": 1,
        "reconfigured": True,
        "seconds": 0.0204,
    },
    "register": {"member": "b:89abcde"},
    "spare": {"member": "host:1b4e28ba", "host": "host"},
    "replaced": {"member": "host:1b4e28ba", "group": "5e1f", "rank": 3},
    "kill": {"member": "b:89abcde", "by": "somebody at 127.0.0.1"},
    "leave": {"member": "b:89abcde", "reason": "shutdown"},
    "unproven": {"members": ["b:89abcde"]},
    "refused": {"member": "b:89abcde", "reason": "its job id is other"},
    "stands": {},
    "hold": {"member": "b:89abcde"},
    "loss": {"member": "b:89abcde", "reason": "its connection ended"},
    "abort": {"reason": "lost b"},
    "error": {"reason": "RuntimeError: x"},
    "left_out": {
        "members": ["b:89abcde"],
        "links": ["a:1234567 - b:89abcde"],
        "reasons": ["b:89abcde has spoilt 2 quorums"],
    },
    "divergence": {
        "members": ["b:89abcde"],
        "ranks": ["0"],
        "kept": ["a:1234567"],
        "tied": True,
        "comparable": True,
        "heals": True,
    },
    "heal": {
        "source": "a:1234567",
        "bytes": 872,
        "seconds": 0.0081,
        "gb_per_s": 0.1,
        "kept": 640,
        "addresses": ["http://10.0.0.1:4711 (872 B)"],
        "refused": ["http://10.0.0.2:4711: the stream is truncated"],
    },
    "heal_sent": {"members": ["b:89abcde"]},
    "kept": {"steps": 3},
    "commit": {"committed": False, "participants": 2},
    "disconnected": {"address": "127.0.0.1:1", "reason": "ping timeout"},
    "connected": {"address": "127.0.0.1:1"},
    "shutdown": {"reason": "stopped"},
}


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("tests.events")


def test_every_kind_is_one_line_of_text_and_of_json() -> None:
    assert EXAMPLES.keys() == KINDS.keys()
    for kind, fields in EXAMPLES.items():
        event = Event(kind, "manager", 1.5, "a:1234567", 0, 3, 9, fields)
        text = event.to_text()
        assert text.startswith("[a:1234/0 step 3 quorum 9] ")
        assert "\n" not in text
        assert json.loads(event.to_json()) == {
            "kind": kind,
            "source": "manager",
            "time": 1.5,
            "replica_id": "a:1234567",
            "group_rank": 0,
            "step": 3,
            "quorum_id": 9,
            **fields,
        }


def test_the_quorum_line_says_who_is_in_who_left_and_who_heals() -> None:
    text = Event("quorum", "manager", 0.0, fields={**EXAMPLES["quorum"], "left": ["c:ffff1"]}).to_text()
    assert text == (
        "[manager] quorum in: a:1234 b:89ab, joined: b:89ab, left: c:ffff, healing: b:89ab, "
        "1 participants, ready after 0.020 s"
    )


def test_a_name_keeps_what_tells_its_restarts_apart() -> None:
    assert short_name("trainer:1b4e28ba-2fa1-11d2-883f-0016d3cca427") == "trainer:1b4e"
    assert short_name("1b4e28ba-2fa1-11d2-883f-0016d3cca427") == "1b4e28ba-2fa"


def test_subscribers_and_the_file_get_every_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(EVENT_FILE_ENV, str(path))
    log, seen = EventLog("manager", logger), list[Event]()
    log.subscribe(seen.append)
    log.emit("commit", step=4, committed=True, participants=3)
    log.emit("abort", reason="lost b")
    assert [event.kind for event in seen] == ["commit", "abort"]
    assert [record["kind"] for record in read_events(path)] == ["commit", "abort"]


def test_a_full_disk_costs_records_one_warning_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    events = JsonLinesFile(path)
    log, write, room = EventLog("manager", logger), os.write, [1000, 0, 0, 10, 0, 1000, 1000]

    def write_within(descriptor: int, data: bytes) -> int:
        if (left := room.pop(0)) == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:left])

    log.subscribe(events)
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(os, "write", write_within)
        for step in range(7):
            log.emit("commit", step=step, committed=True, participants=3)
    assert [record["step"] for record in read_events(path)] == [0, 5, 6]
    told = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert told[0] == f"{path}: records are lost until they can be written: No space left on device"
    assert told[1] == f"{path}: records are written again, 4 were lost"
    assert len(told) == 3  # and the part of a record that is in the file


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"abort"}\n{"kind":"com')
    assert [record["kind"] for record in read_events(path)] == ["abort"]
    assert list(read_events(tmp_path / "missing")) == []


def test_a_record_carries_its_event_plainly(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger.name):
        EventLog("manager", logger).emit("abort", step=3, reason="lost b")
    carried = json.loads(json.dumps(vars(caplog.records[0])["event"]))
    assert (carried["kind"], carried["step"], carried["reason"]) == ("abort", 3, "lost b")


def test_a_failing_subscriber_is_logged(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    log, seen = EventLog("manager", logger), list[Event]()
    log.subscribe(raising(RuntimeError("no disk")))
    log.subscribe(seen.append)
    log.emit("abort", reason="x")
    assert len(seen) == 1
    assert "an event subscriber failed on abort" in caplog.text


@pytest.mark.no_leak
def test_a_log_that_is_gone_keeps_no_file_open(
    logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EVENT_FILE_ENV, str(tmp_path / "events"))
    before = open_descriptors()
    EventLog("manager", logger)  # each Manager of a process has one
    assert left_open_since(before) == set()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EVENT_FILE_ENV, str(tmp_path / "no folder" / "events.jsonl"))
    with pytest.raises(ConfigError, match=f"{EVENT_FILE_ENV} is .*No such file"):
        EventLog("test", logging.getLogger("test"))
