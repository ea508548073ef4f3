"""A package that is not installed is called by the extra that has it."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from workers.extras import PACKAGES, extra_with

ROOT = Path(__file__).parents[2]
SETS = frozenset({"bench", "demo", "dev", "docs", "fuzz", "mutate"})
"""Extras that no part of the program needs."""
OF_OTHERS = frozenset({"py4j"})
"""What comes with one of them: pyspark has it."""


def distribution(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_table_is_that_of_the_project() -> None:
    """Every package of every extra that is for a part of the program, in every extra that has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted: dict[str, set[str]] = {}
    for extra in project.keys() - SETS:
        for requirement in project[extra]:
            wanted.setdefault(distribution(re.split(r"[\[<>=;]", requirement)[0]), set()).add(extra)
    told: dict[str, set[str]] = {}
    installed = packages_distributions()
    for package, extras in PACKAGES.items():
        for each in installed[package]:
            if package not in OF_OTHERS and distribution(each) in wanted:
                told.setdefault(distribution(each), set()).update(extras)
    assert told == wanted


@pytest.mark.parametrize(
    ("name", "part", "extra"),
    [
        ("fastapi", None, "node"),
        ("fastapi.responses", "dashboard", "dashboard"),
        ("pyspark", "dashboard", "analytics"),
        ("sqlalchemy", "postgres", "postgres"),
        ("greenlet", "sqlite", "sqlite"),
        ("greenlet", None, None),
        ("workers.gone", "sqlite", None),
        (None, "sqlite", None),
    ],
)
def test_what_is_missing_decides(name: str | None, part: str | None, extra: str | None) -> None:
    """Who asked decides only between extras that have it, and where no extra names it."""
    assert extra_with(ModuleNotFoundError(name=name), part=part) == extra
