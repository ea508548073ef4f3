"""What operators did, by whatever way: the audit log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from fastapi import Query, Request
from starlette.responses import Response

from federation.admin import actions
from federation.admin.actions import ActionRow
from federation.dashboard.orders import MOST_ROWS, Node
from workers.dashboard.api import LISTED, Limit, Listing, Text, calls, goes_on
from workers.dashboard.rendering import MenuItem
from workers.dashboard.site import SitePart
from workers.dashboard.visit import Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

ACTIONS: Final = MenuItem(title="Actions", path="/actions")
PER_PAGE: Final = 50

api: Final = calls()


def actions_part(federation: Federation) -> SitePart:
    """Return the page, and the call."""

    async def page(visit: Visit) -> Response:
        after = visit.query.get("after", "")
        listed = await actions.list_actions(
            federation.database, limit=PER_PAGE, after=int(after) if after.isdecimal() and len(after) < 19 else None
        )
        return visit.page("actions.html", {"listed": listed, "is_first": not after})

    return SitePart(menu=(ACTIONS,), pages={ACTIONS.path: page}, calls=api.routes)


@api.get("/actions")
async def list_actions(
    request: Request,
    node: Node,
    server: Annotated[Text | None, Query(description="The URL of the server that it was about.")] = None,
    limit: Limit = LISTED,
    after: Annotated[
        int | None, Query(ge=0, le=MOST_ROWS, description="Where the page before ended; its `next` has it.")
    ] = None,
) -> Listing[ActionRow]:
    """List what operators did, by whatever way, the latest first."""
    page = await actions.list_actions(node.database, server_url=server, limit=limit, after=after)
    further = None if page.after is None else str(page.after)
    return Listing(items=page.actions, next=goes_on(request, after=further))
