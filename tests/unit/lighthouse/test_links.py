"""Whom a quorum leaves out for links that do not work."""

from __future__ import annotations

import time

import pytest

from lighthouse.core.decisions import Member
from lighthouse.core.left_out import REPORTED_MAX, Links, leave_out

pytestmark = pytest.mark.progress


def members(*replica_ids: str) -> dict[str, Member]:
    return {i: Member(i) for i in replica_ids}


def test_a_link_counts_while_one_of_its_ends_reports_it() -> None:
    links = Links()
    links.report("b", ["a", "b", "nobody"])
    links.report("a", ["b"])
    assert links.among("abc") == (("a", "b"),)
    links.report("b", [])
    assert links.among("abc") == (("a", "b"),)
    assert links.among("bc") == ()
    links.report("a", [])
    assert not links


def test_what_was_said_of_a_process_is_not_said_of_the_next_one() -> None:
    links = Links()
    links.report("a", ["b", "c"])
    links.report("b", ["c"])
    links.report("c", ["a"])
    links.forget_about("c")
    assert links.among("abc") == (("a", "b"), ("a", "c"))
    links.report("c", [])
    links.forget_about("b")
    assert not links


def test_whoever_reports_everybody_costs_little_and_goes_itself() -> None:
    ids = [f"{n:05}" for n in range(10_000)]
    links = Links()
    links.report(ids[0], ids)
    found = links.among(set(ids))
    assert len(found) == REPORTED_MAX - 1
    assert leave_out(members(*ids), found, 5_001) == {ids[0]}


def test_ten_thousand_who_report_all_they_may_are_decided_in_time() -> None:
    ids = [f"{n:05}" for n in range(10_000)]
    links = Links()
    for n, replica_id in enumerate(ids):
        links.report(replica_id, [ids[(n + k) % len(ids)] for k in range(1, REPORTED_MAX + 1)])
    began = time.process_time()
    leave_out(members(*ids), links.among(set(ids)), 1)
    assert time.process_time() - began < 60
