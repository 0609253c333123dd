"""Tables of a page that is generated."""

from __future__ import annotations

import re


def table(header: list[str], rows: list[list[str]]) -> str:
    """Lines of Markdown, without a line break at the end."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(escape(cell) for cell in line) + " |" for line in lines)


def escape(text: str) -> str:
    """What would end a cell, or begin a tag, does not."""
    return re.sub(r"([|<])", r"\\\1", text)
