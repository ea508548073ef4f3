"""Tests that run in forks of one process are told of as if they had run in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.warm import ROOT

CONFTEST = """
    from tests.forks import Forks

    def pytest_configure(config):
        config.pluginmanager.register(Forks(2, together="test_together.py"))
"""
TOGETHER = """
    import os, pytest

    found = set()

    @pytest.mark.parametrize("n", range(9))
    def test_one_process_runs_them(n, tmp_path_factory):
        found.add(n)
        assert n != 8 or found == set(range(9))
        tmp_path_factory.mktemp("numbered")
"""
APART = """
    import os, pytest, warnings

    def test_passes():
        pass

    def test_fails():
        print("what it said")
        assert 1 == 2

    def test_ends_its_process():
        os._exit(7)

    @pytest.mark.filterwarnings("default")
    def test_warns():
        warnings.warn("what it warned of", DeprecationWarning)

    @pytest.fixture
    def broken():
        yield
        raise LookupError("in a fixture's end")

    def test_ends_badly(broken):
        pass
"""


BREAKS_AT_THE_END = """
    import os
    from multiprocessing.util import Finalize

    def test_passes():
        Finalize(None, lambda: os._exit(3), exitpriority=100)
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a process that uses the system's libraries cannot fork"
)


def run_forked(folder: Path, **files: str) -> subprocess.CompletedProcess[str]:
    """Run these files of tests in two forks."""
    for name, text in {"conftest": CONFTEST, **files}.items():
        (folder / f"{name}.py").write_text(dedent(text))
    plain = ["-p", "no:randomly", "-p", "no:cacheprovider", "--rootdir", str(folder), "-ra"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plain, "--basetemp", str(folder / "base"), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_what_forks_report_is_told(tmp_path: Path) -> None:
    """Outcomes, output, warnings, and the end of a process, whose other tests another one runs."""
    done = run_forked(tmp_path, test_together=TOGETHER, test_apart=APART)
    assert done.returncode == 1
    told = done.stdout
    assert all(count in told.splitlines()[-1] for count in ("2 failed", "12 passed", "1 error"))
    assert "the process that ran this test ended: 7" in told
    assert "FAILED test_apart.py::test_fails - assert 1 == 2" in told
    assert "ERROR test_apart.py::test_ends_badly - LookupError: in a fixture's end" in told
    assert "what it said" in told
    assert "DeprecationWarning: what it warned of" in told
    assert len(list(tmp_path.glob("base/fork-0/numbered*"))) >= 9


def test_a_process_that_breaks_after_its_last_test_fails_the_run(tmp_path: Path) -> None:
    """All of its tests have passed by then; a green run would hide what broke."""
    done = run_forked(tmp_path, test_end=BREAKS_AT_THE_END)
    assert done.returncode == 1
    assert "a process of tests ended with 3 after its last one" in done.stdout
