"""The nightly run of the analytics: when it runs, with what, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path

import pytest

from federation.base.settings.types import SHORTEST_LOG
from federation.cli.problems import USAGE_ERROR
from federation.runtime.composition import Federation
from federation.runtime.recurring_jobs import recurring_jobs
from federation.scheduler import analytics as module
from federation.scheduler.analytics import AFTER_MIDNIGHT, TOLD, NightlyAnalytics
from federation.scheduler.runner import JobFailed
from tests.federation.conftest import MakeSettings
from tests.patience import until


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for Python: writes its arguments down, then does what `behave` in its directory says."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n. {tmp_path}/behave\n')
    script.chmod(0o700)
    (tmp_path / "behave").write_text("exit 0\n")
    monkeypatch.setattr(sys, "executable", str(script))
    return tmp_path


def arguments(interpreter: Path) -> list[str]:
    return (interpreter / "arguments").read_text().splitlines()


def today() -> date:
    return (datetime.now(UTC) - AFTER_MIDNIGHT).date()


def yesterday() -> str:
    return (today() - timedelta(days=1)).isoformat()


async def test_only_a_node_that_is_told_where_to_has_nightly_analytics(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    """FEDERATION_ANALYTICS_OUT is the directory; its job has hours, and may be asked for often."""
    for out in (None, tmp_path):
        node = Federation(make_settings(federation_analytics_out=out))
        jobs = {job.name: job for job in recurring_jobs(node)}
        await node.close()
        assert ("analytics" in jobs) is (out is not None)
    assert isinstance(jobs["analytics"].run, NightlyAnalytics)
    assert jobs["analytics"].timeout > jobs["analytics"].interval


async def test_the_first_run_computes_everything(interpreter: Path) -> None:
    """Up to today, which is not over."""
    found = await NightlyAnalytics(interpreter / "out")()
    assert found == {"as_of": yesterday(), "ran": True}
    out = str(interpreter / "out")
    assert arguments(interpreter) == ["-m", "federation", "analytics", "run", "--out", out, "--until", str(today())]


def computed(out: Path, read_at: Mapping[int, datetime]) -> None:
    """A record of days, told by how long ago they were."""
    noted = {str(today() - timedelta(days=back)): moment.isoformat() for back, moment in read_at.items()}
    (out / "computed.json").write_text(json.dumps({"read_at": noted}))


def ended(back: int) -> datetime:
    """When that day was over for good."""
    return datetime.combine(today() - timedelta(days=back - 1), time(), UTC) + AFTER_MIDNIGHT


def since(back: int) -> list[str]:
    return ["--since", str(today() - timedelta(days=back)), "--until", str(today())]


async def test_a_later_run_goes_on_from_the_last_day_computed(interpreter: Path) -> None:
    """That day is computed again, for what came late."""
    computed(interpreter, {back: ended(back) for back in (5, 4, 3)})
    assert (await NightlyAnalytics(interpreter)())["ran"]
    assert arguments(interpreter)[-4:] == since(3)


@pytest.mark.parametrize("failed", [0, 1])
async def test_the_shortest_log_reaches_back_far_enough(interpreter: Path, failed: int) -> None:
    """A night reads whole days. If one has failed, the next lacks nothing that was not exported before."""
    latest = 2 + failed
    computed(interpreter, {back: ended(back) for back in (latest + 1, latest)})
    assert (await NightlyAnalytics(interpreter)())["ran"]
    assert arguments(interpreter)[-4:] == since(latest)
    first_needed = datetime.combine(today() - timedelta(days=latest - failed), time(), UTC)
    an_hour_late = datetime.combine(today(), time(), UTC) + AFTER_MIDNIGHT + timedelta(hours=1)
    assert first_needed > an_hour_late - SHORTEST_LOG


async def test_a_day_that_was_left_out_is_gone_back_to(interpreter: Path) -> None:
    """A month back at most: that is how far scorecards look."""
    computed(interpreter, {back: ended(back) for back in (9, 8, 6, 5, 2)})
    assert (await NightlyAnalytics(interpreter)())["ran"]
    assert arguments(interpreter)[-4:] == since(8)
    computed(interpreter, {90: ended(90)})
    assert (await NightlyAnalytics(interpreter)())["ran"]
    assert arguments(interpreter)[-4:] == since(32)


async def test_a_run_by_hand_does_not_suppress_the_nights(interpreter: Path) -> None:
    """What was read before the day was over is not all of it, even a little before."""
    for moment in (ended(1) - timedelta(hours=12), ended(1) - timedelta(seconds=1)):
        computed(interpreter, {3: ended(3), 2: ended(2), 1: moment, 0: moment})
        assert await NightlyAnalytics(interpreter)() == {"as_of": yesterday(), "ran": True}
        assert arguments(interpreter)[-4:] == since(2)


async def test_a_mistyped_day_suppresses_nothing(interpreter: Path) -> None:
    """Results of days to come say nothing of yesterday."""
    computed(interpreter, {2: ended(2), -40: ended(2)})
    assert (await NightlyAnalytics(interpreter)())["ran"]
    assert arguments(interpreter)[-4:] == since(2)


async def test_a_clock_that_was_ahead_suppresses_no_night(interpreter: Path) -> None:
    """What was noted as read in days to come may have been read before yesterday was over."""
    ahead = datetime.now(UTC) + timedelta(days=30)
    computed(interpreter, {3: ended(3), 2: ended(2), 1: ahead})
    assert (await NightlyAnalytics(interpreter)())["ran"]
    assert arguments(interpreter)[-4:] == since(2)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"read_at": 3}', '{"read_at": {"x": "y"}}', '{"read_at": {"2026-01-01": 3}}']
)
async def test_a_record_that_cannot_be_read_is_none(interpreter: Path, text: str) -> None:
    """The run makes another one."""
    (interpreter / "computed.json").write_text(text)
    assert (await NightlyAnalytics(interpreter)())["ran"]
    assert "--since" not in arguments(interpreter)


async def test_a_day_is_over_a_little_after_midnight(interpreter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is told which day is the last, and does not ask its own clock."""
    monkeypatch.setattr(module, "AFTER_MIDNIGHT", AFTER_MIDNIGHT + timedelta(days=3))
    found = await NightlyAnalytics(interpreter)()
    assert arguments(interpreter)[-2:] == ["--until", str(today() - timedelta(days=3))]
    assert found["as_of"] == str(today() - timedelta(days=4))


