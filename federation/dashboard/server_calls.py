"""What programs ask of servers: all, and one; and what is done about one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from federation.admin import holds, servers
from federation.admin.server_backlog import backlog_of
from federation.admin.server_pages import ServerSort, SummaryRow, page_of_servers
from federation.admin.servers import HealthEvent
from federation.admin.why import Explanation, explain
from federation.dashboard.orders import api_order
from federation.dashboard.server_pages import EVENTS, named_server
from workers.dashboard.calls import LISTED, After, AnyCall, Call, Caller, Limit, Listing
from workers.dashboard.text import short
from workers.dashboard.visit import Refusal

if TYPE_CHECKING:
    from federation.runtime.composition import Federation


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersAsked:
    """Servers, as they were counted last."""

    sort: ServerSort = ServerSort.URL
    down: Annotated[bool, "Whether the greatest comes first."] = False
    link: Annotated[str | None, "The state of the link, or `on_hold` or `resting`."] = None
    advice: Annotated[str | None, "What the analytics advise."] = None
    limit: Limit = LISTED
    after: After = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAsked:
    """One server, by its URL or its bare name."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswer:
    """What is known of a server, in sentences and as they are made.

    Of a state with more than a hundred deliveries, `why.backlog` has the number of the last count, and what it says of
    ages, reasons and codes is of the oldest hundred.
    """

    url: str
    sentences: Sequence[str]
    why: Explanation
    events: Sequence[HealthEvent]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOrder:
    """What is to be done about a server."""

    url: str
    action: Literal["probe", "hold", "release", "forget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDone:
    """What was done. `affected` is how many deliveries are held or let go; of the other actions, 1 if they did it."""

    url: str
    action: str
    affected: int
    problem: str | None


def server_calls(federation: Federation) -> Sequence[AnyCall]:
    """Return the calls."""
    calls = ServerCalls(federation)
    return (
        Call(
            method="GET",
            path="/servers",
            summary="List servers.",
            asks=ServersAsked,
            answers=SummaryRow,
            code=calls.all,
            lists=True,
        ),
        Call(
            method="GET",
            path="/server",
            summary="Say why a server gets its deliveries or not.",
            asks=ServerAsked,
            answers=ServerAnswer,
            code=calls.one,
        ),
        Call(
            method="POST",
            path="/server",
            summary="Probe a server, hold or release its deliveries, or forget it.",
            asks=ServerOrder,
            answers=ServerDone,
            code=calls.act,
        ),
    )


class ServerCalls:
    """What the calls do."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._database = federation.database

    async def all(self, _caller: Caller, asked: ServersAsked) -> Listing:
        """Return servers."""
        try:
            page = await page_of_servers(
                self._database,
                sort=asked.sort,
                descending=asked.down,
                link=asked.link,
                advice=asked.advice,
                limit=asked.limit,
                after=asked.after,
            )
        except ValueError as error:
            raise Refusal(400, f"'after': {error}.") from None
        return Listing(items=page.rows, after=None if page.after is None else {"after": page.after})

    async def one(self, _caller: Caller, asked: ServerAsked) -> ServerAnswer:
        """Return what is known of one server."""
        url = named_server(asked.url)
        why = await explain(self._federation, url, backlog=await backlog_of(self._database, url))
        events = await servers.health_events(self._database, url, limit=EVENTS)
        return ServerAnswer(url=url, sentences=[*why.sentences()], why=why, events=events)

    async def act(self, caller: Caller, asked: ServerOrder) -> ServerDone:
        """Do it."""
        url, federation, problem = named_server(asked.url), self._federation, None
        words = "deliveries" if asked.action in ("hold", "release") else "servers"
        order = api_order(caller, f"{words} {asked.action}", server_url=url)
        match asked.action:
            case "hold":
                affected = await holds.hold(federation, url, order=order)
            case "release":
                affected = (await holds.release(federation, url, order=order)).released
            case "forget":
                affected = int(await servers.forget(self._database, url, order=order))
            case "probe":
                known = await servers.show(self._database, url)
                if known is None:
                    raise Refusal(404, f"{short(url)} is not in the registry.")
                problem = await servers.probe(federation, known, order=order)
                affected = int(problem is None)
        return ServerDone(url=url, action=asked.action, affected=affected, problem=problem)
