"""What the lighthouse's page costs a job of 1,000 members, and how long a reader waits for it.

The members are sessions with a TCP connection each, as in `lighthouse_cost.py`; they have formed a quorum,
and while somebody looks they say how far they are, as ManagerServers do. Readers do what the page's script
does.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lighthouse_cost import channels_to, cpu_seconds, member_of, open_session
from benchmarks.processes import Fleet
from benchmarks.report import Bar, Result
from benchmarks.systems import OURS, Lighthouse, start_lighthouse
from lighthouse.address import Address, parse_address
from lighthouse.wire import torchft_pb2 as pb

MEMBERS = 1000
PAGES = 20
PROGRESS_PER_S = 250  # as many as all members of a job say
CPU_PERCENT_MAX = 15.0
LOAD_S_MAX = 0.3
LOAD_KB_MAX = 150.0
_HEAD_END = b"\r\n\r\n"

METHOD = [
    f"A lighthouse in a process of its own, {MEMBERS:,} sessions of one client process that have formed a "
    "quorum, and say nothing more while nobody looks. CPU is that of the lighthouse's process, user and "
    "system time, in blocks of the stated length: first without readers, then with them.",
    f"{PAGES} readers ask for /status once a second on a connection of their own, with If-None-Match and "
    "gzip, as the page does. Beside them the members say how far they are, "
    f"{PROGRESS_PER_S} messages a second in all.",
    "A load: GET / and then GET /status on a new connection, beside the readers; bytes are those of both "
    "answers with their heads. In Chromium, where it is installed: from the navigation until the page has "
    "shown the first data, by the browser's own clock.",
]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    members: int = MEMBERS
    block_s: float = 10.0
    blocks: int = 5
    loads: int = 20


QUICK = Plan(members=200, block_s=3.0, blocks=1, loads=3)


def main(plan: Plan | None = None) -> Result:
    """Measure, check against the bars, and save results/lighthouse_page.json."""
    plan = plan or Plan()
    missing = [] if _has_chromium() else ["There was no Chromium (Debian's chromium and chromium-driver)."]
    result = Result("lighthouse_page", "What does the lighthouse's page cost?", [*METHOD, *missing])
    for case, unit, samples in asyncio.run(_costs(plan)):
        if samples:
            result.add(case, OURS.name, unit, samples)
    result.bars += _bars(result, plan)
    result.save()
    return result


def _cpu_case(plan: Plan, pages: int) -> str:
    return f"{plan.members:,} members, {pages} open pages: CPU"


LOAD_CASES = ("load of the page: time", "load of the page: bytes", "load of the page in Chromium: time")


def _bars(result: Result, plan: Plan) -> list[Bar]:
    without, with_pages = (result.median(_cpu_case(plan, pages), OURS.name) for pages in (0, PAGES))
    more = None if without is None or with_pages is None else with_pages - without
    plain_s, kilobytes, browser_s = (result.median(case, OURS.name) for case in LOAD_CASES)
    return [
        Bar(f"{PAGES} open pages: CPU beyond that without", more, CPU_PERCENT_MAX, "% of a core"),
        Bar("load of the page to live data", plain_s if browser_s is None else browser_s, LOAD_S_MAX, "s"),
        Bar(LOAD_CASES[1], kilobytes, LOAD_KB_MAX, "KB"),
    ]


async def _costs(plan: Plan) -> list[tuple[str, str, Sequence[float]]]:
    with Fleet() as fleet:
        lighthouse = start_lighthouse(fleet, OURS, plan.members, extra=("--page=127.0.0.1:0",))
        page = _page_of(lighthouse)
        async with channels_to(lighthouse.address, plan.members) as channels:
            sessions = [await open_session(channel, index) for index, channel in enumerate(channels)]
            await asyncio.gather(*(_join(session, index) for index, session in enumerate(sessions)))
            without = await _percents(lighthouse, plan)
            async with asyncio.TaskGroup() as tasks:
                readers = [tasks.create_task(_read_on(page)) for _ in range(PAGES)]
                saying = tasks.create_task(_say_progress(sessions))
                await asyncio.sleep(2.0)  # until all have come
                with_pages = await _percents(lighthouse, plan)
                loads = [await _load(page) for _ in range(plan.loads)]
                in_browser = await asyncio.to_thread(_loads_in_browser, page, plan)
                if ended := [task for task in (*readers, saying) if task.done()]:
                    raise RuntimeError(f"{len(ended)} readers or members have ended early")
                for task in (*readers, saying):
                    task.cancel()
    return [
        (_cpu_case(plan, 0), "% of a core", without),
        (_cpu_case(plan, PAGES), "% of a core", with_pages),
        (LOAD_CASES[0], "s", [seconds for seconds, _ in loads]),
        (LOAD_CASES[1], "KB", [nbytes / 1000 for _, nbytes in loads]),
        (LOAD_CASES[2], "s", in_browser),
    ]


def _page_of(lighthouse: Lighthouse) -> Address:
    line = next(line for line in lighthouse.process.lines() if "lighthouse page on" in line)
    return parse_address(line.rpartition(" ")[2])


async def _join(session: Any, index: int) -> None:
    await session.write(pb.SessionRequest(join=member_of(index)))
    while not (await session.read()).HasField("quorum"):
        pass


async def _say_progress(sessions: Sequence[Any]) -> None:
    """Have the members say in turn how far they are, in bursts of a tenth of a second."""
    members, began = itertools.cycle(sessions), time.monotonic()
    for said in itertools.count():
        step = 123_456 + said // len(sessions)
        progress = pb.Progress(step=step, waits_for="allreduce", waiting_permille=said % 1000)
        await next(members).write(pb.SessionRequest(progress=progress))
        if said % (PROGRESS_PER_S // 10) == 0:
            await asyncio.sleep(began + said / PROGRESS_PER_S - time.monotonic())


async def _percents(lighthouse: Lighthouse, plan: Plan) -> list[float]:
    """Return the percent of a core that the lighthouse uses in each block."""
    found = []
    for _ in range(plan.blocks):
        cpu, began = cpu_seconds(lighthouse), time.monotonic()
        await asyncio.sleep(plan.block_s)
        found.append((cpu_seconds(lighthouse) - cpu) * 100 / (time.monotonic() - began))
    return found


async def _read_on(page: Address) -> None:
    """Ask for the status once a second, as the page does."""
    reader, writer = await asyncio.open_connection(page.host, page.port)
    tag = ""
    try:
        while True:
            head, _ = await _ask(reader, writer, "/status", f"If-None-Match: {tag}\r\n" if tag else "")
            tag = _field(head, "etag")
            await asyncio.sleep(1.0)
    finally:
        writer.close()


async def _load(page: Address) -> tuple[float, int]:
    """Return the seconds that the page and its first data take, and their bytes."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(page.host, page.port)
    nbytes = 0
    for path in ("/", "/status"):
        head, body = await _ask(reader, writer, path)
        nbytes += len(head) + len(body)
    writer.close()
    return time.perf_counter() - began, nbytes


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, more: str = ""
) -> tuple[str, bytes]:
    """Return the head and the body of an answer."""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: page\r\nAccept-Encoding: gzip\r\n{more}\r\n".encode())
    head = (await reader.readuntil(_HEAD_END)).decode()
    if head.split()[1] not in ("200", "304"):
        raise RuntimeError(f"{path}: {head.splitlines()[0]}")
    return head, await reader.readexactly(int(_field(head, "content-length") or 0))


def _field(head: str, name: str) -> str:
    lines = (line.partition(": ") for line in head.splitlines())
    return next((value for key, _, value in lines if key.lower() == name), "")


def _has_chromium() -> bool:
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


def _loads_in_browser(page: Address, plan: Plan) -> list[float]:
    """Return the seconds of each load in Chromium; none where it is not installed."""
    if not _has_chromium():
        return []
    from tests.browser import Browser  # noqa: PLC0415 - it is not needed otherwise

    found = []
    with Browser() as browser:
        for _ in range(plan.loads):
            browser.open("about:blank")
            browser.open(f"http://{page}/")
            found.append(float(browser.wait_for("performance.getEntriesByName('live')[0]?.startTime")) / 1000)
    return found
