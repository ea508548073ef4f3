"""What the operating system's refusals mean to a caller."""

from __future__ import annotations

import errno
import os
from typing import Final

from workers.errors import StorageError, StorageUnavailable, WorkersError

_ADVICE: Final = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file may not grow any more; raise the limit of file sizes",
    errno.EROFS: "the file system is read-only; mount it writable",
    errno.EACCES: "permission denied; the directory must belong to this process's user",
    errno.EPERM: "permission denied; the directory must belong to this process's user",
    errno.ENOENT: "it was deleted while in use; connect again",
    errno.ESTALE: "it was deleted while in use; connect again",
    errno.ENOTDIR: "a part of its path is a file; name another directory",
    errno.ENAMETOOLONG: "its path is too long; name another directory",
    errno.ELOOP: "its path goes in circles; name another directory",
}

_LASTING: Final = frozenset(_ADVICE) - {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Waiting does not help against these; against a full disk, and everything unknown, it may."""


def translate(error: OSError, place: str) -> WorkersError:
    """The error as one of ours, by its number: what is wrong with `place`, and what to do."""
    code = error.errno or 0
    message = f"{place}: {_ADVICE.get(code, os.strerror(code) if code else str(error))}"
    return StorageError(message) if code in _LASTING else StorageUnavailable(message)
