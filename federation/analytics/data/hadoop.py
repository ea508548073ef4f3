"""What pyarrow cannot ask of Hadoop: to give a file its name only if there is none of that name.

HDFS refuses to rename a file onto another one, at once for all. But pyarrow's `move` then deletes the other one and
tries again, which would undo somebody's commit. So these are calls of libhdfs, which pyarrow has loaded before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import uuid
from typing import TYPE_CHECKING, Final

from federation.analytics.data.store_urls import hadoop_host, open_filesystem

if TYPE_CHECKING:
    from federation.analytics.data.store_urls import StoreUrl

_LIBRARY: Final = "libhdfs.so"
_ATTEMPTS: Final = 4
"""To write over a file that others write over, too."""


class HadoopPuts:
    """Writes files below `url`, each of them whole. Errors are `OSError`."""

    def __init__(self, url: StoreUrl) -> None:
        self._folder = url.folder
        self._files = open_filesystem(url)  # loads libhdfs, and the Java that it needs
        self._library = _load()
        self._connection = _connect(self._library, url)

    def put(self, name: str, data: bytes, *, over: bool = False) -> bool:
        """Write the file. Return False if there is one of that name, unless it is to be written `over`.

        If the connection was lost meanwhile, that one may be ours. Nobody can replace a file at once: one that is
        written over is not there for a moment.
        """
        folder, _, last = name.rpartition("/")
        beside = f"{folder}/.{last}.{uuid.uuid4().hex}".lstrip("/")
        with self._files.open_output_stream(beside, compression=None) as output:
            output.write(data)
        renamed = False
        try:
            renamed = self._rename_over(beside, name) if over else self._rename(beside, name)
        finally:
            if not renamed:
                with contextlib.suppress(OSError):  # else it is swept
                    self.delete(beside)
        return renamed

    def delete(self, name: str) -> None:
        """Delete the file, if it is there."""
        ctypes.set_errno(0)
        if self._library.hdfsDelete(self._connection, self._path(name), 0) and self._is_there(name):
            raise OSError(errno.EIO, f"{name} cannot be deleted")

    def _rename(self, name: str, wanted: str) -> bool:
        """Rename a file. Return False if there is one of the name that is wanted."""
        if self._library.hdfsRename(self._connection, self._path(name), self._path(wanted)) == 0:
            return True
        if self._is_there(wanted):
            return False
        raise OSError(errno.EIO, f"{name} cannot be renamed")

    def _rename_over(self, name: str, wanted: str) -> bool:
        for _ in range(_ATTEMPTS):
            if self._rename(name, wanted):
                return True
            self.delete(wanted)
        raise OSError(errno.EBUSY, f"{wanted} is written over by others")

    def _is_there(self, name: str) -> bool:
        ctypes.set_errno(0)
        if self._library.hdfsExists(self._connection, self._path(name)) == 0:
            return True
        if (code := ctypes.get_errno()) in (0, errno.ENOENT):
            return False
        raise OSError(code, f"it is not known whether {name} is there")

    def _path(self, name: str) -> bytes:
        return f"{self._folder}/{name}".encode()


def _load() -> ctypes.CDLL:
    """Return libhdfs, from where pyarrow found it."""
    home, folder = os.environ.get("HADOOP_HOME"), os.environ.get("ARROW_LIBHDFS_DIR")
    places = ["", f"{home}/lib/native/" if home else None, f"{folder}/" if folder else None]
    for place in places:
        if place is not None:
            try:
                return _declared(ctypes.CDLL(f"{place}{_LIBRARY}", use_errno=True))
            except OSError:
                continue
    raise OSError(errno.ENOENT, f"{_LIBRARY} is neither in HADOOP_HOME/lib/native nor in ARROW_LIBHDFS_DIR")


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Say which results and arguments are pointers, which ctypes would cut to 32 bits."""
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.hdfsNewBuilder.restype = library.hdfsBuilderConnect.restype = pointer
    library.hdfsBuilderConnect.argtypes = [pointer]
    library.hdfsBuilderSetNameNode.argtypes = [pointer, text]
    library.hdfsBuilderSetNameNodePort.argtypes = [pointer, ctypes.c_uint16]
    library.hdfsRename.argtypes = [pointer, text, text]
    library.hdfsDelete.argtypes = [pointer, text, ctypes.c_int]
    library.hdfsExists.argtypes = [pointer, text]
    return library


def _connect(library: ctypes.CDLL, url: StoreUrl) -> int:
    """Return a connection, which Hadoop shares among all that ask for one to the same host, and keeps."""
    host, port = hadoop_host(url)
    name = host.encode()  # libhdfs keeps the pointer until it connects
    builder = library.hdfsNewBuilder()
    library.hdfsBuilderSetNameNode(builder, name)
    library.hdfsBuilderSetNameNodePort(builder, port)
    found: int | None = library.hdfsBuilderConnect(builder)
    if found is None:
        raise OSError(ctypes.get_errno(), "Hadoop cannot be reached")
    return found
