"""The voice of docstrings: that of a function begins with what the function does.

Ruff's D401 knows verbs in other forms than the imperative, and some nouns. It lets pass what is no verb at all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
PACKAGES: Final = ("db", "federation", "scripts", "workers")
CASES: Final = ROOT / "workers" / "testing" / "cases"
"""The docstring of a case is the promise that it shows."""
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
A_WORD: Final = re.compile(r"[A-Z][a-z]+[ ,.:;]")
WORDS: Final = """
a after all also an any anybody anything as at before behind beside both but by each either every everybody
everyone everything for from half how if in inside it its like many more most neither no nobody none not nothing
of on once one only our out per plain since so some somebody something such that the their there these they this
those though through to two under until up what whatever when whenever where wherever whether which while who
whoever whom whose why with without your
"""
NO_VERBS: Final = frozenset(WORDS.split())


def faults(path: Path) -> Iterator[str]:
    """Each function whose docstring begins with something else than a verb; properties are named, not done."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, FUNCTIONS):
            continue
        told = ast.get_docstring(node)
        if told is not None and not begins_with_a_verb(told) and not is_property(node):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: {told.splitlines()[0]}"


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(each).endswith("property") for each in function.decorator_list)


def begins_with_a_verb(told: str) -> bool:
    word = A_WORD.match(told)
    return word is not None and word[0][:-1].lower() not in NO_VERBS


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_functions_begin_with_a_verb(package: str) -> None:
    """In the imperative, as far as ruff's D401 can tell."""
    paths = [path for path in sorted((ROOT / package).rglob("*.py")) if CASES not in path.parents]
    assert not [fault for path in paths for fault in faults(path)]


@pytest.mark.parametrize(
    "told", ["Whether it is there.", "`job` is in the queue.", "None: there is none.", "The job.", "HEALTH_EVENTS."]
)
def test_what_is_no_verb_is_found(told: str) -> None:
    """Those that D401 lets pass among them."""
    assert not begins_with_a_verb(told)
    assert begins_with_a_verb("Tell whether it is there.")
