"""How connections to a PostgreSQL database are made, by what its URL says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import psycopg
from sqlalchemy import URL

from workers.errors import StorageError
from workers.storage.sql.postgres.silence import OwnConnection, Patience

_NOTIFY: Final = "notify"
_PATIENT: Final[Mapping[str, object]] = {
    "connect_timeout": 6,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}
"""What libpq and the kernel do about a server that is gone, unless the URL says otherwise."""


def read_notify(url: URL) -> tuple[URL, bool]:
    """Return the URL as libpq has it, and whether the server may be listened to: not with `notify=off`.

    Raises:
        StorageError: `notify` is something else.
    """
    said = url.query.get(_NOTIFY, "on")
    if said not in ("on", "off"):
        raise StorageError("`notify` in the URL of a PostgreSQL database is `on` or `off`")
    return url.difference_update_query([_NOTIFY]), said == "on"


def check_parameters(url: URL) -> None:
    """Accept a URL whose parameters libpq knows, which would else be an error of each connection.

    Raises:
        StorageError: it has another one.
    """
    known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
    unknown = sorted(url.query.keys() - known)
    if unknown:
        raise StorageError(f"the URL of a PostgreSQL database has no parameter {unknown[0][:40]!r}")


def driver_arguments(url: URL, *, notify: bool) -> dict[str, Any]:  # what psycopg takes
    """Return what psycopg is told beside what the URL says; what is prepared belongs to a session."""
    ours = {name: value for name, value in _PATIENT.items() if name not in url.query}
    return {**ours, "client_encoding": "UTF8", **({} if notify else {"prepare_threshold": None})}


def connect(url: URL, patience: Patience, *, notify: bool, **more: Any) -> OwnConnection:  # what psycopg takes
    """Open a connection of our own."""
    arguments, said = url.get_dialect()().create_connect_args(url)
    return patience.connect(*arguments, **{**said, **driver_arguments(url, notify=notify), **more})
