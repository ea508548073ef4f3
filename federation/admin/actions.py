"""What an administrator sees of what operators did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import select
from sqlmodel import col

from db import ActionSource, AdminAction, Database


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRow:
    """One action. Without `finished_at` it is under way, or its process died; `affected` says how far it came."""

    id: int
    at: datetime
    actor: str
    source: ActionSource
    action: str
    arguments: dict[str, Any]  # as `Order` had them
    server_url: str | None
    affected: int
    finished_at: datetime | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionPage:
    """Part of a list; `after` continues it, None at its end."""

    actions: tuple[ActionRow, ...]
    after: int | None


async def list_actions(
    database: Database, *, server_url: str | None = None, limit: int = 50, after: int | None = None
) -> ActionPage:
    """Return up to *limit* actions, or those about one server, the latest first, from where the page before ended."""
    action_id = col(AdminAction.id)
    query = select(*_COLUMNS).order_by(action_id.desc()).limit(limit + 1)
    if server_url is not None:
        query = query.where(col(AdminAction.server_url) == server_url)
    if after is not None:
        query = query.where(action_id < after)
    found = [_row(dict(row._mapping)) for row in await database.rows(query)]
    return ActionPage(actions=tuple(found[:limit]), after=found[limit - 1].id if len(found) > limit else None)


def _row(values: dict[str, Any]) -> ActionRow:
    return ActionRow(**values | {"arguments": json.loads(values["arguments"])})


_NAMES: Final = ("id", "at", "actor", "source", "action", "arguments", "server_url", "affected", "finished_at", "error")
_COLUMNS: Final = tuple(col(getattr(AdminAction, name)) for name in _NAMES)
