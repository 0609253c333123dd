"""The page of torchft's names is that of the present code, and says of no name what is not so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools import torchft_names
from tools.torchft_names import COMMAND, NAMES, PAGE, page, rows


def test_the_page_is_current() -> None:
    assert page() == PAGE.read_text(), f"run {COMMAND}"


def peer(**names: list[str] | None) -> dict[str, Any]:
    of_manager = {f"torchft.manager.{name}": parameters for name, parameters in names.items()}
    return {"modules": ["torchft.manager"], "names": of_manager, "environment": [], "commands": []}


@pytest.mark.parametrize(
    ("theirs", "verdict", "remark"),
    [
        (["timeout_sec_env", "default_timeout_sec"], "have", ""),
        (
            ["default_timeout_sec", "timeout_sec_env"],
            "differs",
            "another place: `default_timeout_sec`, `timeout_",
        ),
        (["timeout_sec_env", "more"], "differs", "no `more`: because"),
        (None, "have", ""),
    ],
)
def test_a_signature_is_compared(
    monkeypatch: pytest.MonkeyPatch, theirs: list[str] | None, verdict: str, remark: str
) -> None:
    reasons = {} if verdict == "have" else {"torchft.manager.get_timeout": "because"}
    monkeypatch.setattr(torchft_names, "REASONS", reasons)
    (row,) = rows({"1": peer(get_timeout=theirs)})
    assert row.verdict == verdict
    assert row.remark.startswith(remark)


def test_a_name_that_is_missing_needs_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft_names, "REASONS", {})
    with pytest.raises(LookupError, match=r"REASONS has nothing for torchft\.manager\.gone"):
        rows({"1": peer(gone=[])})


def test_a_reason_needs_a_name_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft_names, "REASONS", {"torchft.manager.Manager": "because"})
    with pytest.raises(LookupError, match="for nothing that is missing"):
        rows({"1": peer(Manager=None)})


def test_every_version_has_the_names_that_scripts_use() -> None:
    for version in json.loads(NAMES.read_text()).values():
        assert {"torchft.Manager", "torchft.manager.Manager.should_commit"} <= set(version["names"])
        assert "pg" in version["names"]["torchft.manager.Manager"]
        assert "timeout" in version["names"]["torchft.coordination.LighthouseClient.quorum"]
        assert "TORCHFT_LIGHTHOUSE" in version["environment"]
        assert version["commands"] == ["torchft_lighthouse"]
