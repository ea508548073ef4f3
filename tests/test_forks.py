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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process that uses the system's libraries cannot fork")
def test_what_forks_report_is_told(tmp_path: Path) -> None:
    """Outcomes, output, warnings, and the end of a process, whose other tests another one runs."""
    for name, text in {"conftest": CONFTEST, "test_together": TOGETHER, "test_apart": APART}.items():
        (tmp_path / f"{name}.py").write_text(dedent(text))
    plain = ["-p", "no:randomly", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-ra"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, "--basetemp", str(tmp_path / "base"), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 1
    told = done.stdout
    assert all(count in told.splitlines()[-1] for count in ("2 failed", "12 passed", "1 error"))
    assert "the process that ran this test ended: 7" in told
    assert "FAILED test_apart.py::test_fails - assert 1 == 2" in told
    assert "ERROR test_apart.py::test_ends_badly - LookupError: in a fixture's end" in told
    assert "what it said" in told
    assert "DeprecationWarning: what it warned of" in told
    assert len(list(tmp_path.glob("base/fork-0/numbered*"))) >= 9
