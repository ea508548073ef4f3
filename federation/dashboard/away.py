"""What a page says of a database that cannot be used: what is wrong, which one it is, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from db.errors import is_outage, local_cause

AWAY: Final = "The database does not answer"


def database_away(error: SQLAlchemyError, url: str) -> str:
    """Say why a page shows nothing, by the error's type; its text may quote a row. The password is not in it."""
    cause, kind = local_cause(error), type(error.__cause__ or error).__name__
    if cause is None and not is_outage(error):
        return (
            f"The database answers, and refuses what this page asks ({kind}). {_which(url)}."
            " `federation upgrade` makes tables that it lacks, `federation doctor` looks at them."
        )
    why = f": {cause.rstrip('?')}" if cause else f" ({kind})"
    return f"{AWAY}{why}. {_which(url)}: is it there, and may this process use it? `federation doctor` looks, too."


def _which(text: str) -> str:
    url = make_url(text)
    if url.get_backend_name() == "sqlite":
        return f"It is the file {Path(url.database or '').absolute()}, by DATABASE_URL"
    host = url.host or url.query.get("host", "this machine")
    return f"It is {url.database or 'that of its user'} at {host}:{url.port or 5432}, by DATABASE_URL"
