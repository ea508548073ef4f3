"""The benchmarks compare a checkout with a commit, by turns, or say in one line why they cannot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from tests.patience import LONG_PATIENCE_SECONDS, PATIENCE_SECONDS

ROOT: Final = Path(__file__).parent.parent
FEW: Final = {
    "bench_apart.py": ("--systems", "sqlite", "--jobs", "20", "--repeat", "1", "--concurrency", "5"),
    "bench_queue.py": ("--storage", "memory", "--jobs", "20", "--repeat", "1", "--concurrency", "5"),
    "bench_delivery.py": ("--queue", "sqlite", "--servers", "2", "--deliveries", "20"),
}
OF_TESTS: Final = ("__init__.py", "patience.py", "servers.py", "interop/__init__.py", "interop/peer.py")

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


class Checkout:
    """A small repository with our code, and whatever commits a test makes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.temporary = directory.with_name(f"{directory.name}-temporary")
        self.temporary.mkdir()
        for package in ("workers", "federation", "db", "scripts"):
            shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / ".gitignore", directory / ".gitignore")
        for name in OF_TESTS:
            (directory / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "tests" / name, directory / "tests" / name)

    def git(self, *arguments: str) -> str:
        who = ("-c", "user.name=A", "-c", "user.email=a@a.example", "-c", "commit.gpgsign=false")
        command = ["git", *who, *arguments]
        return subprocess.run(command, cwd=self.directory, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self) -> str:
        """What stands there now is committed; the short name of the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "a commit")
        return self.git("rev-parse", "--short=8", "HEAD")

    def command(self, script: str, *options: str) -> list[str]:
        """Not by `warm.PYTHON`, which has imported the code of another tree."""
        return [sys.executable, str(self.directory / "scripts" / script), *options]

    @property
    def environment(self) -> dict[str, str]:
        ceiling = str(self.directory.parent)
        return {**os.environ, "PYTHONPATH": "", "TMPDIR": str(self.temporary), "GIT_CEILING_DIRECTORIES": ceiling}

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*command),
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=LONG_PATIENCE_SECONDS,
            check=False,
        )

    def refused(self, commit: str, **variables: str) -> str:
        """What is said of the commit when it cannot be compared, as every benchmark would: without its imports."""
        code = "import sys; from bench.trees import trees\nwith trees(sys.argv[1]): print('measured')"
        environment = {**self.environment, "PYTHONPATH": str(self.directory / "scripts"), **variables}
        command = [sys.executable, "-c", code, commit]
        return self.line(subprocess.run(command, env=environment, capture_output=True, text=True, check=False))

    def line(self, done: subprocess.CompletedProcess[str]) -> str:
        """What it said, which is one line, when it ended; nothing is left behind."""
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert list(self.temporary.iterdir()) == []
        (line,) = done.stderr.splitlines()
        return line.removeprefix("--against: ")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path / "checkout")
    checkout.git("init", "--quiet")
    return checkout


@pytest.mark.full
def test_a_commits_storages_are_measured_beside_ours(checkout: Checkout) -> None:
    """In a row each, with the ratio below, and nothing is left of the commit's code."""
    before = checkout.commit()
    (checkout.directory / "workers" / "new.py").write_text('"""New."""\n')
    now = checkout.commit()
    for script in ("bench_apart.py", "bench_queue.py"):
        done = checkout.run(script, *FEW[script], "--against", "HEAD~1")
        assert done.returncode == 0, done.stderr
        (rows,) = json.loads(done.stdout)["tables"].values()
        assert [row["code"] for row in rows] == [f"{now} here", f"{before} there", "ratio"]
        here, there, ratio = (row["processed_per_s"] for row in rows)
        assert ratio == pytest.approx(here / there, rel=0.01)
        assert list(checkout.temporary.iterdir()) == []
    assert checkout.git("worktree", "list").count("\n") == 0


@pytest.mark.full
def test_a_commits_worker_is_measured_beside_ours(checkout: Checkout) -> None:
    """Each delivers as much, on nodes of their own."""
    name = checkout.commit()
    done = checkout.run("bench_delivery.py", *FEW["bench_delivery.py"], "--against", "HEAD", "--repeat", "2")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row["worker"] for row in told["rows"]] == [f"{name} here", f"{name} there"]
    assert all(row["deliveries_per_s"] > 0 and not row["failed"] for row in told["rows"])
    (ratio,) = told["ratios"]
    assert ratio["worker"] == f"{name} here / {name} there"
    assert ratio["deliveries_per_s"] > 0


@pytest.mark.full
@pytest.mark.spread("script")
@pytest.mark.parametrize("script", FEW)
def test_the_measured_code_is_the_commits(checkout: Checkout, script: str) -> None:
    """Where that has not what the benchmark uses, the one line says what is missing."""
    changed = "federation/runtime/composition.py" if script == "bench_delivery.py" else "workers/__init__.py"
    package = checkout.directory / changed
    complete = package.read_text()
    package.write_text("raise ImportError('it was written later')\n")
    old = checkout.commit()
    package.write_text(complete)
    checkout.commit()
    problem = f"this checkout's benchmark cannot measure {old} there: ImportError: it was written later"
    assert checkout.line(checkout.run(script, *FEW[script], "--against", old)) == problem


def test_what_cannot_be_compared_is_refused(checkout: Checkout) -> None:
    """In one line, before anything is measured."""
    first = checkout.commit()
    shutil.move(checkout.directory / "db", checkout.directory / "database")
    without_db = checkout.commit()
    shutil.move(checkout.directory / "database", checkout.directory / "db")
    checkout.commit()
    assert checkout.refused("no-such-branch") == "no such commit"
    assert checkout.refused("--all") == "no such commit"
    refusal = checkout.refused(without_db)
    assert refusal.startswith(f"{without_db} has other packages: ")
    assert "db" in refusal
    assert checkout.refused(first, PATH="/nowhere") == "git is not installed"
    (checkout.directory / "workers" / "jobs" / "new.py").write_text('"""New."""\n')
    assert checkout.refused(first) == "workers/jobs/new.py has changes that are not committed"
    shutil.rmtree(checkout.directory / ".git")
    assert "not a git repository" in checkout.refused(first)


@pytest.mark.full
def test_an_interrupted_comparison_leaves_nothing_behind(checkout: Checkout) -> None:
    """Neither the commit's code nor a process that measures it."""
    checkout.commit()
    many = ("bench_queue.py", "--storage", "sqlite", "--concurrency", "1", "--jobs", "1000000", "--against", "HEAD")
    command = checkout.command(*many)
    with subprocess.Popen(command, env=checkout.environment, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not any(checkout.temporary.glob("*/queue.sqlite3")):
            assert time.monotonic() < deadline, "it has measured nothing"
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=PATIENCE_SECONDS) == -signal.SIGINT
    assert not [pid for pid in measuring(checkout.directory) if pid != run.pid]
    assert list(checkout.temporary.iterdir()) == []


def measuring(directory: Path) -> list[int]:
    """The processes that run a script of this checkout."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(directory).encode() in command.read_bytes():
                found.append(int(command.parent.name))
        except OSError:
            continue
    return found
