"""The harness of the drop-in tests: what it concludes from records."""

from __future__ import annotations

from tests.dropin.evidence import Record, common_steps, differences
from tests.dropin.scripts import SCRIPTS
from tests.dropin.table import PAGE, page


def record(replica: str, step: int, digest: str = "d", rank: int = 0) -> Record:
    return Record(float(step), 1, rank, replica, step, digest)


def test_only_steps_of_every_rank_of_all_replicas_are_common() -> None:
    records = [
        record(replica, step, rank=rank) for replica in ("a:1", "b:2") for step in (1, 2) for rank in (0, 1)
    ]
    records += [record("a:1", 3, rank=0), record("a:1", 3, rank=1), record("b:2", 3, rank=0)]
    assert common_steps(records, ["a:1", "b:2"], ranks=2) == [1, 2]


def test_ranks_of_one_number_must_agree_and_others_need_not() -> None:
    agreed = [record("a:1", 1, "x", rank=0), record("a:1", 1, "y", rank=1), record("b:2", 1, "x", rank=0)]
    assert differences(agreed) == []
    assert differences([*agreed, record("b:2", 1, "x", rank=1)]) == [
        "rank 1 after step 1: {'a:1': 'y', 'b:2': 'x'}"
    ]


def test_a_script_is_run_or_says_why_not() -> None:
    assert [script.name for script in SCRIPTS if bool(script.command) is bool(script.not_run)] == []


def test_the_page_is_made_from_the_results() -> None:
    assert PAGE.read_text() == page(), "run `make dropin` with --save, or tests.dropin.table.page"
