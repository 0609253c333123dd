"""A variable that is misspelt is said, with the name that is meant, and no other is."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path

import pytest

from lighthouse import cli, variables
from lighthouse.variables import KNOWN, PREFIX, about_variables
from torchft_like.errors import ConfigError
from torchft_like.manager import Manager
from torchft_like.process_group import ProcessGroupDummy

ROOT = Path(__file__).parents[3]


def test_the_list_has_every_variable_of_the_sources_and_no_other() -> None:
    files = [path for folder in ("lighthouse", "torchft_like") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    named = {name for path in files for name in re.findall(r"\bTORCHFT_([A-Z_]*[A-Z])\b", path.read_text())}
    assert list(KNOWN) == sorted(named)
    assert about_variables({PREFIX + name: "1" for name in KNOWN}) == ""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CONECT_TIMEOUT_SEC", "CONNECT_TIMEOUT_SEC"),
        ("TIMEOUT_S", "TIMEOUT_SEC"),
        ("LIGHTHOUSE_ADDR", "LIGHTHOUSE"),
        ("TSL", "TLS"),
    ],
)
def test_one_that_is_like_another_is_named_with_it(name: str, meant: str) -> None:
    said = about_variables({PREFIX + name: "1", "PATH": "/bin", "TORCHFT_MODEL": "my own"})
    assert said == f"nothing reads the environment variable TORCHFT_{name}: TORCHFT_{meant} is meant, perhaps"


def test_what_kubernetes_says_of_a_service_is_not_misspelt() -> None:
    said = {
        "TORCHFT_LIGHTHOUSE_SERVICE_HOST": "10.0.0.1",
        "TORCHFT_LIGHTHOUSE_SERVICE_PORT_GRPC": "29510",
        "TORCHFT_LIGHTHOUSE_PORT": "tcp://10.0.0.1:29510",
        "TORCHFT_LIGHTHOUSE_PORT_29510_TCP_ADDR": "10.0.0.1",
    }
    assert about_variables(said) == ""
    assert "LIGHTHOUSE_PORT" in about_variables({"TORCHFT_LIGHTHOUSE_PORT": "29510"})


def test_one_that_is_like_another_which_is_set_is_a_scripts_own() -> None:
    own = {"TORCHFT_LIGHTHOUSE_PORT": "29510", "TORCHFT_LIGHTHOUSE_HOST": "trainer-3"}
    assert about_variables(own) != ""
    assert about_variables(own | {"TORCHFT_LIGHTHOUSE": "trainer-3:29510"}) == ""


def test_a_trainer_and_a_lighthouse_warn_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOSE", "127.0.0.1:1")
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)

    def start_manager() -> None:
        with pytest.raises(ConfigError, match="no lighthouse"):
            Manager(pg=ProcessGroupDummy(0, 1), load_state_dict=None, state_dict=None, min_replica_size=1)

    def start_lighthouse() -> None:
        assert cli.main(["--bind", f"127.0.0.1:{taken.getsockname()[1]}"]) == 2

    with socket.create_server(("127.0.0.1", 0)) as taken:
        for start in (start_manager, start_lighthouse):
            monkeypatch.setattr(variables, "_warned", set())
            caplog.clear()
            for _ in range(2):
                start()
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            assert "TORCHFT_LIGHTHOSE: TORCHFT_LIGHTHOUSE is meant" in record.getMessage()
