"""Settings: TORCHFT_* variable, argument, launcher's variable, default; a clear error for each wrong one."""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from typing import Any

import pytest

from lighthouse.address import Address
from torchft_like.errors import AddressError, ConfigError
from torchft_like.manager import Manager, get_timeout
from torchft_like.manager.config import ManagerArguments, ManagerConfig, resolve
from torchft_like.process_group import ProcessGroupDummy
from torchft_like.runtime.hosts import own_host

LIGHTHOUSE = {"TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1234"}


def config(environ: dict[str, str] | None = None, **arguments: Any) -> ManagerConfig:
    return resolve(ManagerArguments(**arguments), {**LIGHTHOUSE, **(environ or {})})


def test_a_single_process_needs_nothing_but_the_lighthouse() -> None:
    resolved = config()
    assert (resolved.group_rank, resolved.group_world_size, resolved.store) == (0, 1, None)
    assert resolved.lighthouse == Address("127.0.0.1", 1234)
    assert resolved.host == "127.0.0.1", "a loopback lighthouse means a loopback job"
    assert (resolved.timeout_s, resolved.quorum_timeout_s, resolved.connect_timeout_s) == (60, 180, 60)
    assert resolved.given_timeout_s is None


def test_the_environment_of_torchrun_is_understood() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "77"}
    resolved = config(environ)
    assert (resolved.group_rank, resolved.group_world_size) == (1, 2)
    assert resolved.store == Address("127.0.0.1", 77)
    assert resolved.lighthouse is None, "only rank 0 speaks to it"


def test_a_torchft_variable_beats_the_argument() -> None:
    environ = {
        "TORCHFT_TIMEOUT_SEC": "5",
        "TORCHFT_QUORUM_TIMEOUT_SEC": "6",
        "TORCHFT_CONNECT_TIMEOUT_SEC": "7",
        "TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1",
        "TORCHFT_MANAGER_PORT": "9",
        "TORCHFT_QUORUM_RETRIES": "3",
        "TORCHFT_SPARE": "0",
    }
    other = timedelta(seconds=99)
    arguments = {"timeout": other, "quorum_timeout": other, "connect_timeout": other, "port": 10}
    resolved = config(environ, lighthouse_addr="127.0.0.1:2", quorum_retries=1, spare=True, **arguments)
    assert (resolved.timeout_s, resolved.quorum_timeout_s, resolved.connect_timeout_s) == (5, 6, 7)
    assert resolved.lighthouse == Address("127.0.0.1", 1)
    assert (resolved.port, resolved.quorum_retries, resolved.spare) == (9, 3, False)
    assert resolved.given_timeout_s is not None


@pytest.mark.parametrize("name", ["127.0.0.1", "lo"])
def test_the_offered_address_is_a_name_or_that_of_an_interface(name: str) -> None:
    assert config({"TORCHFT_HOSTNAME": name}, hostname="elsewhere").host == "127.0.0.1"
    assert config(hostname=name).host == "127.0.0.1"
    assert config(hostname="localhost").host == "localhost"


def test_an_argument_counts_where_the_operator_says_nothing() -> None:
    for environ in ({}, {"TORCHFT_TIMEOUT_SEC": "", "TORCHFT_MANAGER_PORT": ""}):
        resolved = config(environ, timeout=timedelta(seconds=7), port=10)
        assert (resolved.timeout_s, resolved.port) == (7, 10)
    blank = resolve(ManagerArguments(lighthouse_addr="127.0.0.1:2"), {"TORCHFT_LIGHTHOUSE": ""})
    assert blank.lighthouse == Address("127.0.0.1", 2)


def test_an_argument_beats_the_variables_of_the_launcher() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "77"}
    resolved = config(environ, rank=2, world_size=3, store_addr="127.0.0.2", store_port=78)
    assert (resolved.group_rank, resolved.group_world_size) == (2, 3)
    assert resolved.store == Address("127.0.0.2", 78)


def test_where_each_setting_came_from_is_told() -> None:
    told = config({"TORCHFT_TIMEOUT_SEC": "5", "RANK": "0"}, timeout=7, port=10).sources
    assert "timeout=5.0 (TORCHFT_TIMEOUT_SEC instead of the argument 7.0)" in told
    assert "quorum_timeout=180.0 (default)" in told
    assert "port=10 (argument)" in told
    assert "rank=0 (RANK)" in told
    assert "lighthouse_addr=http://127.0.0.1:1234 (TORCHFT_LIGHTHOUSE)" in told


