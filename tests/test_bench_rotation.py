"""The benchmark of key rotation brings the new keys to every server, and says how long that took."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests import warm
from tests.patience import PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_rotation.py"


@pytest.mark.full
def test_every_server_knows_the_new_keys() -> None:
    """The script fails where one does not, which it asks the servers."""
    command = [warm.PYTHON, str(SCRIPT), "--servers", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    [figure] = json.loads(done.stdout)["figures"]
    assert (figure["place"], figure["servers"], figure["killed"]) == ("sqlite", 3, 0)
    assert figure["met"] is (figure["value"] <= figure["bar"])
