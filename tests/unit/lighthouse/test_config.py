"""Settings are checked when they are made, and errors name the flag and the value."""

from __future__ import annotations

import pytest

from lighthouse import net
from lighthouse.cli import main
from lighthouse.core.config import LighthouseConfig
from lighthouse.errors import ConfigError
from lighthouse.trust import INSECURE_ENV


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("min_replicas", 0),
        ("min_replicas", True),
        ("join_timeout_ms", -1),
        ("join_timeout_ms", 1.5),
        ("heartbeat_timeout_ms", "5000"),
        ("keepalive_time_ms", 0),
        ("reconnect_grace_ms", None),
        ("start_grace_ms", -1),
    ],
)
def test_a_bad_setting_is_an_error_that_names_flag_and_value(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--{setting} {value!r} is not"):
        LighthouseConfig(**{setting: value})  # type: ignore[arg-type]


def test_a_quorum_that_could_never_form_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--min_replicas 11 is more than --replicas_max 10"):
        LighthouseConfig(min_replicas=11, replicas_max=10)


def test_a_time_of_zero_is_allowed_where_it_means_at_once() -> None:
    assert LighthouseConfig(join_timeout_ms=0, reconnect_grace_ms=0).join_timeout_ms == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--bnd", "127.0.0.1:0"], "unrecognized arguments: --bnd"),
        (["--bin", "127.0.0.1:0"], "unrecognized arguments: --bin"),
        (["--bind", "somewhere"], "--bind 'somewhere' is not host:port"),
        (["--bind", "127.0.0.1:70000"], "--bind '127.0.0.1:70000' is not host:port"),
        (["--min_replicas", "two"], "invalid int value: 'two'"),
        (["--min-replicas", "0"], "--min_replicas 0 is not between 1 and"),
        (["--min_replicas"], "expected one argument"),
        (["--log-level", "LOUD"], "invalid choice: 'LOUD'"),
        (["--bind", "0.0.0.0:0"], "0.0.0.0:0 asks for no token and no certificate"),
        (["--page", "[::]:0"], "[::]:0 asks for no token and no certificate"),
        (["--bind", "192.0.2.1:1", "--insecure"], "cannot listen on 192.0.2.1:1: "),
        (["--replicas_max", "401"], "may open 656 files, and --replicas_max 401 needs 657"),
        (
            ["--min_replicas", "401"],
            "and --replicas_max 10000 needs 10256",
        ),
    ],
)
def test_a_bad_argument_is_one_line_and_status_2(
    arguments: list[str], complaint: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if " needs " in complaint:
        monkeypatch.setattr(net, "allow_many_files", lambda: 656)
    monkeypatch.setenv(INSECURE_ENV, "")
    assert main(arguments) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert complaint in error
    assert error.count("\n") == 1
