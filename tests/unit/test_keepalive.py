"""How patient a process is with its connections."""

from __future__ import annotations

import pytest

from lighthouse.errors import ConfigError
from lighthouse.net import Keepalive, default_keepalive


def test_a_connection_is_given_up_within_a_second_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_keepalive() == Keepalive(500, 500)
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIMEOUT_MS", "5000")
    assert default_keepalive() == Keepalive(500, 5000)
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIME_MS", "")
    assert default_keepalive() == Keepalive(500, 5000)


@pytest.mark.parametrize("text", ["soon", "0.5", "-1", "9"])
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIME_MS", text)
    with pytest.raises(ConfigError, match=f"TORCHFT_KEEPALIVE_TIME_MS is '{text}': it must be"):
        default_keepalive()
