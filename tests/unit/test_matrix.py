"""The page of versions is what `make matrix` found, and pyproject.toml claims no more than that."""

from __future__ import annotations

import re
import tomllib

import pytest

from tools.environments import CONSTRAINTS, ROOT
from tools.matrix import PAGE, ROWS, Row, page, saved, verdict_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPORT = """<testsuites><testsuite>
<testcase classname="a" name="good"/><testcase classname="a" name="bad"><failure/></testcase>
<testcase classname="a" name="broken"><error/></testcase>
<testcase classname="a" name="not"><skipped/></testcase>
</testsuite></testsuites>"""


def versions_of(row: Row) -> dict[str, str]:
    """What a row pins, over constraints.txt."""
    lines = [*CONSTRAINTS.read_text().splitlines(), *row.pins]
    return dict(line.split("==") for line in lines if "==" in line)


def series(version: str, places: int) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:places])


def test_the_page_is_made_from_the_results() -> None:
    assert PAGE.read_text() == page(), "run `python -m tools.matrix --save`, or matrix.page"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_shown_of_a_row_is_of_the_versions_that_it_names_and_good(row: Row) -> None:
    if (outcome := saved().get(row.name)) is None:
        pytest.skip("the page says that it was not run yet")
    named = {"torch", "protobuf"} | {pin.partition("==")[0] for pin in row.pins}
    for name in named & set(outcome.versions):
        assert outcome.versions[name].partition("+")[0] == versions_of(row)[name]
    assert series(outcome.python, 2) == series(row.python, 2)
    assert [name for name, verdict in outcome.suites.items() if not verdict.is_good] == []


@pytest.mark.parametrize("dependency", PROJECT["dependencies"])
def test_a_dependency_is_bounded_by_what_was_tested(dependency: str) -> None:
    name = re.split("[<>=]", dependency)[0]
    tested = [versions_of(row)[name] for row in ROWS]
    (lower,) = re.findall(r">=([\d.]+)", dependency)
    oldest = min(tested, key=lambda version: series(version, 3))
    assert series(oldest, lower.count(".") + 1) == series(lower, 3)
    for upper in re.findall(r"<([\d.]+)", dependency):
        *above, last = series(upper, 3)
        newest = max(tested, key=lambda version: series(version, 3))
        assert series(newest, len(above) + 1) == (*above, last - 1)


def test_pythons_are_those_of_the_rows() -> None:
    said = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    tested = {row.python for row in ROWS}
    assert set(said) == tested
    assert PROJECT["requires-python"] == f">={min(tested, key=lambda version: series(version, 2))}"


def test_a_row_has_what_the_tests_import_and_nothing_that_only_reads_sources() -> None:
    packages = ROWS[0].environment().packages
    assert {"torch", "grpcio", "pytest", "hypothesis", "rich"} <= set(packages)
    assert not {"mypy", "ruff", "types-psutil", "grpcio-tools"} & set(packages)


def test_a_report_is_counted_and_none_at_all_is_a_suite_that_was_ended() -> None:
    verdict = verdict_of(REPORT, 1.0)
    assert (verdict.passed, verdict.skipped, verdict.failed) == (1, 1, ["a::bad", "a::broken"])
    assert not verdict.is_good
    assert verdict_of("", 1.0).cut_off
    assert not verdict_of("", 1.0).is_good
    assert not verdict_of("<testsuites/>", 1.0).is_good, "no test ran"
