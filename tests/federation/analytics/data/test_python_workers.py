"""What a Python worker of Spark does not do again and again."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.patience import PATIENCE_SECONDS

SPARED = """
import gc, pickle, sys, zipimport
from federation.analytics.data.source import FederationSource
from federation.analytics.data.tables import TABLES, TableReader
options = {"url": "sqlite:///x", "table": "server_registry"}
reader = pickle.dumps(TableReader(options, TABLES["server_registry"].schema))
sys.path.insert(0, sys.argv[1])
import first

def archives():
    return [place for place, finder in sys.path_importer_cache.items() if isinstance(finder, zipimport.zipimporter)]

assert sys.argv[1] in archives()
source = FederationSource(options)
frozen = gc.get_freeze_count()
assert archives() == []
import second
assert sys.argv[1] in archives()
pickle.loads(reader)
assert archives() == []
import third
pickle.loads(pickle.dumps(source))
assert archives() == []
print(first.name, second.name, third.name, 0 < gc.get_freeze_count() <= frozen)
"""


def test_a_source_and_a_reader_spare_the_worker_they_come_to(tmp_path: Path) -> None:
    """Archives are forgotten, and modules still found in them; what was imported before is no garbage any more."""
    archive = tmp_path / "modules.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("first", "second", "third"):
            file.writestr(f"{name}.py", f"name = {name!r}")
    command = [sys.executable, "-c", SPARED, archive]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (done.stdout, done.stderr) == ("first second third True\n", "")
