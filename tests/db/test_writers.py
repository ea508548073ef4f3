"""Who writes which column: the models' comments, the README and the code say the same."""

from __future__ import annotations

import re
from functools import cache
from typing import Final

import pytest

from db.columns import FederationTable
from tests.db.writers import MODULE, ORIGINAL, ROOT, Writers, column_table, commented, writers

README: Final = (ROOT / "db" / "README.md").read_text()
TABLES: Final = sorted(FederationTable.metadata.tables)
BY_NO_MODULE: Final = {"blacklist_revision", "database_identity"}
"""Filled by triggers and by a migration."""
NO_WRITERS: Final = {
    ("server_links", "base/settings/reach"): "tries whether the database takes writes, on no row",
    ("scheduler_jobs", "admin/scheduler"): "makes an empty one to show",
}


@cache
def found() -> Writers:
    return writers()


def row_of(table: str) -> str:
    """Its cell `Written by` in the README."""
    (cell,) = re.findall(rf"^\| (?:`\w+`, )*`{table}`[^|]*\| [^|]+ \| ([^|]+) \|", README, re.MULTILINE)
    return str(cell)


@pytest.mark.parametrize("table", TABLES)
def test_every_column_says_who_writes_it(table: str) -> None:
    """In a comment of its model; and each of those that the code has is named, and no other."""
    columns = FederationTable.metadata.tables[table].columns
    said = commented()[table]
    assert list(said) == [column.name for column in columns]
    if table in BY_NO_MODULE:
        return
    written = found().get(table, {})
    for column, modules in said.items():
        assert modules, column
        writes = {each for each in written.get(column, set()) if (table, each) not in NO_WRITERS}
        assert writes <= modules, column
        for module in modules - writes - {ORIGINAL}:
            text = (ROOT / "federation" / f"{module}.py").read_text()
            is_told = re.search(rf"\b{column}\b", text) or module == "analytics/data/publish"  # by the table's columns
            assert is_told, f"{module} writes no {table}.{column}"


@pytest.mark.parametrize("table", TABLES)
def test_the_readme_names_whoever_writes_a_table(table: str) -> None:
    """Rows that are made and removed included."""
    wanted = {each for each in found().get(table, {}).get("*", set()) if (table, each) not in NO_WRITERS}
    said = set().union(*commented()[table].values())
    assert set(MODULE.findall(row_of(table))) == (wanted | said) - {ORIGINAL}


@pytest.mark.parametrize("table", ["delivery_jobs", "server_registry"])
def test_the_readme_shows_who_writes_the_columns_that_many_write(table: str) -> None:
    """Generated from the models' comments."""
    assert column_table(table) in README


def test_writers_are_found() -> None:
    """A scan that finds none agrees with everybody; these are written in different ways."""
    assert found()["delivery_jobs"]["queued_at"] >= {
        "delivery/outbox/sweeper",
        "delivery/rows",
        "admin/deliveries/bulk",
    }
    assert found()["server_registry"]["claimed_by"] == {"sealed/peers/claims"}
    assert found()["server_registry"]["knows_key"] >= {"sealed/peers/key_rotation", "sealed/peers/registry"}
    assert found()["follows"]["accepted"] >= {"sealed/outbound/follows", "node/follows"}
    assert len(found()["delivery_jobs"]["*"]) >= 9
