"""Whom a quorum leaves out for links that do not work."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.core.decisions import Link, Member
from lighthouse.core.links import REPORTED_MAX, Links, leave_out

pytestmark = pytest.mark.progress

NAMES = "abcdefgh"
MEMBERS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 2), min_size=1).map(
    lambda steps: {i: Member(i, step=step) for i, step in steps.items()}
)


def members(*replica_ids: str) -> dict[str, Member]:
    return {i: Member(i) for i in replica_ids}


def links_of(data: st.DataObject, of: dict[str, Member]) -> list[Link]:
    pairs = list(combinations(sorted(of), 2))
    return data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []


def fewest(of: dict[str, Member], links: list[Link]) -> int:
    """How few can be left out, found by trying."""
    return next(
        count
        for count in range(len(of) + 1)
        for out in combinations(sorted(of), count)
        if all(set(link) & set(out) for link in links)
    )


@given(MEMBERS, st.data())
def test_no_link_is_left_and_one_that_is_ahead_stays(of: dict[str, Member], data: st.DataObject) -> None:
    links = links_of(data, of)
    out = leave_out(of, links, at_least=1)
    newest = max(member.step for member in of.values())
    assert out < of.keys()
    assert all(out & set(link) for link in links)
    assert any(of[i].step == newest for i in of.keys() - out)
    assert all(any(i in link for link in links) for i in out)


@given(MEMBERS, st.data())
def test_the_answer_depends_on_no_order(of: dict[str, Member], data: st.DataObject) -> None:
    links = links_of(data, of)
    other = dict(reversed(of.items()))
    assert leave_out(of, links, 1) == leave_out(other, data.draw(st.permutations(links)), 1)


@given(st.integers(1, 7), st.integers(1, 7))
def test_of_two_halves_the_smaller_one_is_left_out(left: int, right: int) -> None:
    ids = [f"{n:02}" for n in range(left + right)]
    links = [(a, b) for a in ids[:left] for b in ids[left:]]
    assert len(leave_out(members(*ids), links, 1)) == min(left, right) == fewest(members(*ids), links)


@given(st.sampled_from(NAMES))
def test_a_host_that_nobody_reaches_is_left_out_alone(host: str) -> None:
    links = [(min(host, other), max(host, other)) for other in NAMES if other != host]
    assert leave_out(members(*NAMES), links, 1) == {host}


def test_nobody_is_left_out_where_too_few_would_stay() -> None:
    assert leave_out(members(*"abc"), [("a", "b")], at_least=2) == {"b"}
    assert leave_out(members(*"abc"), [("a", "b")], at_least=3) == frozenset()


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
