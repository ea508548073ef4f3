"""What is wrong when a page cannot be read, in a sentence."""

from __future__ import annotations

from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from db.errors import local_cause
from federation.base.errors import ConfigurationError, Unreachable
from workers.dashboard import catalog

AWAY: Final = "The database does not answer"


def told(error: Exception) -> str | None:
    """Say what is wrong; None for what is a fault of ours."""
    if isinstance(error, SQLAlchemyError):
        cause = local_cause(error)
        return f"{AWAY}: {cause}." if cause else f"{AWAY} ({type(error).__name__})."
    if isinstance(error, Unreachable | ConfigurationError):
        return _sentence(str(error))
    return catalog.told(error)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
