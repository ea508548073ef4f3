"""Activities of ActivityPub: what others sent, what of it could not be handled, and having it handled again.

And one that was sent: how many of its deliveries are in each state, and which are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, Literal

from fastapi import Query, Request
from pydantic import Field
from starlette.responses import Response

from db import ReceivedState
from federation.admin import received
from federation.admin.received import ReceivedRow
from federation.admin.sent_activities import SentActivity, find
from federation.dashboard.delivery_pages import DELIVERIES
from federation.dashboard.orders import MOST_ROWS, Node, api_order, command, ordered
from workers.dashboard.api import LISTED, After, ApiAnswer, ApiOrder, Caller, Id, Limit, Listing, calls, goes_on
from workers.dashboard.rendering import MenuItem
from workers.dashboard.site import SitePart
from workers.dashboard.text import short
from workers.dashboard.visit import Confirmation, Refusal, Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

RECEIVED: Final = MenuItem(title="Received", path="/received")
RETRY: Final = "/received/retry"
PER_PAGE: Final = 50
MOST_AT_ONCE: Final = 200
STATES: Final = (ReceivedState.FAILED, ReceivedState.NEW, ReceivedState.DONE)
_NUMBER_DIGITS: Final = 18

api: Final = calls()


class RetryOrder(ApiOrder):
    """Which activities are handled again: those with these numbers, or with `all` every one that failed or waits."""

    numbers: Annotated[Sequence[Annotated[int, Field(ge=0, le=MOST_ROWS)]], Field(max_length=MOST_AT_ONCE)] = ()
    all: bool = False


class HandledAgain(ApiAnswer):
    """How many are handled again that had failed, and how many now that waited for their next attempt."""

    retried: int
    hurried: int


def received_part(federation: Federation) -> SitePart:
    """Return the page; the menu leads to it where there is something to receive."""
    pages = ArrivalsPage(federation)
    menu = () if federation.activitypub is None else (RECEIVED,)
    return SitePart(menu=menu, pages={RECEIVED.path: pages.all}, actions={RETRY: pages.retry})


class ArrivalsPage:
    """What the page shows and does."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation

    async def all(self, visit: Visit) -> Response:
        """Show activities in one state, those that failed unless another is asked for."""
        _check(self._federation)
        state, after = visit.query.get("state", ""), visit.query.get("after", "")
        chosen = ReceivedState(state) if state in [*ReceivedState] else ReceivedState.FAILED
        page = await received.list_received(
            self._federation, limit=PER_PAGE, states=(chosen,), after=_number(after) if after else None
        )
        shown = {
            "page": page,
            "numbers": await received.backlog(self._federation),
            "states": [each.value for each in STATES],
            "chosen": chosen.value,
            "is_first": not after,
            "command": command("activitypub", "received", "list", state=chosen.value),
        }
        return visit.page("received.html", shown)

    async def retry(self, visit: Visit) -> Response:
        """Have one that failed handled again, or all of them."""
        _check(self._federation)
        number = _number(visit.field("number")) if visit.field("number") else None
        if not visit.is_confirmed:
            failed = (await received.backlog(self._federation)).failed if number is None else 1
            which = "--all" if number is None else str(number)
            question = "every activity that failed" if number is None else f"the activity {number}"
            most = f"{failed} at most, up to five times more each, by the functions that the workers have now."
            waiting = " What waits for its next attempt is tried now." if number is None else ""
            return visit.confirm(
                Confirmation(
                    question=f"Have {question} handled again?",
                    rows=f"{most}{waiting}",
                    verb="Handle again",
                    back=RECEIVED.path,
                    command=command("activitypub", "received", "retry", which),
                )
            )
        numbers = None if number is None else [number]
        order = ordered(visit, "activitypub received retry", numbers=numbers, all=number is None)
        done = await received.retry(self._federation, numbers, order=order)
        return visit.back(RECEIVED.path, f"{'; '.join(done.sentences())}.")


@api.get(RECEIVED.path)
async def list_received(
    request: Request,
    node: Node,
    state: Literal["failed", "new", "done"] = "failed",
    limit: Limit = LISTED,
    after: Annotated[int | None, Query(ge=0, le=MOST_ROWS, description="Where the page before ended.")] = None,
) -> Listing[ReceivedRow]:
    """List activities that others sent by ActivityPub, in the order of arrival, without their texts."""
    _check(node)
    page = await received.list_received(node, limit=limit, states=(ReceivedState(state),), after=after)
    further = None if page.after is None else str(page.after)
    return Listing(items=page.activities, next=goes_on(request, after=further))


@api.post(RETRY)
async def retry_received(node: Node, caller: Caller, asked: RetryOrder) -> HandledAgain:
    """Have activities handled again that failed, up to five times more each, and now what waits for an attempt."""
    _check(node)
    if bool(asked.numbers) == asked.all:
        raise Refusal(400, "Give 'numbers', or 'all'.")
    numbers = None if asked.all else [*asked.numbers]
    order = api_order(caller, "activitypub received retry", numbers=numbers, all=asked.all)
    done = await received.retry(node, numbers, order=order)
    return HandledAgain(retried=done.retried, hurried=done.hurried)


def _check(federation: Federation) -> None:
    if federation.activitypub is None:
        raise Refusal(404, "This node receives no activities: FEDERATION_ACTIVITYPUB=1 turns that on.")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _NUMBER_DIGITS):
        raise Refusal(400, "An activity's number is what the list shows.")
    return int(text)


LONGEST_ID: Final = 2_048


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