async def test_the_days_are_read_from_what_a_run_notes(interpreter: Path) -> None:
    """Its name and its form are those of the analytics."""
    pytest.importorskip("pyspark", reason="its module needs the extra `analytics`")
    from federation.analytics.data.computed import computed_days, note_computed
    from federation.analytics.frames import Window

    window = Window(since=today() - timedelta(days=3), until=today())
    note_computed(interpreter, computed_days(interpreter).noting(window, ended(2)))
    assert (await NightlyAnalytics(interpreter)())["ran"]
    last = Window(since=today() - timedelta(days=1), until=today())
    note_computed(interpreter, computed_days(interpreter).noting(last, ended(1)))
    assert await NightlyAnalytics(interpreter)() == {"as_of": yesterday(), "ran": False}


async def test_a_day_is_computed_once(interpreter: Path) -> None:
    """With yesterday's results nothing is started."""
    computed(interpreter, {1: ended(1)})
    assert await NightlyAnalytics(interpreter)() == {"as_of": yesterday(), "ran": False}
    assert not (interpreter / "arguments").exists()


async def test_a_run_that_fails_says_why(interpreter: Path) -> None:
    """By its last line, cut."""
    (interpreter / "behave").write_text("echo noise >&2; echo 'federation: Java 17 is needed' >&2; exit 2\n")
    with pytest.raises(JobFailed, match="status 2: federation: Java 17 is needed"):
        await NightlyAnalytics(interpreter)()


async def test_what_a_traceback_quotes_is_not_told(interpreter: Path) -> None:
    """Of a run that broke off the status is known, and how to see more: its last line was not written to be read."""
    (interpreter / "behave").write_text("echo 'ValueError: s3cret' >&2; exit 1\n")
    why = r"status 1; run `federation analytics run --out \S+ --until [0-9-]+` to see why"
    with pytest.raises(JobFailed, match=why) as failed:
        await NightlyAnalytics(interpreter)()
    assert "s3cret" not in str(failed.value)


def test_the_status_of_a_command_that_tells_is_the_console_scripts() -> None:
    """They agree on what a status means."""
    assert TOLD == USAGE_ERROR


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_run_that_is_cut_off_leaves_no_process(
    interpreter: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    """It is asked to end, and made to if it will not."""
    monkeypatch.setattr(module, "STOPS_WITHIN", timedelta(milliseconds=200))
    trap = "trap '' TERM; " if stubborn else ""
    (interpreter / "behave").write_text(f"{trap}echo $$ > {interpreter}/pid; while :; do sleep 0.05; done\n")
    running = asyncio.create_task(NightlyAnalytics(interpreter)())
    await until(lambda: (interpreter / "pid").exists() and (interpreter / "pid").read_text().strip())
    running.cancel()
    await asyncio.wait([running])
    with pytest.raises(ProcessLookupError):
        os.kill(int((interpreter / "pid").read_text()), 0)
