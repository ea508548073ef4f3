"""What ruff does not know of this repository's style: names of classes, docstrings, pictures, the changelog.

    python scripts/house_rules.py

Prints a line for each fault; the exit status is 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("db", "federation", "workers")
CASES: Final = ROOT / "workers" / "testing" / "cases"
"""The docstring of a case is the promise that it shows."""
A_WORD: Final = re.compile(r"[A-Z][a-z]+[ ,.:;]")
WORDS: Final = """
a after all also an any anybody anything as at before behind beside both but by each either every everybody
everyone everything for from half how if in inside it its like many more most neither no nobody none not nothing
of on once one only our out per plain since so some somebody something such that the their there these they this
those though through to two under until up what whatever when whenever where wherever whether which while who
whoever whom whose why with without your
"""
NO_VERBS: Final = frozenset(WORDS.split())
LARGEST_PICTURE_BYTES: Final = 150_000
MERGED: Final = 40
"""Characters of a line from which on it stands twice by a merge of both sides, not by chance."""
KINDS: Final = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def main() -> None:
    """Tell of every fault."""
    found = [*classes(), *docstrings(), *pictures(), *changelog()]
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)


def classes() -> Iterator[str]:
    """Yield names that a package has for two classes: who reads one in the next file would take it for the other."""
    for package in PACKAGES:
        places: defaultdict[str, list[str]] = defaultdict(list)
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(_parsed(path)):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path.relative_to(ROOT)))
        yield from (f"{name} is a class in {' and '.join(ps)}" for name, ps in places.items() if len(ps) > 1)


def docstrings() -> Iterator[str]:
    """Yield those of functions that begin with no verb.

    Ruff's D401 knows verbs in other forms than the imperative, and some nouns. It lets pass what is no verb at all.
    Properties are named, not done.
    """
    for package in (*PACKAGES, "scripts"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(_parsed(path)) if CASES not in path.parents else ():
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    told = ast.get_docstring(node)
                    is_property = any(ast.unparse(each).endswith("property") for each in node.decorator_list)
                    if told is not None and not is_property and not _begins_with_a_verb(told):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}: no verb first: {told.splitlines()[0]}"


def _begins_with_a_verb(told: str) -> bool:
    word = A_WORD.match(told)
    return word is not None and word[0][:-1].lower() not in NO_VERBS


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def pictures() -> Iterator[str]:
    """Yield pictures of the dashboard that `scripts/screenshots` does not take, no page shows, or that are large."""
    files = sorted((ROOT / "docs" / "dashboard").iterdir())
    taken = set(re.findall(r'Shot\(name="([^"]+)"', (ROOT / "scripts" / "screenshots.py").read_text()))
    shown = set(re.findall(r"\]\(dashboard/([^)]+)\.png\)", (ROOT / "docs" / "dashboard.md").read_text()))
    for name in sorted({path.stem for path in files} | taken | shown):
        if name not in taken & shown & {path.stem for path in files}:
            yield f"docs/dashboard/{name}.png is not there, not taken or not shown"
    yield from (f"{path} is large" for path in files if path.stat().st_size >= LARGEST_PICTURE_BYTES)


def changelog() -> Iterator[str]:
    """Yield where CHANGELOG.md is not in the form of Keep a Changelog, or has a release after the one worked on."""
    parts = re.split(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    unreleased, *releases = parts[::2]
    base = re.findall(r'^BASE: Final = "([\d.]+)"$', (ROOT / "workers" / "version.py").read_text(), re.MULTILINE)[0]
    if unreleased != "Unreleased" or _numbers(releases[0].partition(" - ")[0]) > _numbers(base):
        yield f"CHANGELOG.md does not begin with Unreleased and a release up to {base}"
    if f"v{base}" in _tags() and releases[0].partition(" - ")[0] != base:
        yield f"CHANGELOG.md has no release {base}, and this commit has its tag"
    yield from (f"CHANGELOG.md: {each} has no date" for each in releases if not _has_date(each))
    versions = [each.partition(" - ")[0] for each in releases]
    yield from (
        f"CHANGELOG.md has two headings of {each}" for each in sorted(set(versions)) if versions.count(each) > 1
    )
    lines = [line for line in "".join(parts).splitlines() if len(line) > MERGED]
    yield from (f"CHANGELOG.md says twice: {each}" for each in sorted(set(lines)) if lines.count(each) > 1)
    for release, text in zip(parts[::2], parts[1::2], strict=True):
        preface, *entries = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
        if "\n- " in preface or not all("\n- " in entry for entry in entries[1::2]):
            yield f"CHANGELOG.md: {release} has a line without a kind, or a kind without a line"
        if [kind for kind in KINDS if kind in entries[::2]] != entries[::2]:
            yield f"CHANGELOG.md: the kinds of {release} are not {', '.join(KINDS)}, each once and in this order"


def _tags() -> list[str]:
    """Return the tags of this commit; none where there is no git."""
    try:
        command = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    except OSError:
        return []


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def _has_date(heading: str) -> bool:
    try:
        return bool(date.fromisoformat(heading.partition(" - ")[2]))
    except ValueError:
        return False


if __name__ == "__main__":
    main()
