"""Directories and files that are replaced whole: readers find the old one or the fresh one, never a part of either.

Work goes on in `.staging` inside the target directory, a name that no reader looks at. A lock on the directory, which
ends with its process, keeps a second writer out. So what lies in `.staging` when a writer begins was left by a dead
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from federation.analytics.errors import DirectoryUnusable

STAGING: Final = ".staging"

_OLD: Final = ".old"
_AT_CWD: Final = -100
_RENAME_EXCHANGE: Final = 2


@contextlib.contextmanager
def staging_in(directory: Path) -> Iterator[Path]:
    """Yield an empty directory to work in, which is removed afterwards. Nobody else works in `directory` meanwhile.

    If `directory` does not exist, it is made.

    Raises:
        DirectoryUnusable: another process works there, or it cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise DirectoryUnusable(f"cannot write to {directory}: {error.strerror}; choose another directory") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryUnusable(f"another run is writing to {directory}; wait until it has ended") from None
        staging = directory / STAGING
        _clear(staging, directory)
        try:
            staging.mkdir()
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(descriptor)


def replace_directory(fresh: Path, place: Path) -> None:
    """Replace `place` by `fresh`, in one step where the system can exchange two directories (Linux, local disks).

    Elsewhere this takes two steps: if a process dies in between, there is none, and the next `staging_in` puts the old
    one back. `fresh` must lie as deep in `.staging` as `place` does in the target directory.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    for file in fresh.rglob("*"):
        sync(file)
    if not place.exists():
        fresh.rename(place)
    elif not _exchange(fresh, place):
        old = fresh.with_name(fresh.name + _OLD)
        place.rename(old)
        fresh.rename(place)
    sync(place.parent)


def replace_file(fresh: Path, place: Path) -> None:
    """Replace `place` by `fresh`, in one step."""
    place.parent.mkdir(parents=True, exist_ok=True)
    sync(fresh)
    fresh.replace(place)
    sync(place.parent)


def write_file(text: str, place: Path) -> Path:
    """Write `text` to `place`, whole or not at all. Readers of the old file are not disturbed."""
    beside = place.with_name(f".{place.name}")
    beside.write_text(text, encoding="utf-8")
    return beside.replace(place)


def _clear(staging: Path, directory: Path) -> None:
    if not staging.exists():
        return
    for old in staging.rglob(f"*{_OLD}"):
        place = directory / old.relative_to(staging).with_name(old.name.removesuffix(_OLD))
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            old.rename(place)
    shutil.rmtree(staging)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the two directories at once. Return False if the system has no such call for them."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def sync(path: Path) -> None:
    """Make sure that the file survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
