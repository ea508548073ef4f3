"""Where the files for operators lie, and the tools that judge them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "docs" / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "federation.json"
SYSTEMD = DEPLOY / "systemd"
COMPOSE = DEPLOY / "compose"


def tool(name: str, *, package: str) -> str:
    """The path of a program, from `PATH` or beside the interpreter; where it is not, the test says what did not run."""
    places = f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"
    found = shutil.which(name, path=places)
    if found is None:
        pytest.skip(f"{name} was not found: what it would judge is NOT JUDGED by it (apt install {package})")
    return found


def approve(*command: str, cwd: Path, **environment: str) -> str:
    """What a command says that ends well; one that does not fails the test with all it said."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
