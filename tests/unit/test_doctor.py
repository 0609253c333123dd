"""What the doctor finds, and what it says about it."""

from __future__ import annotations

import json
import sys
from email.message import Message
from pathlib import Path

import pytest

from lighthouse.address import Address
from lighthouse.core.trust import Role, make_texts
from lighthouse.page.cli import Pages
from lighthouse.tls import TLS_ENV
from lighthouse.trust import TOKEN_ENV, TOKEN_FILE_ENV
from tests.certificates import certify
from torchft_like import doctor
from torchft_like.cli import main
from torchft_like.coordination import LighthouseServer
from torchft_like.doctor import DOUBTFUL, OK, WRONG, Finding

CHECKS = [
    "versions",
    "forks",
    "interfaces",
    "open files",
    "processes",
    "shared memory",
    "secrets",
    "variables",
    "settings",
    "lighthouse",
    "clock",
]
AFAR = Address("10.1.2.3", 29510)


@pytest.mark.parametrize(
    ("finding", "state", "says"),
    [
        (doctor.about_forks({}), OK, ""),
        (doctor.about_forks({"GRPC_ENABLE_FORK_SUPPORT": "1"}), WRONG, "unset GRPC_ENABLE_FORK_SUPPORT"),
        (doctor.about_interfaces({}, {"lo"}), OK, ""),
        (doctor.about_interfaces({"NCCL_SOCKET_IFNAME": "eth"}, {"lo", "eth0"}), OK, ""),
        (doctor.about_interfaces({"NCCL_SOCKET_IFNAME": "^docker"}, {"lo", "eth0"}), OK, ""),
        (doctor.about_interfaces({"GLOO_SOCKET_IFNAME": "ib0"}, {"lo", "eth0"}), WRONG, "one of eth0, lo"),
        (doctor.about_interfaces({"NCCL_SOCKET_IFNAME": "=eth"}, {"lo", "eth0"}), WRONG, "one of eth0, lo"),
        (doctor.about_interfaces({"GLOO_SOCKET_IFNAME": "eth"}, {"lo", "eth0"}), WRONG, "one of eth0, lo"),
        (doctor.about_files((-1, -1)), OK, ""),
        (doctor.about_files((512, 65536)), DOUBTFUL, "ulimit -n 65536"),
        (doctor.about_files((512, 512)), DOUBTFUL, "raise the hard limit"),
        (doctor.about_processes(-1, -1), OK, ""),
        (doctor.about_processes(99999, 100), DOUBTFUL, "pids.max"),
        (doctor.about_processes(100, 99999), DOUBTFUL, "ulimit -u"),
        (doctor.about_shared_memory(64 << 20), DOUBTFUL, "--shm-size"),
        (doctor.about_shared_memory(8 << 30), OK, ""),
        (doctor.about_secrets(False, False, []), DOUBTFUL, "torchft-like keys"),
        (doctor.about_secrets(True, True, []), OK, ""),
        (doctor.about_secrets(True, True, ["/a/tls.key"]), WRONG, "chmod 600 /a/tls.key"),
        (doctor.about_secrets(True, True, [], "it has expired"), WRONG, "torchft-like keys"),
        (doctor.about_names({"TORCHFT_TIMEOUT_SEC": "5"}), OK, ""),
        (doctor.about_names({"TORCHFT_TIMEOUT_S": "5"}), DOUBTFUL, "misspelt"),
        (doctor.about_host("127.0.0.1", AFAR), WRONG, "TORCHFT_HOSTNAME"),
        (doctor.about_host("10.1.2.4", AFAR), OK, ""),
        (doctor.about_host("127.0.0.1", Address("localhost", 1)), OK, ""),
        (doctor.about_clock(-30.0, 0.1), DOUBTFUL, "chrony"),
        (doctor.about_clock(1.5, 1.0), OK, ""),
        (doctor.about_answer("INVALID_ARGUMENT", 0.001), OK, ""),
        (doctor.about_answer("INVALID_ARGUMENT", 3.0), DOUBTFUL, "far away"),
        (doctor.about_answer("PERMISSION_DENIED", 0.001), WRONG, "TORCHFT_TOKEN_FILE"),
        (doctor.about_answer("UNAVAILABLE", 0.001, "connection refused"), WRONG, "TORCHFT_TLS"),
    ],
)
def test_what_is_not_as_it_should_be_comes_with_what_to_change(
    finding: Finding, state: str, says: str
) -> None:
    assert finding.state == state
    assert says in finding.cure
    assert bool(finding.cure) == (state != OK)


@pytest.fixture(autouse=True)
def participant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process has what it needs; and a port of its own would be none of a job that runs beside it."""
    path = tmp_path / "participate"
    path.write_text(make_texts()[Role.PARTICIPATE])
    path.chmod(0o600)
    monkeypatch.setenv(TOKEN_FILE_ENV, str(path))
    monkeypatch.setenv(TLS_ENV, str(certify(tmp_path / "tls")))
    for file in (tmp_path / "tls").iterdir():
        file.chmod(0o600)
    return path


def states(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    status = main(["doctor", "--json", *arguments])
    return status, {found["check"]: found["state"] for found in json.loads(capsys.readouterr().out)}


def test_a_host_beside_its_lighthouse_lacks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    server = LighthouseServer(min_replicas=1)
    try:
        status, found = states(capsys, server.address())
        assert list(found) == CHECKS
        assert status == 0
        assert (found["secrets"], found["settings"], found["lighthouse"]) == (OK, OK, OK)
        assert "no replica" in server.describe() or "nobody" in server.describe()
    finally:
        server.shutdown()


def test_where_something_is_wrong_the_rest_is_looked_at(
    capsys: pytest.CaptureFixture[str], participant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    participant.chmod(0o644)
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "soon")
    status, found = states(capsys, "127.0.0.1:1")
    assert (status, list(found)) == (1, CHECKS)
    assert (found["secrets"], found["settings"], found["lighthouse"]) == (WRONG, WRONG, WRONG)
    monkeypatch.setenv(TOKEN_ENV, "x" * 64)
    assert main(["doctor", "127.0.0.1:1"]) == 1
    printed = capsys.readouterr().out
    assert "are both set: leave one out" in printed
    assert "TORCHFT_TIMEOUT_SEC is 'soon'" in printed
    assert "x" * 64 not in printed


def test_where_a_package_is_missing_the_rest_is_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)  # so that importing it fails
    _, found = states(capsys, "127.0.0.1:1")
    assert (list(found), found["lighthouse"]) == (CHECKS, WRONG)


def test_why_a_lighthouse_does_not_answer_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "127.0.0.1:1"]) == 1
    assert "no answer: UNAVAILABLE (" in (printed := capsys.readouterr().out)
    assert "refused" in printed


def test_a_lighthouse_that_does_not_tell_its_time_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pages, "fetch", lambda _: ({}, Message()))
    assert doctor._clock("127.0.0.1:1").state == DOUBTFUL
