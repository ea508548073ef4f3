"""What a Python worker of Spark does not do again and again."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

SPARED = """
import gc, importlib, sys, zipimport
sys.path.insert(0, sys.argv[1])
import first
from federation.analytics.python_workers import spare_worker

def archives():
    return [place for place, finder in sys.path_importer_cache.items() if isinstance(finder, zipimport.zipimporter)]

assert sys.argv[1] in archives()
spare_worker()
frozen = gc.get_freeze_count()
assert archives() == []
import second
assert sys.argv[1] in archives()
spare_worker()
assert archives() == []
print(first.name, second.name, 0 < gc.get_freeze_count() <= frozen)
"""


def test_archives_are_forgotten_until_they_are_needed(tmp_path: Path) -> None:
    """Modules are still found in them; what was imported before is no garbage, what came later may be."""
    archive = tmp_path / "modules.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("first", "second"):
            file.writestr(f"{name}.py", f"name = {name!r}")
    done = subprocess.run([sys.executable, "-c", SPARED, archive], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("first second True\n", "")
