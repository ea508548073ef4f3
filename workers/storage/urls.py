"""Opening of storages by URL; the table of schemes lists them all."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, unquote, urlencode
from weakref import WeakValueDictionary

from workers.errors import StorageError
from workers.extras import extra_with, install
from workers.storage.base import Storage
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.storage.redis_urls import SCHEMES as DEPLOYMENT_SCHEMES

DEFAULT_QUEUE: Final = "default"

Opener: TypeAlias = Callable[[str, str], Storage]


def open_storage(url: str, *, queue: str | None = None) -> Storage:
    """Return the storage that `url` names, not connected yet.

    The queue is `queue`, else the URL's `?queue=`, else `default`. Storages on the same `memory://` URL share their
    jobs for as long as one of them is referred to.

    Raises:
        StorageError: an unknown scheme or parameter, a malformed URL, or a package that is not installed; no password
            is quoted.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in SCHEMES:
        found = f"scheme {scheme[:40]!r}" if separator else "none"
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise StorageError(f"a storage's URL begins with one of {known}, not with {found}")
    target, named = _without_queue(url)
    return SCHEMES[scheme](target, queue if queue is not None else named or DEFAULT_QUEUE)


def _without_queue(url: str) -> tuple[str, str | None]:
    """Return the URL without its `?queue=`, and the queue that it names.

    Nothing else is touched: `sqlite://` counts slashes.
    """
    target, _, query = url.partition("?")
    parameters = parse_qsl(query, keep_blank_values=True)
    others = urlencode([(name, value) for name, value in parameters if name != "queue"])
    return f"{target}?{others}" if others else target, dict(parameters).get("queue")


_EXTRAS: Final = {
    "sqlite": "sqlite",
    "postgresql": "postgres",
    "postgres": "postgres",
    "redis": "redis",
    "rediss": "redis",
    "bull": "redis",
    "bullmq": "bullmq",
}
"""The extra that installs the packages a storage needs, by its scheme without what follows a plus sign."""


def _of(module: str, name: str, *, parameters: bool = True) -> Opener:
    """Return an opener that imports `workers.storage.<module>.<name>` at its first call, with the packages it needs."""

    def opened(url: str, queue: str) -> Storage:
        if not parameters:
            _refuse_parameters(url)
        try:
            storage: Storage = getattr(import_module(f"workers.storage.{module}"), name)(url, queue)
        except ModuleNotFoundError as error:
            extra = extra_with(error, part=_EXTRAS[url.partition("://")[0].partition("+")[0]])
            if extra is None:
                raise
            raise StorageError(f"{name} needs the package {error.name!r}: {install(extra)}") from error
        return storage

    return opened


_spaces: WeakValueDictionary[str, MemorySpace] = WeakValueDictionary()


def _refuse_parameters(url: str) -> None:
    """Accept a URL that says nothing beside its queue.

    Raises:
        StorageError: it does, so that nobody takes for set what nothing reads.
    """
    target, _, query = url.partition("?")
    if query:
        names = ", ".join(name[:40] for name in dict(parse_qsl(query, keep_blank_values=True)))
        raise StorageError(
            f"a URL of {target.partition(':')[0]}:// has no parameter but `queue`; it has {names or query[:40]}"
        )


def _memory(url: str, queue: str) -> Storage:
    _refuse_parameters(url)
    space = _spaces.get(url)
    if space is None:
        space = _spaces[url] = MemorySpace()
    return MemoryStorage(space, queue)


def _file(url: str, queue: str) -> Storage:
    """Open the directory in `file:///dir`."""
    from workers.storage.file import FileStorage

    _refuse_parameters(url)
    host, slash, path = url.removeprefix("file://").partition("/")
    if host or not path:
        raise StorageError("a directory is named as file:///path/to/directory")
    return FileStorage(unquote(slash + path), queue)


_SERVERS: Final = ("redis", "rediss", "unix", *DEPLOYMENT_SCHEMES)

SCHEMES: Final[dict[str, Opener]] = {
    "memory": _memory,
    "file": _file,
    "sqlite": _of("sql", "SqlStorage", parameters=False),
    "sqlite+aiosqlite": _of("sql", "SqlStorage", parameters=False),
    "postgresql": _of("sql", "SqlStorage"),
    "postgresql+psycopg": _of("sql", "SqlStorage"),
    "postgres": _of("sql", "SqlStorage"),
    **dict.fromkeys(("redis", "rediss", *DEPLOYMENT_SCHEMES), _of("redis", "RedisStorage")),
    **{f"bull+{scheme}": _of("bull", "BullStorage") for scheme in _SERVERS},
    **{f"bullmq+{scheme}": _of("bullmq", "BullMQStorage") for scheme in _SERVERS},
}
