"""An archive of the classes that Spark loads, by which Java starts in half the time.

Spark takes thousands of classes out of hundreds of jars, and Java checks and links each of them. A Java that is told
to writes down what came of it when it ends, and later ones map that into memory ("class data sharing"). Java itself
looks whether an archive fits its own build and all jars, and does without one that does not.

An archive is code: it lies where nobody else can write, `federation` in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path
from typing import Final

import pyspark

KEPT: Final = 30 * 86_400
"""How long an archive that no run uses any more is kept, in seconds."""

_QUIET: Final = "-Xlog:disable -Xlog:all=error:stderr"
"""Java would tell on stdout which classes it cannot write down, a few hundred of them."""

_PLAIN: Final = re.compile(r"[\w./@+=-]+")
"""Matches a path that needs no quotes among Java's options."""


def find_archive(java: Path) -> Path | None:
    """Return where the archive of this Java and this Spark lies, or is to lie; None if there is no place for it."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "federation"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        place, modules = directory.stat(), (java.resolve().parent.parent / "lib" / "modules").stat()
        spark = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
        jars = (spark / "jars").stat()
    except (OSError, RuntimeError):
        return None
    if place.st_uid != os.geteuid() or place.st_mode & 0o022 or not _PLAIN.fullmatch(str(directory)):
        return None
    made_of = (java.resolve(), modules.st_size, modules.st_mtime_ns, spark, pyspark.__version__, jars.st_mtime_ns)
    return directory / f"spark-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.jsa"


def java_options(archive: Path) -> str:
    """Return the options of a Java that uses the archive, or writes it down beside its place when it ends."""
    if archive.exists():
        os.utime(archive)
        return f"-XX:SharedArchiveFile={archive} {_QUIET}"
    return f"-XX:ArchiveClassesAtExit={_fresh(archive)} {_QUIET}"


def keep(archive: Path) -> None:
    """Put what a Java of this process has written down in its place, once it has ended, and remove old ones."""
    if _fresh(archive).exists():
        _fresh(archive).replace(archive)
    for other in archive.parent.glob("spark-*.jsa*"):
        if other.stat().st_mtime < time.time() - KEPT:
            other.unlink(missing_ok=True)


def _fresh(archive: Path) -> Path:
    return archive.with_name(f"{archive.name}.{os.getpid()}")
