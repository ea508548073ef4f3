"""The command in terminals that know fewer characters than jobs have."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.workers.manual import ROOT
from workers import Queue
from workers.storage import open_storage

FISH: Final = "fish 🐟"
ESCAPED: Final = r"fish \ud83d\udc1f"
ASCII: Final = {"PYTHONIOENCODING": "ascii"}
C: Final = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LATIN: Final = {"PYTHONIOENCODING": "latin-1"}


async def _run(environment: Mapping[str, str], *arguments: str | bytes, given: bytes = b"") -> tuple[int, str, str]:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "workers", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment},
        input=given,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout.decode("latin-1"), done.stderr.decode("latin-1")


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """A queue with a job whose id, name and result have characters that ASCII has not."""
    url = f"file://{tmp_path}/jobs"
    queue = Queue(open_storage(url))
    queue.execute({FISH: lambda job: FISH})
    async with queue:
        await queue.enqueue_and_wait(None, id=FISH, name=FISH)
    return url


@pytest.mark.parametrize("environment", [ASCII, C, LATIN], ids=["ascii", "C", "latin-1"])
async def test_what_the_terminal_cannot_show_is_escaped(environment: Mapping[str, str], url: str) -> None:
    """Also an id in an argument is understood, and JSON on stdin is UTF-8 whatever the locale is."""
    status, shown, error = await _run(environment, "list", url)
    assert (status, error) == (0, "")
    assert shown.splitlines()[1].startswith(f"{ESCAPED}  {ESCAPED}")
    status, shown, error = await _run(environment, "show", url, FISH.encode())
    assert (status, error) == (0, "")
    assert re.search(f"^result +{re.escape(ESCAPED)}$", shown, re.MULTILINE)
    assert (await _run(environment, "show", url, "größer".encode()))[2].startswith(r"there is no job gr")
    assert (await _run(environment, "enqueue", url, "-", "--id", "new", given=json.dumps([FISH]).encode()))[0] == 0
    assert (await _run(environment, "enqueue", url, "-", given=b'"\xff"'))[0] == 2
    queue = Queue(open_storage(url))
    job = await queue.get_job("new")
    assert job is not None
    assert job.payload == [FISH]
    await queue.stop()


async def test_an_argument_that_is_no_text_is_told(url: str) -> None:
    """As wrong usage, with status 2."""
    status, _, error = await _run(C, "show", url, b"\xff")
    assert (status, "an argument is no UTF-8" in error, "Traceback" in error) == (2, True, False)


@pytest.mark.parametrize("identifier", ["", "x" * 513])
async def test_an_id_that_no_job_can_have_is_told(identifier: str, url: str) -> None:
    """In a sentence, with status 2."""
    status, _, error = await _run({}, "show", url, identifier)
    assert (status, "must be 1 to 512 bytes long" in error, "Traceback" in error) == (2, True, False)
