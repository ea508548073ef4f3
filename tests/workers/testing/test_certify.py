"""Any storage can be certified by its URL, and the report says what was found."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.servers import ValkeyProcess, valkey
from workers.jobs import CancelResult, Claim
from workers.storage.base import Capabilities, Storage
from workers.storage.memory import MemoryStorage
from workers.storage.urls import SCHEMES
from workers.testing import Finding, MemoryHarness, UrlHarness, all_cases, certify, table
from workers.testing.__main__ import main
from workers.testing.case import FREEZES, GUARANTEES, SWALLOWS
from workers.testing.steps import job

ROOT = Path(__file__).resolve().parents[3]
SILENT = len([case for case in all_cases() if {FREEZES, SWALLOWS} & {*case.needs}])
"""How many cases need a harness that can make a server silent."""
CANCEL = [case for case in all_cases() if case.verb == "cancel"]


class Uncancellable(MemoryStorage):
    """Says that it cancelled, and did not."""

    async def cancel(self, job_id: str) -> CancelResult:
        return CancelResult.CANCELLED


class Endless(MemoryStorage):
    """Never answers a claim."""

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class Raising(MemoryStorage):
    """Has a bug."""

    async def cancel(self, job_id: str) -> CancelResult:
        raise KeyError(job_id)


def harness_of(kind: type[MemoryStorage]) -> type[MemoryHarness]:
    class BrokenHarness(MemoryHarness):
        async def make(self, queue: str) -> Storage:
            return kind(self.space, queue)

    return BrokenHarness


def test_the_command_certifies_a_good_storage(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0, one line per guarantee, and what could not be shown is said: some cases are no certificate."""
    assert main(["memory://", "--case", "retention."]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in GUARANTEES.values())
    assert "not shown: this needs a clock the harness can move (retention." in printed
    assert re.search(r"12  nothing grows without bound +partly shown  \d kept, 2 not shown", printed)
    assert "NOT CERTIFIED: none of" in printed
    assert "not all of the suite was chosen" in printed
    assert "BROKEN" not in printed


