"""The harness itself: a test that fails says why, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from torchft_like.testing.faults import Fault
from torchft_like.testing.journal import Journal, JournalReader

pytestmark = pytest.mark.integration


def test_a_wait_that_fails_shows_the_logs_and_ends_the_lighthouse(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with pytest.raises(AssertionError, match=r"(?s)not within.*: never.*lighthouse listening on"), cluster:
        cluster.wait_until(lambda: False, "never", limit_s=0.1)
    assert cluster.lighthouse.is_gone


def test_a_process_that_ends_without_a_reason_fails_the_test(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.lighthouse.kill()
        cluster.lighthouse.may_end = False
        with pytest.raises(AssertionError, match=r"lighthouse.*ended with -9"):
            cluster.check()
        cluster.lighthouse.may_end = True


def test_a_reader_leaves_a_line_that_is_still_being_written_for_later(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader = JournalReader(path)
    assert reader.records() == []
    Journal(str(path)).write("commit", step=1)
    whole = path.read_text()
    path.write_text(whole + whole[:10])
    assert [record["step"] for record in reader.records("commit")] == [1]
    path.write_text(whole * 2)
    assert [record["step"] for record in reader.records("commit")] == [1, 1]
    assert reader.records("fault") == []


def test_a_triggered_fault_strikes_one_process_only(tmp_path: Path) -> None:
    trigger = tmp_path / "trigger"
    fault = Fault.parse(f"kill@heal@{trigger}")
    assert (fault.act, fault.place) == ("kill", "heal")
    assert not fault.is_triggered()
    trigger.touch()
    assert [fault.is_triggered(), fault.is_triggered()] == [True, False]


@pytest.mark.parametrize("text", ["kill", "kill@somewhere", "sleep@heal", "kill@heal@"])
def test_a_fault_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not act@place"):
        Fault.parse(text)
