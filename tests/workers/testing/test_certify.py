"""Any storage can be certified by its URL, and the report says what was found."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from workers.jobs import CancelResult, Claim
from workers.storage.base import Limits, Storage
from workers.storage.memory import MemoryStorage
from workers.storage.urls import SCHEMES
from workers.testing import Finding, MemoryHarness, UrlHarness, all_cases, certify, table
from workers.testing.__main__ import main
from workers.testing.case import GUARANTEES

ROOT = Path(__file__).resolve().parents[3]
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
    """Exit 0, one line per guarantee, and what could not be shown is said."""
    assert main(["memory://", "--case", "retention."]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in GUARANTEES.values())
    assert "not shown: this needs a clock the harness can move (retention." in printed
    assert "certified: none of" in printed
    assert "BROKEN" not in printed


def test_the_command_speaks_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same findings for programs; tables that are missing were made."""
    assert main([f"sqlite:///{tmp_path}/jobs.db", "--case", "cancel.", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["certified"] is True
    assert [row["guarantee"] for row in found["guarantees"]] == list(GUARANTEES)
    assert {row["finding"] for row in found["guarantees"] if row["guarantee"] in (2, 7)} == {"kept"}
    assert [case["case"] for case in found["cases"]] == [case.id for case in CANCEL]


def test_the_command_names_what_is_broken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1, with each failing case, its promise and the assertion that failed."""
    kept = [Uncancellable(queue="kept")]
    monkeypatch.setitem(SCHEMES, "broken", lambda url, queue: Uncancellable(kept[0]._space, queue))
    assert main(["broken://", "--case", "cancel.a_waiting"]) == 1
    printed = capsys.readouterr().out
    assert " 7  cancelled means never run; waiters are told at once " in printed
    assert "broken     1 broken" in printed
    assert "broken: cancel.a_waiting_job_never_runs: A queued, prioritised, scheduled or failing job" in printed
    assert "assert await state(storage, job_id) is JobState.CANCELLED" in printed
    assert "BROKEN: 1 of 1 cases failed" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pigeon://user:s3cret@host"], "StorageError: a storage's URL begins with one of memory://"),
        (["bullmq+redis://:s3cret@127.0.0.1:1/0"], "StorageUnavailable"),
        (["memory://", "--case", "no such case"], "no case's id contains 'no such case'"),
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


async def test_every_case_holds_in_real_time(tmp_path: Path, redis_url: str) -> None:
    """Memory, SQLite and BullMQ are certified by URL; cases beside each other do not disturb each other."""
    for url in ("memory://real-time", f"sqlite:///{tmp_path}/jobs.db", f"bullmq+{redis_url}"):
        await UrlHarness(url).prepare()
        certificate = await certify(lambda url=url: UrlHarness(url), CANCEL, at_once=4)
        assert certificate.broken == (), table(certificate)
        assert certificate.finding(7) is Finding.KEPT


async def test_a_declared_limit_is_no_fault() -> None:
    """A guarantee whose cases are partly declared away is limited, and the table names the limit."""

    class Limited(MemoryHarness):
        @property
        def limits(self) -> Limits:
            return Limits(clock="client", durable=False, processes="one", ordering_keys=False)

    certificate = await certify(Limited, [case for case in all_cases() if case.verb == "ordering"])
    assert certificate.finding(15) is Finding.LIMIT
    assert certificate.finding(16) is Finding.KEPT
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
