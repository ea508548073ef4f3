"""What programs ask of the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from federation.admin import actions
from federation.admin.actions import ActionRow
from workers.dashboard.calls import LISTED, AnyCall, Call, Caller, Limit, Listing
from workers.dashboard.shapes import Between

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

MOST_ROWS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionsAsked:
    """What operators did, the latest first."""

    server: Annotated[str | None, "The URL of the server that it was about."] = None
    limit: Limit = LISTED
    after: Annotated[int | None, "Where the page before ended; its `next` has it.", Between(0, MOST_ROWS)] = None


def action_calls(federation: Federation) -> Sequence[AnyCall]:
    """Return the calls."""

    async def listed(_caller: Caller, asked: ActionsAsked) -> Listing:
        page = await actions.list_actions(
            federation.database, server_url=asked.server, limit=asked.limit, after=asked.after
        )
        return Listing(items=page.actions, after=None if page.after is None else {"after": str(page.after)})

    summary = "List what operators did, by whatever way."
    return (
        Call(
            method="GET",
            path="/actions",
            summary=summary,
            asks=ActionsAsked,
            answers=ActionRow,
            code=listed,
            lists=True,
        ),
    )
