"""This node's key pairs while it runs, and the file that holds them.

Theory of operation. A rotation writes the new pair to `.env` before any server is asked to accept it, with the old one
beside it. Processes check whether the file has changed: at most once a second, and at once if they need a pair that
they do not have. So none has to be restarted, and none can miss a pair that a server may use already. Values in the
environment win over the file, and do not change until a restart.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

import structlog

from federation.base.errors import ConfigurationError
from federation.base.settings.settings import KEY_VARIABLES, OLD_KEY_VARIABLES, Settings
from federation.protocol.keys import FixedKeys, KeyRing, OwnKeys, generate_own_keys

log = structlog.get_logger(__name__)

LOOK_INTERVAL: Final = 1.0
"""Seconds between two checks of the file."""

_ASSIGNMENT: Final = re.compile(r"\s*(?:export\s+)?(\w+)\s*=")


class FileKeys(KeyRing):
    """The pairs in `file`, as `load` reads them; while it is unreadable, those that were read last."""

    def __init__(self, *pairs: OwnKeys, file: Path, load: Callable[[], tuple[OwnKeys, ...]]) -> None:
        self._pairs = pairs
        self._file = file
        self._load = load
        self._seen = _version(file)
        self._looked = time.monotonic()

    def pairs(self, *, now: bool = False) -> tuple[OwnKeys, ...]:
        if now or time.monotonic() - self._looked >= LOOK_INTERVAL:
            self._look()
        return self._pairs

    def _look(self) -> None:
        self._looked = time.monotonic()
        version = _version(self._file)
        if version is None or version == self._seen:
            return
        self._seen = version
        try:
            pairs = self._load()
        except ConfigurationError as error:
            log.error("own_keys_unreadable", problems=[problem.partition(":")[0] for problem in error.problems])
            return
        if pairs and [each.signing.public for each in pairs] != [each.signing.public for each in self._pairs]:
            self._pairs = pairs
            log.info("own_keys_read", pairs=len(pairs))


def own_key_ring(settings: Settings) -> KeyRing | None:
    """Return the key pairs of `settings`, which follow `.env` if they come from there, or None if there are none.

    Raises:
        ConfigurationError: as `Settings.key_pairs`.
    """
    pairs = settings.key_pairs()
    if not pairs:
        return None
    file = settings.key_file()
    if file is None:
        return FixedKeys(*pairs)
    return FileKeys(*pairs, file=file, load=lambda: Settings.load().key_pairs())


def begin_rotation(file: Path) -> bool:
    """Write a new pair to `file`, and the present one as the old one.

    Return False, changing nothing, if it has an old one. The pair is written completely, to the disk, or not at all;
    nobody else writes one at the same time.

    Raises:
        OSError: the file cannot be written.
        ConfigurationError: it does not hold valid keys.
    """
    with _locked(file) as text:
        settings = Settings.load()
        current, *old = settings.key_pairs()
        if old:
            return False
        held = dict(zip(OLD_KEY_VARIABLES, current.to_env().values(), strict=True))
        _replace(file, text, {**generate_own_keys().to_env(), **held})
        return True


def drop_old_pair(file: Path, *, newest: str | None = None) -> bool:
    """Remove the old pair from `file`. Return whether it had one.

    With *newest*, a public signing key, nothing happens if the new pair has another one: a new rotation has begun.

    Raises:
        OSError: the file cannot be written.
    """
    with _locked(file) as text:
        current, *old = Settings.load().key_pairs()
        if not old or newest not in (None, current.signing.public_text):
            return False
        _replace(file, text, current.to_env())
        return True


@contextmanager
def _locked(file: Path) -> Iterator[str]:
    """Yield the text of `file`, and keep other rotations from replacing it meanwhile."""
    while True:
        with open(file, encoding="utf-8") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if os.fstat(held.fileno()).st_ino == file.stat().st_ino:  # otherwise it was replaced while we waited
                yield held.read()
                return


def _replace(file: Path, text: str, values: Mapping[str, str]) -> None:
    """Replace the file as a whole, with its mode, once the new one is on the disk. All other lines stay."""
    target = file.resolve()
    ours = {*KEY_VARIABLES, *OLD_KEY_VARIABLES}
    kept = [line for line in text.splitlines(keepends=True) if _variable_of(line) not in ours]
    if kept and not kept[-1].endswith("\n"):
        kept[-1] += "\n"
    lines = [*kept, *(f'{name}="{value}"\n' for name, value in values.items())]
    number, name = tempfile.mkstemp(prefix=f"{target.name}.", suffix=".new", dir=target.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as new:
            _write(new, lines, like=target)
        os.replace(name, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _sync_directory(target.parent)


def _write(new: IO[str], lines: list[str], *, like: Path) -> None:
    status = like.stat()
    os.fchmod(new.fileno(), status.st_mode & 0o777)
    with suppress(PermissionError):  # then it belongs to the operator, who may read it as well
        os.fchown(new.fileno(), status.st_uid, status.st_gid)
    new.writelines(lines)
    new.flush()
    os.fsync(new.fileno())


def _sync_directory(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _variable_of(line: str) -> str | None:
    found = _ASSIGNMENT.match(line)
    return found[1].upper() if found else None


def _version(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
