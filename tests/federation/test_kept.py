"""What the manual says of how long things are kept is what the purge does; neither changes alone."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Final

import pytest

from db import FederationTable, HostTable
from federation.base.queues.queue import KEEP_COMPLETED, KEEP_FAILED, KEEP_TASKS
from federation.base.settings.settings import Settings
from federation.node import admission, limits
from federation.node.limits import Limit
from federation.runtime.composition import Federation
from federation.runtime.recurring_jobs import recurring_jobs
from tests.federation.conftest import MakeSettings
from tests.federation.rows_read import watched
from tests.federation.test_run import ROOT

PAGE: Final = (ROOT / "docs" / "operate" / "kept.md").read_text()
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
UNITS: Final = {"h": HOUR, "hour": HOUR, "day": DAY, "year": 365 * DAY}
TIME: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}")
"""As SQLite gets a time, which is in UTC."""
OF_NOBODY: Final = {
    *("accepted_keys", "relay_candidates", "rotate_challenge_tokens", "server_health_events", "server_links"),
    *("server_registry", "server_scorecards", "server_summaries"),
    *("attempt_minutes", "delivery_totals", "process_clocks", "rollup_positions", "scheduler_jobs", "sweeps"),
    *("blacklist_revision", "database_identity"),
}
"""Tables about servers, recurring jobs and counts. One that says something of persons belongs on the page."""


def rows(title: str) -> dict[tuple[str, ...], str]:
    """What the table under this title says of how long, by the names in code of its first cells."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {tuple(re.findall("`([^`]+)`", first)) or (first,): how_long for first, _, how_long, _ in cells[1:]}


def durations(text: str) -> set[timedelta]:
    """Those that a cell names."""
    found = re.findall(r"\b(\d+|an?) (h|hour|day|year)s?\b", text)
    return {UNITS[unit] * (int(number) if number.isdigit() else 1) for number, unit in found}


IN_DATABASE: Final = rows("In the database")
ELSEWHERE: Final = rows("Elsewhere")


@pytest.fixture
async def node(make_settings: MakeSettings) -> AsyncIterator[Federation]:
    """One that has every wire, so that it purges all there is."""
    running = Federation(make_settings(federation_activitypub="1"))
    yield running
    await running.close()


async def purged(node: Federation) -> dict[str, set[timedelta]]:
    """For how long each table's rows are kept, by what the node deletes of it; that is nothing of what has an end."""
    [purge] = [job for job in recurring_jobs(node) if job.name == "purge"]
    now = datetime.now(UTC)
    with watched(("DELETE",)) as statements:
        assert "spared" not in await purge.run()
        await node.sightings.tick()
    kept: dict[str, set[timedelta]] = {}
    for statement, parameters in statements:
        [table] = re.findall(r'^DELETE FROM "?(\w+)"?', statement)
        times = [datetime.fromisoformat(f"{each}+00:00") for each in parameters if TIME.fullmatch(str(each))]
        ages = {timedelta(hours=round((now - each) / timedelta(hours=1))) for each in times}
        kept.setdefault(table, set()).update(ages - {timedelta(0)})
    return kept


async def test_the_page_says_for_how_long_the_purge_keeps_rows(node: Federation) -> None:
    """Of each table that it names, and of no other."""
    kept = await purged(node)
    assert len(kept) > 10
    told = {tables: durations(text) for tables, text in IN_DATABASE.items()}
    assert told == {tables: set().union(*(kept.get(table, set()) for table in tables)) for tables in told}


async def test_what_a_setting_changes_is_told_with_its_name(make_settings: MakeSettings, node: Federation) -> None:
    """And all settings that the page names are there."""
    other = Federation(make_settings(federation_activitypub="1", federation_keep_attempts="11d"))
    try:
        changed = {table for table, ages in (await purged(other)).items() if timedelta(days=11) in ages}
    finally:
        await other.close()
    told = {table for tables, text in IN_DATABASE.items() if "`FEDERATION_KEEP_ATTEMPTS`" in text for table in tables}
    assert told == changed
    assert {*re.findall(r"`(FEDERATION_\w+)[`=]", PAGE)} <= {name.upper() for name in Settings.model_fields}


def test_every_table_is_on_the_page_or_about_nobody() -> None:
    """A new one has to be put on one side."""
    named = [table for tables in IN_DATABASE for table in tables]
    assert len(named) == len(set(named))
    assert {*named} | OF_NOBODY == {*FederationTable.metadata.tables, *HostTable.metadata.tables}
    assert not {*named} & OF_NOBODY


def test_the_page_says_for_how_long_jobs_and_limits_are_kept() -> None:
    """Jobs by the defaults of their queues; a limit's longest window."""
    assert durations(ELSEWHERE["jobs of deliveries",]) == {KEEP_COMPLETED, KEEP_FAILED}
    assert {KEEP_TASKS, KEEP_FAILED} == {KEEP_COMPLETED, KEEP_FAILED}
    assert ELSEWHERE["jobs of [tasks](../embed/tasks.md)",] == "the same"
    windows = {each.window for module in (limits, admission) for each in vars(module).values() if type(each) is Limit}
    assert durations(ELSEWHERE["Redis",]) == {max(windows)}
