"""The page in a real browser, with a real job: what an operator sees, and a kill by keyboard."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.browser import Browser, needs_chromium
from tests.integration.cluster import CHECKED, Cluster
from tests.integration.lighthouse_clients import registered

pytestmark = [pytest.mark.integration, needs_chromium(), *CHECKED]

HOSTILE = "<img src=x onerror=window.hacked=1><b>x</b>"


def test_an_operator_sees_the_job_and_kills_a_replica_by_keyboard(tmp_path: Path) -> None:
    with Browser() as browser, Cluster(tmp_path, lighthouse_flags=["--page=127.0.0.1:0"]) as cluster:
        page = re.findall(r"lighthouse page on (\S+)", cluster.lighthouse.output)[0]
        browser.open(page)
        browser.wait_for("document.title.startsWith('No quorum yet')")
        a, b = cluster.start_all("ab")
        browser.wait_for("document.title.startsWith('Training: a quorum of 2')")
        step = browser.wait_for("Number(document.getElementById('step').textContent)")
        browser.wait_for(f"Number(document.getElementById('step').textContent) > {step}")
        assert browser.run("return document.querySelectorAll('#replicas .pill.good').length") == 2

        with registered(cluster.lighthouse_address.removeprefix("http://"), HOSTILE):
            names = "[...document.querySelectorAll('#replicas td:first-child')].map(td => td.title)"
            assert browser.wait_for(f"{names}.find(name => name.includes('<'))") == HOSTILE
            assert browser.run("return [window.hacked ?? null, document.images.length]") == [None, 0]

        victim = browser.wait_for("document.querySelector('#replicas tr:has(.pill.good) td').title")
        browser.run("document.querySelector('#replicas tr:has(.pill.good) button').focus()")
        browser.press("enter", "escape")
        assert browser.run("return document.getElementById('ask').open") is False
        browser.press("enter", "tab", "enter")
        browser.wait_for("!document.getElementById('ask').open")
        killed, other = (a, b) if a.replica_id == victim else (b, a)
        for rank in killed.ranks:
            rank.may_end = True
        cluster.wait_until(lambda: killed.ranks[0].exit_code is not None, "the end of the killed replica")
        cluster.wait_for_quorum_of(other)
        browser.wait_for("document.querySelector('#timeline .bad')?.textContent === 'loss'")
        browser.wait_for("document.querySelector('#recoveries td.number')?.textContent.endsWith(' s')")
        assert browser.run("return document.querySelector('#timeline').textContent.includes('is killed')")
