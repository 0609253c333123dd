"""torchft's three loggers: what they are told, and that it reaches a collector if wanted."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest

from lighthouse.events import EventLog
from tests.conftest import ROOT
from torchft_like import otel
from torchft_like.errors import ConfigError

LIMIT_S = 60


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> EventLog:
    monkeypatch.delenv(otel.USE_OTEL_ENV, raising=False)
    return otel.followed(EventLog("manager", logging.getLogger("torchft_like")))


def test_the_loggers_are_told_what_torchft_tells_them(
    events: EventLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_ID", "job7")
    for name in ("torchft_quorums", "torchft_commits", "torchft_errors"):
        caplog.set_level(logging.INFO, name)
    common = {"replica_id": "a:1", "group_rank": 2, "step": 3, "quorum_id": 4}
    events.emit("quorum", members=["a:1"], **common)  # type: ignore[arg-type]
    events.emit("commit", committed=False, participants=1, **common)  # type: ignore[arg-type]
    events.emit("abort", reason="a peer is lost", **common)  # type: ignore[arg-type]
    events.emit("heal_sent", members=[], **common)  # type: ignore[arg-type]
    records = {
        r.name: r for r in caplog.records if r.name.startswith("torchft_") and r.name != "torchft_like"
    }
    assert set(records) == {"torchft_quorums", "torchft_commits", "torchft_errors"}
    for record in map(vars, records.values()):
        assert [record[key] for key in ("job_id", "replica_id", "rank", "quorum_id", "step")] == [
            *("job7", "a:1", 2, 4, 3)
        ]
    assert vars(records["torchft_commits"])["commit_result"] is False
    assert vars(records["torchft_errors"])["error"] == "process_group_abort"


def test_a_script_that_logs_is_told_of_a_quorum_once(
    events: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    events.emit("quorum", members=["a:1"], replica_id="a:1", step=3, quorum_id=4)
    events.emit("commit", committed=True, participants=1, replica_id="a:1", step=3, quorum_id=4)
    assert [record.name for record in caplog.records] == ["torchft_like"]


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(otel.USE_OTEL_ENV, "true")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk._logs", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http._log_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'torchft-like\[otel\]'"):
        otel.setup_logger("torchft_quorums")


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"torchft_errors": 1}'])
def test_a_file_of_attributes_that_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "attributes.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(otel.USE_OTEL_ENV, "true")
    monkeypatch.setenv(otel.TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON, str(path))
    with pytest.raises(ConfigError, match=r"attributes\.json"):
        otel.setup_logger("torchft_errors")


@pytest.fixture
def collector() -> Iterator[tuple[str, Queue[bytes]]]:
    came: Queue[bytes] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", came
        server.shutdown()
        thread.join()


def test_records_reach_a_collector(collector: tuple[str, Queue[bytes]], tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    address, came = collector
    attributes = tmp_path / "attributes.json"
    attributes.write_text(
        json.dumps({f"torchft_{n}": {"team": "t9"} for n in ("quorums", "commits", "errors")})
    )
    program = (
        "import logging; from lighthouse.events import EventLog; from torchft_like import otel\n"
        "log = otel.followed(EventLog('manager', logging.getLogger('torchft_like')))\n"
        "log.emit('commit', committed=True, participants=2, replica_id='the-replica')\n"
        "otel.setup_logger('torchft_commits'); otel.shutdown()\n"
    )
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TORCHFT_USE_OTEL": "true",
        "TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON": str(attributes),
        "OTEL_EXPORTER_OTLP_ENDPOINT": address,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    sent = came.get(timeout=LIMIT_S)
    assert all(word in sent for word in (b"commit_result", b"the-replica", b"t9"))
    assert "commit_result" in done.stdout
