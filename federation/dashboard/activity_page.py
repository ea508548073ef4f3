"""An activity that was sent by ActivityPub: how many of its deliveries are in each state, and which are left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from federation.admin.sent_activities import SentActivity, find
from federation.dashboard.delivery_pages import DELIVERIES
from federation.dashboard.orders import Node, command
from workers.dashboard.api import LISTED, After, ApiAnswer, Id, Limit, calls
from workers.dashboard.site import SitePart
from workers.dashboard.text import short
from workers.dashboard.visit import Refusal, Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

LONGEST_ID: Final = 2_048
PER_PAGE: Final = 50

api: Final = calls()


class ActivityAnswer(ApiAnswer):
    """An activity. A state with no deliveries is left out; `gone` ones were dropped, or given up and purged.

    `activity.after` goes on with its deliveries, None at their end.
    """

    sentences: list[str]
    activity: SentActivity


@api.get("/activity")
async def show_activity(node: Node, activity_id: Id, limit: Limit = LISTED, after: After = None) -> ActivityAnswer:
    """Show where an activity went, by its id: its deliveries by state, those that have a row, and the last attempts."""
    found = await find(node.database, activity_id, limit=limit, after=after)
    if found is None:
        raise Refusal(404, "Nothing here knows such an activity.")
    return ActivityAnswer(sentences=[*found.sentences()], activity=found)


def activity_part(federation: Federation) -> SitePart:
    """Return the page of one activity."""
    return SitePart(pages={"/activity": ActivityPage(federation).one})


class ActivityPage:
    """What the page shows."""

    def __init__(self, federation: Federation) -> None:
        self._database = federation.database

    async def one(self, visit: Visit) -> Response:
        """Show one activity."""
        activity_id = visit.query.get("id", "").strip()[:LONGEST_ID]
        found = await find(self._database, activity_id, limit=PER_PAGE, after=visit.query.get("after"))
        if found is None:
            raise Refusal(404, f"Nothing here knows an activity {short(activity_id)}.")
        shown = {
            "here": DELIVERIES.path,
            "found": found,
            "sentences": [*found.sentences()],
            "command": command("why", activity_id),
        }
        return visit.page("activity.html", shown)