def test_the_command_speaks_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same findings for programs; tables that are missing were made."""
    assert main([f"sqlite:///{tmp_path}/jobs.db", "--case", "cancel.", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["certified"], found["broken"], found["not_shown"]) == (False, 0, 0)
    assert found["not_tried"] == len(all_cases()) - len(CANCEL)
    assert [row["guarantee"] for row in found["guarantees"]] == list(GUARANTEES)
    assert [row["finding"] for row in found["guarantees"] if row["guarantee"] in (7, 11)] == [
        "partly shown",
        "not shown",
    ]
    assert [case["case"] for case in found["cases"]] == [case.id for case in CANCEL]


def test_the_command_names_what_is_broken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1, with each failing case, its promise and the assertion that failed."""
    kept = [Uncancellable(queue="kept")]
    monkeypatch.setitem(SCHEMES, "broken", lambda url, queue: Uncancellable(kept[0]._space, queue))
    assert main(["broken://", "--case", "cancel.a_waiting"]) == 1
    printed = capsys.readouterr().out
    assert " 7  cancelled means never run; waiters are told at once " in printed
    assert "broken        1 broken" in printed
    assert "broken: cancel.a_waiting_job_never_runs: A queued, prioritised, scheduled or failing job" in printed
    assert "assert await state(storage, job_id) is JobState.CANCELLED" in printed
    assert "BROKEN: 1 of 1 cases failed" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pigeon://user:s3cret@host"], "StorageError: a storage's URL begins with one of memory://"),
        (["bullmq+redis://:s3cret@127.0.0.1:1/0"], "StorageUnavailable"),
        (["memory://", "--case", "no such case"], "no case's id contains 'no such case'"),
        (["memory://", "--restart-command", "true"], "there is no server to restart"),
    ],
)
def test_what_cannot_be_certified_is_told(
    arguments: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 with one line that quotes no password."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert "s3cret" not in printed.err


def test_a_python_without_assertions_certifies_nothing() -> None:
    """`python -O` leaves out what the cases are made of: the command says so and exits 2."""
    command = [sys.executable, "-O", "-m", "workers.testing", "memory://", "--case", "payloads."]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "without it" in finished.stderr


def test_a_whole_run_is_a_certificate() -> None:
    """If nothing about restarts could have been shown; what no such harness can show is told beside it."""
    certificate = asyncio.run(certify(MemoryHarness, at_once=50))
    assert (certificate.certified, certificate.broken, certificate.not_tried) == (True, (), 0)
    assert certificate.not_shown
    assert certificate.finding(7) is certificate.finding(12) is Finding.PARTLY_SHOWN
    assert "certified: none of" in table(certificate)


def test_without_a_restart_there_is_no_certificate(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a storage on a server: the guarantee is not kept, and the report says what would show it."""
    assert main([redis_url, "--case", "restart."]) == 0
    printed = capsys.readouterr().out
    assert "11  a restarted server needs nobody's help " in printed
    assert "partly shown  3 kept, 15 not shown" in printed
    assert "could not be shown; 8 need a --restart-command" in printed


def test_a_restart_command_shows_restarts_and_cuts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cases restart the server by it, and are kept."""
    asked, done = tmp_path / "asked", tmp_path / "done"
    os.mkfifo(asked)
    os.mkfifo(done)
    with valkey() as server:
        restarter = threading.Thread(target=_restart_when_asked, args=(server, asked, done))
        restarter.start()
        try:
            command = f"echo again > {asked}; cat {done}"
            status = main([server.url, "--case", "restart.", "--restart-command", command, "--json"])
        finally:
            asked.write_text("over")
            restarter.join()
    found = json.loads(capsys.readouterr().out)
    assert (status, found["broken"], found["not_shown"]) == (0, 0, SILENT)
    for at in (10, 18):
        assert found["guarantees"][at]["finding"] == "partly shown", "other cases of it were not chosen"


def _restart_when_asked(server: ValkeyProcess, asked: Path, done: Path) -> None:
    while asked.read_text() != "over":
        server.restart()
        done.write_text("done")


@pytest.mark.parametrize(
    ("command", "said"),
    [("echo no such service; exit 3", "ended with status 3: no such service"), ("sleep 60", "does not answer")],
)
def test_a_failed_restart_certifies_nothing(
    command: str, said: str, redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 2 with what the command printed, and nothing is said about the storage."""
    monkeypatch.setattr("workers.testing.url_harness.LONGEST_RESTART", timedelta(seconds=0.5))
    arguments = [redis_url, "--case", "every_verb_works_after_a_restart", "--restart-command", command]
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err


async def test_a_storage_that_gives_ids_is_certified_with_its_own(redis_url: str) -> None:
    """Beside Bull 1.0 ids are numbers: the cases get them from the storage, and see those that they chose."""
    url = f"bull+{redis_url}?dialect=B"
    verbs = ("cancel", "chains", "inspect", "manage", "records", "settle")
    cases = [case for case in all_cases() if case.verb in verbs]
    certificate = await certify(lambda: UrlHarness(url), cases, at_once=8)
    assert certificate.broken == (), table(certificate)
    storage = await UrlHarness(url).make("case-ids")
    await storage.connect()
    await storage.enqueue([job("chosen")])
    [held] = await storage.claim("w", leases={"*": timedelta(minutes=1)}, limit=1)
    await storage.disconnect()
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        assert (held.job_id, await client.lrange("bull:case-ids:active", 0, -1)) == ("chosen", ["1"])


async def test_every_case_holds_in_real_time(tmp_path: Path, redis_url: str) -> None:
    """Memory, SQLite and BullMQ are certified by URL; cases beside each other do not disturb each other."""
    for url in ("memory://real-time", f"sqlite:///{tmp_path}/jobs.db", f"bullmq+{redis_url}"):
        await UrlHarness(url).prepare()
        certificate = await certify(lambda url=url: UrlHarness(url), CANCEL, at_once=4)
        assert certificate.broken == (), table(certificate)
        assert {result.finding for result in certificate.of(7)} == {Finding.KEPT}


async def test_a_declared_limit_is_no_fault() -> None:
    """A guarantee whose cases are partly declared away is limited, and the table names the limit."""

    class Limited(MemoryHarness):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(clock="client", durable=False, processes="one", ordering_keys=False)

    certificate = await certify(Limited, [case for case in all_cases() if case.verb == "ordering"])
    assert certificate.finding(15) is Finding.LIMIT
    assert certificate.finding(16) is Finding.PARTLY_SHOWN
    assert certificate.broken == ()
    assert "limit: the storage declares that it does not keep ordering_keys (ordering." in table(certificate)


async def test_whatever_goes_wrong_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed assertion, an exception and a case without end are each found, with a reason, and spare the others."""
    cases = [case for case in CANCEL if case.name in ("a_waiting_job_never_runs", "there_may_be_nothing_to_cancel")]
    for kind, said in ((Uncancellable, "assert await s"), (Raising, "KeyError: ")):
        certificate = await certify(harness_of(kind), cases)
        assert [said in result.detail for result in certificate.broken] == [True, True]
    monkeypatch.setattr("workers.testing.certification.LONGEST_CASE", timedelta(milliseconds=200))
    certificate = await certify(harness_of(Endless), CANCEL, at_once=len(CANCEL))
    assert {result.detail for result in certificate.broken} == {"it did not end within 0:00:00.200000"}
