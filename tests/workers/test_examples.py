"""The programs of docs/examples that are about queues do what they show."""

from __future__ import annotations

import runpy
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PRINTED = {
    "first_job": "hello, alice\nqueued duplicate\n",
    "failed_jobs": (
        "sent to bob@example.org at attempt 2\n"
        "job 'mail-carol' failed: UnrecoverableError: nobody is called carol\n"
        "retried: 1\n"
        "sent to carol@example.org at attempt 2\n"
    ),
    "dead_letters": "mail-1 bob nobody is called bob 1\nsent: 1 bob\n",
    "in_your_transaction": ("the card was declined: neither the order nor the job was ever there\norders: 1 jobs: 1\n"),
}


def run(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script, whose files lie in that directory."""
    monkeypatch.chdir(directory)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(name, tmp_path, monkeypatch)
    assert capsys.readouterr().out == PRINTED[name]


def test_a_task_runs_once_per_key_and_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("once_per_key", tmp_path, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line for line in lines if "report" not in line) == [
        *("duplicate", "duplicate", "queued", "reindexing posts")
    ]
    one, other = (line for line in lines if "report" in line)
    assert one == other


def test_a_rate_is_kept_for_each_customer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bucket has two tokens, so the third mail of each waits for half a second."""
    began = time.monotonic()
    run("rate_limited", tmp_path, monkeypatch)
    assert time.monotonic() - began > 0.49
    lines = capsys.readouterr().out.splitlines()
    for customer in ("ann", "bob"):
        assert [line for line in lines if line.startswith(customer)] == [f"{customer} {number}" for number in range(3)]


def test_a_task_recurs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first time comes after a second."""
    run("recurring", tmp_path, monkeypatch)
    assert capsys.readouterr().out == "tick\n"


def test_every_example_is_run_and_small() -> None:
    """By a test here, in `tests/test_readme.py` or in `tests/federation/sync/test_examples.py`."""
    elsewhere = {"script", "owe_delivery", "django_app", "fastapi_app", "flask_app"}
    small = {*PRINTED, "once_per_key", "rate_limited", "recurring", "owe_delivery", "script"}
    printed = {*PRINTED, "once_per_key", "rate_limited", "recurring"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*printed, *elsewhere}
    assert [name for name in sorted(small) if (EXAMPLES / f"{name}.py").read_text().count("\n") >= 40] == []
