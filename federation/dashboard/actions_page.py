"""What operators did, by whatever way: the audit log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from federation.admin import actions
from workers.dashboard.rendering import MenuItem
from workers.dashboard.site import SitePart
from workers.dashboard.visit import Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

ACTIONS: Final = MenuItem(title="Actions", path="/actions")
PER_PAGE: Final = 50


def actions_part(federation: Federation) -> SitePart:
    """Return the page."""

    async def page(visit: Visit) -> Response:
        after = visit.query.get("after", "")
        listed = await actions.list_actions(
            federation.database, limit=PER_PAGE, after=int(after) if after.isdecimal() and len(after) < 19 else None
        )
        return visit.page("actions.html", {"listed": listed, "is_first": not after})

    return SitePart(menu=(ACTIONS,), pages={ACTIONS.path: page})
