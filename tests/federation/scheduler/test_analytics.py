"""The nightly run of the analytics: when it runs, with what, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from federation.scheduler import analytics as module
from federation.scheduler.analytics import AFTER_MIDNIGHT, NightlyAnalytics
from federation.scheduler.runner import JobFailed

PATIENCE_SECONDS = 20


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


def yesterday() -> str:
    return ((datetime.now(UTC) - AFTER_MIDNIGHT).date() - timedelta(days=1)).isoformat()


async def test_the_first_run_computes_everything(interpreter: Path) -> None:
    """Up to today, which is not over."""
    found = await NightlyAnalytics(interpreter / "out")()
    assert found == {"as_of": yesterday(), "ran": True}
    out = str(interpreter / "out")
    assert arguments(interpreter) == ["-m", "federation", "analytics", "run", "--out", out, "--until", "today"]


async def test_a_later_run_goes_on_from_the_last_day_computed(interpreter: Path) -> None:
    """That day is computed again, for what came late."""
    (interpreter / "summary.json").write_text(json.dumps({"as_of": "2026-01-02"}))
    assert (await NightlyAnalytics(interpreter)())["ran"]
    assert arguments(interpreter)[-4:] == ["--since", "2026-01-02", "--until", "today"]


async def test_a_day_is_computed_once(interpreter: Path) -> None:
    """With yesterday's results nothing is started."""
    (interpreter / "summary.json").write_text(json.dumps({"as_of": yesterday()}))
    assert await NightlyAnalytics(interpreter)() == {"as_of": yesterday(), "ran": False}
    assert not (interpreter / "arguments").exists()


async def test_a_run_that_fails_says_why(interpreter: Path) -> None:
    """By its last line, cut."""
    (interpreter / "behave").write_text("echo noise >&2; echo 'federation: Java 17 is needed' >&2; exit 2\n")
    with pytest.raises(JobFailed, match="status 2: federation: Java 17 is needed"):
        await NightlyAnalytics(interpreter)()


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_run_that_is_cut_off_leaves_no_process(
    interpreter: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    """It is asked to end, and made to if it will not."""
    monkeypatch.setattr(module, "STOPS_WITHIN", timedelta(milliseconds=200))
    trap = "trap '' TERM; " if stubborn else ""
    (interpreter / "behave").write_text(f"{trap}echo $$ > {interpreter}/pid; while :; do sleep 0.05; done\n")
    running = asyncio.create_task(NightlyAnalytics(interpreter)())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (interpreter / "pid").exists() or not (interpreter / "pid").read_text().strip():
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    with pytest.raises(ProcessLookupError):
        os.kill(int((interpreter / "pid").read_text()), 0)
