"""The code that is measured: this checkout's, or that of a commit beside it (`--against COMMIT`).

Theory of operation. Of the commit only the packages that the measured processes import are taken, with `git archive`
into a temporary directory. So nothing is left in the repository, however the run ends. Everything else is this
checkout's for both: the benchmark, the peers, the servers, the interpreter and what is installed for it. Where the
commit has another interface than this checkout's benchmark uses, it cannot be measured, and the error says what is
missing. A measured process is told its tree by a variable; whichever script it runs puts that tree first.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

ROOT: Final = Path(__file__).resolve().parents[2]
MEASURED: Final = ("workers", "federation", "db")
_VARIABLE: Final = "BENCH_TREE"


def measured_tree() -> str:
    """Return the directory from which this process is to import the packages it measures."""
    return os.environ.get(_VARIABLE, str(ROOT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Code to measure. `is_ours` tells that it is this checkout's."""

    name: str
    path: Path = ROOT
    is_ours: bool = True

    def variables(self) -> dict[str, str]:
        """Return what the environment of a measured process needs, for whatever it starts itself, too."""
        others = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, (str(self.path), str(ROOT), others)))
        return {_VARIABLE: str(self.path), "PYTHONPATH": path}

    def give_up(self, complaint: str) -> NoReturn:
        """End this process, as a measured one failed; `complaint` is what that wrote on stderr."""
        if self.is_ours:
            sys.exit(complaint)
        last = (complaint.strip().splitlines() or ["it ended without a word"])[-1]
        sys.exit(f"--against: this checkout's benchmark cannot measure {self.name}: {last}")


HERE: Final = Tree(name="here")


@contextlib.contextmanager
def trees(against: str | None) -> Iterator[list[Tree]]:
    """Yield what is to be measured in turns: this checkout, and the commit if one is given.

    Exits with one line if there is no git, no such commit, a package that the commit has not, or if the packages here
    have changes that no commit has: nobody could tell later what was compared.
    """
    if against is None:
        yield [HERE]
        return
    commit = _git(
        "rev-parse", "--verify", "--quiet", "--end-of-options", f"{against}^{{commit}}", fails="no such commit"
    )
    if changed := _git("status", "--porcelain", "--", *MEASURED):
        _refuse(f"{changed.split(maxsplit=1)[1].splitlines()[0]} has changes that are not committed")
    names = [f"{_git('rev-parse', '--short=8', name)} {where}" for name, where in (("HEAD", "here"), (commit, "there"))]
    with tempfile.TemporaryDirectory(prefix="fd-bench-") as directory:
        _extract(commit, Path(directory))
        yield [Tree(name=names[0]), Tree(name=names[1], path=Path(directory), is_ours=False)]


def _extract(commit: str, directory: Path) -> None:
    archive = _run("archive", "--format=tar", commit, *MEASURED)
    if archive.returncode:
        _refuse(f"{commit[:8]} has other packages: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(directory, filter="data")


def _git(*arguments: str, fails: str | None = None) -> str:
    done = _run(*arguments)
    if done.returncode:
        said = (done.stderr.decode().strip().splitlines() or [fails or "git failed"])[-1]
        _refuse(said)
    return done.stdout.decode().strip()


def _run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        _refuse("git is not installed")


def _refuse(reason: str) -> NoReturn:
    sys.exit(f"--against: {reason}")
