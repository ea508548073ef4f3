"""One word stands for one thing: no name of a class is used twice where a reader could confuse the two."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("package", ["workers", "federation", "db"])
def test_a_name_of_a_class_is_used_once_in_a_package(package: str) -> None:
    """Who reads a name in one file never finds another class of that name in the next."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert places
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
