"""The pages that people read, as tests see them: their blocks of code, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ROOT

PAGES = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
FENCED = re.compile(r"(?ms)^```(\w*)\n(.*?)^```")
INDENTED = re.compile(r"(?m)^ {4}(\S.*)$")
SPAN = re.compile(r"`([^`\n]+)`")
ENDS = re.compile(r" +#.*| {4,}.*| *[|&>].*")  # what may stand behind a command


class Block(NamedTuple):
    """What stands between two fences."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(*found) for found in FENCED.findall(page.read_text())]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of all commands in a page's blocks and code spans, without variables before them."""
    for language, text in blocks(page):
        if not language:
            yield from map(_words, text.replace("\\\n", " ").splitlines())
    prose = FENCED.sub("", page.read_text())
    yield from map(_words, [*INDENTED.findall(prose), *SPAN.findall(prose)])


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(ENDS.sub("", line.removeprefix("$ ").replace("...", "")))
    except ValueError:  # no command: a single quotation mark
        return []
    while words and re.match(r"\w+=", words[0]):
        del words[0]
    return words
