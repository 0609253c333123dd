"""A hook of mkdocs.yml: the links that GitHub follows lead somewhere in the site, too.

A link is relative to its page's place in the repository. In the site docs/ is the root, and what lies outside
keeps its path: README.md and its like become pages, and what a page links to is copied as a file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
PAGES_OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
TARGET = re.compile(r"(?<=\]\()(?!\w+:)[^)#\s]+")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/, and the files to which a page links."""
    for path in PAGES_OUTSIDE:
        files.append(_file_of_repository(path, config))
    for page in files.documentation_pages():
        for target in TARGET.findall(page.content_string):
            path = _in_repository(page.src_uri, target)
            if not path.startswith(DOCS) and path not in files.src_uris and (ROOT / path).is_file():
                files.append(_file_of_repository(path, config))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return the page's text with links that are relative to its place in the site."""
    here = page.file.src_uri

    def rewrite(match: re.Match[str]) -> str:
        path = _in_repository(here, match[0])
        return posixpath.relpath(path.removeprefix(DOCS), posixpath.dirname(here) or ".")

    return TARGET.sub(rewrite, markdown)


def _file_of_repository(path: str, config: Any) -> File:
    return File.generated(config, path, abs_src_path=str(ROOT / path))


def _in_repository(page: str, target: str) -> str:
    """Return the path in the repository to which a page of the site links."""
    folder = posixpath.dirname(page if page in PAGES_OUTSIDE else DOCS + page)
    return posixpath.normpath(posixpath.join(folder, target))
