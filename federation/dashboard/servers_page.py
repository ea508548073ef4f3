"""All servers, as they were counted last: sorted, filtered, and paged by the database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from db import LinkState
from federation.admin import overview
from federation.admin.servers.pages import ServerSort, page_of_servers
from federation.dashboard.server_pages import SERVERS, server_address
from federation.rollups.servers import ON_HOLD, RESTING
from workers.dashboard.site import SitePart
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
