"""Tables of a page that is generated."""

from __future__ import annotations

import re


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return lines of Markdown, without a line break at the end."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(escape(cell) for cell in line) + " |" for line in lines)


def escape(text: str) -> str:
    """Escape what would end a cell, or begin a tag."""
    return re.sub(r"([|<])", r"\\\1", text)