def test_each_start_has_an_id_of_its_own() -> None:
    first, second = config(replica_id="r"), config(replica_id="r")
    assert first.replica_id.startswith("r:")
    assert first.replica_id != second.replica_id


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"TORCHFT_TIMEOUT_SEC": "soon"}, "TORCHFT_TIMEOUT_SEC is 'soon'"),
        ({"TORCHFT_QUORUM_TIMEOUT_SEC": "-1"}, "TORCHFT_QUORUM_TIMEOUT_SEC"),
        ({"TORCHFT_CONNECT_TIMEOUT_SEC": "nan"}, "TORCHFT_CONNECT_TIMEOUT_SEC"),
        ({"TORCHFT_MANAGER_PORT": "http"}, "TORCHFT_MANAGER_PORT is 'http'"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"rank \(RANK\) is 2"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "77"}, "set RANK"),
        ({"TORCHFT_QUORUM_RETRIES": "x"}, "TORCHFT_QUORUM_RETRIES"),
        ({"TORCHFT_LIGHTHOUSE": ""}, "TORCHFT_LIGHTHOUSE"),
    ],
)
def test_a_wrong_variable_is_named(environ: dict[str, str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        config(environ)


def test_an_address_that_asks_for_tls_is_refused_to_a_process_without_a_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"TORCHFT_LIGHTHOUSE": "https://127.0.0.1:1234"}
    monkeypatch.delenv("TORCHFT_TLS", raising=False)
    with pytest.raises(AddressError, match=r"TORCHFT_LIGHTHOUSE.*https.*: set TORCHFT_TLS"):
        config(given)
    monkeypatch.setenv("TORCHFT_TLS", "/secrets/tls")
    assert config(given).lighthouse == config(LIGHTHOUSE).lighthouse


def test_a_host_to_which_nothing_leads_comes_with_its_variable() -> None:
    with pytest.raises(AddressError, match=r"TORCHFT_LIGHTHOUSE.*'no-such-host.invalid'"):
        config({"TORCHFT_LIGHTHOUSE": "no-such-host.invalid:1"})
    elsewhere = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "7"}
    with pytest.raises(AddressError, match=r"MASTER_ADDR.*'no-such-host.invalid'"):
        config(elsewhere)


def test_a_malformed_lighthouse_address_is_shown() -> None:
    with pytest.raises(AddressError, match=r"TORCHFT_LIGHTHOUSE.*'localhost'"):
        config({"TORCHFT_LIGHTHOUSE": "localhost"})


@pytest.mark.parametrize("name", ["no.such.invalid", "192.0.2.1", "two words"])
def test_a_host_on_which_nothing_can_listen_here_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    complaint = rf"TORCHFT_HOSTNAME\)? is '{name}'.* one of its interfaces, .*\blo\b"
    with pytest.raises(AddressError, match=complaint):
        config({"TORCHFT_HOSTNAME": name})
    monkeypatch.setenv("TORCHFT_HOSTNAME", name)
    with pytest.raises(AddressError, match=complaint):
        own_host()


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(ConfigError, match="timeout is 0"):
        config(timeout=0)
    with pytest.raises(ConfigError, match=r"port \(TORCHFT_MANAGER_PORT\) is '80'"):
        config(port="80")


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_replica_size": "2"},
        {"min_replica_size": None},
        {"min_replica_size": -1},
        {"min_replica_size": 1.5},
        {"max_retries": -1},
        {"max_retries": "3"},
        {"quorum_retries": -1},
        {"world_size_mode": "FIXED_WITH_SPARES"},
        {"world_size_mode": 1},
    ],
    ids=str,
)
def test_a_manager_refuses_a_wrong_number_before_it_meets_anybody(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    given: dict[str, Any] = {"min_replica_size": 1, "lighthouse_addr": "127.0.0.1:1", "connect_timeout": 1}
    with pytest.raises(ConfigError, match=rf"{name}( \(.*\))? is {value!r}: it must be"):
        Manager(ProcessGroupDummy(0, 1), None, None, **{**given, **wrong})


@pytest.mark.parametrize(
    ("variable", "text", "complaint"),
    [
        ("TORCHFT_MANAGER_PORT", "70000", r"port \(TORCHFT_MANAGER_PORT\) is 70000"),
        ("TORCHFT_WATCHDOG_TIMEOUT_SEC", "soon", "TORCHFT_WATCHDOG_TIMEOUT_SEC is 'soon'"),
    ],
)
def test_a_manager_names_the_variable_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, complaint: str
) -> None:
    monkeypatch.setenv(variable, text)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=complaint):
        Manager(ProcessGroupDummy(0, 1), None, None, min_replica_size=1, connect_timeout=1)


def test_the_helper_of_torchft_takes_the_variable_or_the_default() -> None:
    default = timedelta(seconds=9)
    assert get_timeout("5", default) == timedelta(seconds=5)
    assert get_timeout(None, default) == default
    with pytest.raises(ConfigError, match="'soon'"):
        get_timeout("soon", default)


def test_a_limit_of_open_files_that_is_too_low_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    most = len(os.listdir("/proc/self/fd")) + 40
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    with pytest.raises(ConfigError, match=rf"may open {most} files, .*ulimit -n"):
        config()
