"""All servers, as they were counted last: sorted, filtered, and paged by the database; the same for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import urlencode

from fastapi import Query, Request
from starlette.responses import RedirectResponse, Response

from db import LinkState
from federation.admin import overview
from federation.admin.deliveries import holds
from federation.admin.servers import servers
from federation.admin.servers.backlog import backlog_of
from federation.admin.servers.pages import ServerSort, SummaryRow, page_of_servers
from federation.admin.servers.servers import HealthEvent
from federation.admin.why import Explanation, explain
from federation.dashboard.orders import Node, api_order
from federation.dashboard.server_pages import EVENTS, SERVERS, named_server, server_address
from federation.rollups.servers import ON_HOLD, RESTING
from workers.dashboard.api import (
    LISTED,
    After,
    ApiAnswer,
    ApiOrder,
    Caller,
    Limit,
    Listing,
    Text,
    calls,
    goes_on,
)
from workers.dashboard.site import SitePart
from workers.dashboard.text import short
from workers.dashboard.visit import SEE_OTHER, Refusal, Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

PER_PAGE: Final = 100
LINKS: Final = (*(state.value for state in LinkState), ON_HOLD, RESTING)
ADVICE: Final = ("keep", "watch", "park", "prune", "review-for-blacklist")
COLUMNS: Final = (
    (ServerSort.URL, "Server"),
    (ServerSort.OWED, "Owed"),
    (ServerSort.HELD, "Held"),
    (ServerSort.GIVEN_UP, "Given up"),
    (ServerSort.SCORE, "Score"),
)
_LONGEST: Final = 600


def servers_part(federation: Federation) -> SitePart:
    """Return the page."""

    async def page(visit: Visit) -> Response:
        if wanted := visit.query.get("url", "").strip():
            return RedirectResponse(server_address(wanted), status_code=SEE_OTHER)
        sort, descending = _order(visit.query.get("sort"), visit.query.get("down"))
        link, advice = _one_of(visit.query.get("link"), LINKS), _one_of(visit.query.get("advice"), ADVICE)
        after = visit.query.get("after")
        try:
            listed = await page_of_servers(
                federation.database,
                sort=sort,
                descending=descending,
                link=link,
                advice=advice,
                limit=PER_PAGE,
                after=None if after is None else after[:_LONGEST],
            )
        except ValueError:
            raise Refusal(400, "The list does not go on there.") from None
        counted_at = await overview.counted_at(federation.database)
        chosen = {"link": link, "advice": advice}
        shown = {
            "listed": listed,
            "counted_at": counted_at,
            "stands": overview.is_old(counted_at),
            "judged": federation.settings.federation_analytics_out is not None,
            "link": link,
            "advice": advice,
            "links": LINKS,
            "advices": ADVICE,
            "sort": sort,
            "down": descending,
            "columns": [(each, title, _address(each, descending, sort, chosen)) for each, title in COLUMNS],
            "first": _list({**chosen, "sort": sort.value, "down": int(descending)}) if after else None,
            "further": listed.after
            and _list({**chosen, "sort": sort.value, "down": int(descending), "after": listed.after}),
        }
        return visit.page("servers.html", shown)

    return SitePart(menu=(SERVERS,), pages={SERVERS.path: page})


def _order(sort: str | None, down: str | None) -> tuple[ServerSort, bool]:
    """Return the order that was asked for; by default those with most owed come first."""
    if sort is None:
        return ServerSort.OWED, True
    return (ServerSort(sort) if sort in list(ServerSort) else ServerSort.URL), down == "1"


def _one_of(text: str | None, known: tuple[str, ...]) -> str | None:
    return text if text in known else None


def _address(column: ServerSort, descending: bool, sort: ServerSort, chosen: dict[str, str | None]) -> str:
    """Return where a column's heading leads: numbers come down first, and a second click turns the order."""
    down = not descending if column is sort else column is not ServerSort.URL
    return _list({**chosen, "sort": column.value, "down": int(down)})


def _list(pairs: dict[str, str | int | None]) -> str:
    return f"{SERVERS.path}?{urlencode({name: value for name, value in pairs.items() if value is not None})}"


api: Final = calls()


class ServerAnswer(ApiAnswer):
    """What is known of a server, in sentences and as they are made.

    Of a state with more than a hundred deliveries, `why.backlog` has the number of the last count, and what it says of
    ages, reasons and codes is of the oldest hundred.
    """

    url: str
    sentences: list[str]
    why: Explanation
    events: list[HealthEvent]


class ServerOrder(ApiOrder):
    """What is to be done about a server."""

    url: Text
    action: Literal["probe", "hold", "release", "forget"]


class ServerDone(ApiAnswer):
    """What was done. `affected` is how many deliveries are held or let go; of the other actions, 1 if they did it."""

    url: str
    action: str
    affected: int
    problem: str | None


@api.get("/servers")
async def list_servers(
    request: Request,
    node: Node,
    sort: ServerSort = ServerSort.URL,
    down: Annotated[bool, Query(description="Whether the greatest comes first.")] = False,
    link: Annotated[Text | None, Query(description="The state of the link, or `on_hold` or `resting`.")] = None,
    advice: Annotated[Text | None, Query(description="What the analytics advise.")] = None,
    limit: Limit = LISTED,
    after: After = None,
) -> Listing[SummaryRow]:
    """List servers, as they were counted last."""
    try:
        page = await page_of_servers(
            node.database, sort=sort, descending=down, link=link, advice=advice, limit=limit, after=after
        )
    except ValueError as error:
        raise Refusal(400, f"'after': {error}.") from None
    return Listing(items=page.rows, next=goes_on(request, after=page.after))


@api.get("/server")
async def show_server(
    node: Node, url: Annotated[Text, Query(description="The URL of the server, or its bare name.")]
) -> ServerAnswer:
    """Say why a server gets its deliveries or not."""
    named = named_server(url)
    why = await explain(node, named, backlog=await backlog_of(node.database, named))
    events = await servers.health_events(node.database, named, limit=EVENTS)
    return ServerAnswer(url=named, sentences=[*why.sentences()], why=why, events=[*events])


@api.post("/server")
async def act_on_server(node: Node, caller: Caller, asked: ServerOrder) -> ServerDone:
    """Probe a server, hold or release its deliveries, or forget it."""
    url, problem = named_server(asked.url), None
    words = "deliveries" if asked.action in ("hold", "release") else "servers"
    order = api_order(caller, f"{words} {asked.action}", server_url=url)
    match asked.action:
        case "hold":
            affected = await holds.hold(node, url, order=order)
        case "release":
            affected = (await holds.release(node, url, order=order)).released
        case "forget":
            affected = int(await servers.forget(node.database, url, order=order))
        case "probe":
            known = await servers.show(node.database, url)
            if known is None:
                raise Refusal(404, f"{short(url)} is not in the registry.")
            problem = await servers.probe(node, known, order=order)
            affected = int(problem is None)
    return ServerDone(url=url, action=asked.action, affected=affected, problem=problem)
