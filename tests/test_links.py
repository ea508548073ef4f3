"""The Markdown pages lead somewhere: every link to this repository names a file that is there, and a heading in it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("db", "docs", "federation", "scripts", "tests", "workers")
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")))
    if "node_modules" not in path.parts
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
LONG = 200
"""Lines, from which on a page needs a list of its contents."""


def links(text: str) -> set[str]:
    """Where a page's links lead, but for those to other sites; code is not read."""
    prose = re.sub(r"^```.*?^```|^    .*?$|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)
    return {link for link in LINK.findall(prose) if not re.match(r"\w+:", link)}


@cache
def anchors(page: Path) -> frozenset[str]:
    """What its headings can be linked as, by the rule of the forges: lower case, no punctuation, hyphens for spaces."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


def broken(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in sorted(links(text)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken(page, page.read_text()) == []


@pytest.mark.parametrize(
    "link", ["gone.md", "README.md#no-such-heading", "#nor-here", "docs/gone/", "workers/README.md#speed"]
)
def test_a_link_that_leads_nowhere_is_noticed(link: str) -> None:
    assert broken(ROOT / "README.md", f"see [there]({link})") == [link]


def test_a_long_page_says_what_is_in_it() -> None:
    """By links to its own headings, before the first of them."""
    for page in PAGES:
        text = page.read_text()
        if page.name == "README.md" and text.count("\n") > LONG:
            assert "](#" in text.partition("\n## ")[0], page


def test_the_manual_of_the_queue_core_is_short() -> None:
    """A newcomer reads it once; what does not fit has a page of its own below docs/."""
    assert (ROOT / "workers" / "README.md").read_text().count("\n") < 300


def test_every_decision_has_its_parts_and_its_row() -> None:
    """In the order in which they are read; the index has all of them, and a page is short."""
    folder = ROOT / "docs" / "decisions"
    pages = sorted(page for page in folder.glob("*.md") if page.name != "README.md")
    assert len(pages) >= 10
    assert re.findall(r"^\| \[\d+\]\((.+)\) \|", (folder / "README.md").read_text(), re.MULTILINE) == [
        page.name for page in pages
    ]
    for page in pages:
        parts = re.findall(r"^\*\*(\w+)\.\*\*", page.read_text(), re.MULTILINE)
        assert parts == ["Context", "Decision", "Rejected", "Consequences", "Where"], page
        assert page.read_text().count("\n") < 60, page
