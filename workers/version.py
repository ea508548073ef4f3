"""Which version this is. The build asks this file, too, and `python workers/version.py` prints it.

Each commit has a version of its own, so that a wheel of a newer one takes the place of an older one's. Only a commit
with the tag of the release, `v` and the number, has the bare number.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Final

BASE: Final = "1.0.0"
"""The release that is worked on, or that this is."""
UNKNOWN: Final = f"{BASE}.dev0+unknown"
DISTRIBUTION: Final = "federation-delivery"
GIVEN: Final = "FEDERATION_BUILD_VERSION"
"""The variable that has the version for a build without history, as within a container."""
_ROOT: Final = Path(__file__).resolve().parent.parent
_SECONDS: Final = 10


def version() -> str | None:
    """Return the version that runs: in a checkout that of its commit, else the installed one; None if there is none.

    What an editable installation notes is the version of the day on which it was made.
    """
    project = _ROOT / "pyproject.toml"
    if project.is_file() and f'name = "{DISTRIBUTION}"' in project.read_text(encoding="utf-8"):
        return of_commit(_ROOT)
    try:
        return installed(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def of_commit(root: Path = _ROOT) -> str:
    """Return the version of the commit that is checked out at `root`; where there is no history, an unknown one."""
    if given := os.environ.get(GIVEN):
        return given
    top, commit = _git(root, "rev-parse", "--show-toplevel"), _git(root, "rev-parse", "--short=8", "HEAD")
    if not commit or Path(top) != root.resolve():  # none, or another repository's around an unpacked archive
        return UNKNOWN
    if f"v{BASE}" in _git(root, "tag", "--points-at", "HEAD").split():
        return BASE
    is_cut = _git(root, "rev-parse", "--is-shallow-repository") == "true"  # so that nobody knows the number
    number = "0" if is_cut else _git(root, "rev-list", "--count", "HEAD")
    return f"{BASE}.dev{number}+g{commit}"


def _git(root: Path, *arguments: str) -> str:
    """Return what git says, or nothing where it is not, or not about this folder."""
    try:
        done = subprocess.run(  # noqa: S603 - these words, and no others
            ["git", "-C", str(root), *arguments],  # noqa: S607 - as the operator's shell finds it
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    if (told := of_commit()) == UNKNOWN:  # a newer wheel would not take the place of an older one
        print(f"git tells nothing of {_ROOT}: it is no checkout, or another user's", file=sys.stderr)  # noqa: T201 - an answer
    print(told)  # noqa: T201 - what it is asked for
