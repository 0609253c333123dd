"""What a package index shows: it has no files of ours beside it, so nothing on the page leads to one."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / PROJECT["readme"]).read_text()


def test_every_link_and_picture_is_absolute() -> None:
    targets = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", PAGE)
    assert [target for target in targets if not "".join(target).startswith("https://")] == []


@pytest.mark.parametrize("extra", re.findall(r"torchft-like\[(\w+)\]", PAGE))
def test_an_extra_that_is_named_exists(extra: str) -> None:
    assert extra in PROJECT["optional-dependencies"]


def test_the_versions_of_torch_are_those_that_are_required() -> None:
    (bounds,) = (each for each in PROJECT["dependencies"] if each.startswith("torch>"))
    first, beyond = re.findall(r"2\.(\d+)", bounds)
    assert f"torch 2.{first} to 2.{int(beyond) - 1}" in PAGE
