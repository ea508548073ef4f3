"""The site of the documents has a place for every page, and its links are written anew. `scripts/docs` makes it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def docs() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("docs")


def test_every_page_has_its_place_in_the_contents(docs: ModuleType) -> None:
    """Once; and the contents name no page that is not there."""
    contents = (docs.SITE / "contents.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"[\w./-]+\.md$", contents, re.MULTILINE)
    made = {f"reference/api/{name}.md" for name in docs.PUBLIC}
    assert sorted(named) == sorted({*map(docs.place, docs.pages()), *made})


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("README.md", "[a](docs/scale.md#x)", "[a](scale.md#x)"),
        ("docs/operate/day.md", "[a](../../federation/README.md)", "[a](../federation/README.md)"),
        ("docs/operate/day.md", "[a](../../workers/)", "[a](../workers/README.md)"),
        ("docs/scale.md", "[a](../tests/)", "a"),
        ("docs/scale.md", "[a](#here), [b](https://b.example)", "[a](#here), [b](https://b.example)"),
        ("docs/examples/README.md", "[a](script.py)", "[a](script.py)"),
    ],
)
def test_links_lead_to_places_of_the_site(docs: ModuleType, tmp_path: Path, page: str, link: str, there: str) -> None:
    """To pages and files; what has no place there is a word."""
    assert docs.rewritten(page, link, tmp_path) == there
    assert (tmp_path / "examples" / "script.py").exists() == ("script.py" in link)
