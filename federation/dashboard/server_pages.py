"""One server: why it gets its deliveries or not, what happened lately, and what can be done about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from starlette.responses import Response

from db import DeliveryState
from federation.admin.deliveries import deliveries, holds
from federation.admin.deliveries.deliveries import Selection
from federation.admin.deliveries.pages import page_of_deliveries
from federation.admin.servers import servers
from federation.admin.servers.backlog import backlog_of
from federation.admin.servers.servers import ServerRow
from federation.admin.why import Explanation, explain
from federation.dashboard.orders import command, ordered
from federation.protocol.errors import UrlError
from workers.dashboard.rendering import MenuItem
from workers.dashboard.site import SitePart
from workers.dashboard.text import counted, short
from workers.dashboard.visit import Confirmation, Refusal, Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

SERVERS: Final = MenuItem(title="Servers", path="/servers")
ATTEMPTS: Final = 20
EVENTS: Final = 20
HELD: Final = 10


def server_address(url: str) -> str:
    """Return the address of a server's page."""
    return f"/server?{urlencode({'url': url})}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAction:
    """Something that is done about a server: what the page asks before, and what does it and says what it did."""

    verb: str
    ask: Callable[[str], Awaitable[Confirmation]]
    do: Callable[[Visit, str], Awaitable[str]]


def server_part(federation: Federation) -> SitePart:
    """Return the page of one server."""
    pages = ServerPages(federation)
    return SitePart(pages={"/server": pages.one}, actions={"/server": pages.act})


class ServerPages:
    """What the page shows and does."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._database = federation.database
        self._actions: Mapping[str, ServerAction] = {
            "probe": ServerAction(verb="Probe now", ask=self._ask_probe, do=self._probe),
            "hold": ServerAction(verb="Hold deliveries", ask=self._ask_hold, do=self._hold),
            "release": ServerAction(verb="Release", ask=self._ask_release, do=self._release),
            "forget": ServerAction(verb="Forget", ask=self._ask_forget, do=self._forget),
        }

    async def one(self, visit: Visit) -> Response:
        """Show one server."""
        url = named_server(visit.query.get("url", ""))
        explanation = await explain(self._federation, url, backlog=await backlog_of(self._database, url))
        held = await page_of_deliveries(self._database, Selection(server_url=url, state=DeliveryState.HELD), limit=HELD)
        shown = {
            "here": SERVERS.path,
            "url": url,
            "why": explanation,
            "state": _state(explanation),
            "sentences": [*explanation.sentences()][: -len(explanation.attempts) or None],
            "events": await servers.health_events(self._database, url, limit=EVENTS),
            "attempts": await deliveries.last_attempts(self._database, url, limit=ATTEMPTS),
            "held": held,
            "actions": {key: self._actions[key].verb for key in _fitting(explanation)},
            "command": command("why", url),
        }
        return visit.page("server.html", shown)

    async def act(self, visit: Visit) -> Response:
        """Do something about a server, once it was confirmed."""
        url, action = named_server(visit.carried("url")), self._actions.get(visit.field("action"))
        if action is None:
            raise Refusal(400, "There is no such action.")
        if not visit.is_confirmed:
            return visit.confirm(await action.ask(url))
        return visit.back(server_address(url), await action.do(visit, url))

    async def _ask_probe(self, url: str) -> Confirmation:
        return Confirmation(
            question=f"Look now whether {short(url)} is well?",
            rows="If it is, it counts as healthy again, and what is held for it goes out.",
            verb="Probe now",
            back=server_address(url),
            command=command("servers", "probe", url),
        )

    async def _probe(self, visit: Visit, url: str) -> str:
        problem = await servers.probe(
            self._federation, await self._known(url), order=ordered(visit, "servers probe", server_url=url)
        )
        return "It is well." if problem is None else f"It is not well: {short(problem, 300)}."

    async def _ask_hold(self, url: str) -> Confirmation:
        owed = (await backlog_of(self._database, url)).open
        return Confirmation(
            question=f"Hold deliveries to {short(url)}?",
            rows=f"{_owed(owed)} to it. They and new ones wait until somebody releases them; attempts under way go on.",
            verb="Hold deliveries",
            back=server_address(url),
            command=command("deliveries", "hold", url),
        )

    async def _hold(self, visit: Visit, url: str) -> str:
        owed = await holds.hold(self._federation, url, order=ordered(visit, "deliveries hold", server_url=url))
        return f"Deliveries to it are held. {_owed(owed)} to it."

    async def _ask_release(self, url: str) -> Confirmation:
        held = (await backlog_of(self._database, url)).held
        return Confirmation(
            question=f"Release what is held for {short(url)}?",
            rows=f"{counted(held, 'delivery')} {'is' if held == 1 else 'are'} held for it. "
            "They go out slowly at first, whatever is known of the server.",
            verb="Release",
            back=server_address(url),
            command=command("deliveries", "release", url),
        )

    async def _release(self, visit: Visit, url: str) -> str:
        done = await holds.release(self._federation, url, order=ordered(visit, "deliveries release", server_url=url))
        told = f"{counted(done.released, 'delivery')} {'goes' if done.released == 1 else 'go'} out."
        return f"{told} {counted(done.in_order, 'delivery')} wait for older ones." if done.in_order else told

    async def _ask_forget(self, url: str) -> Confirmation:
        follows = await servers.count_follows(self._database, url)
        return Confirmation(
            question=f"Forget {short(url)}?",
            rows=f"1 server and {counted(follows, 'follow')} with it. It is discovered anew when something is to be "
            "delivered to it, or when it introduces itself. To keep it away, blacklist it.",
            verb="Forget",
            back=server_address(url),
            command=command("servers", "forget", url),
            is_grave=True,
        )

    async def _forget(self, visit: Visit, url: str) -> str:
        gone = await servers.forget(
            self._database, url, order=ordered(visit, "servers forget", server_url=url, url=url)
        )
        return "It is forgotten." if gone else "It was not in the registry any more."

    async def _known(self, url: str) -> ServerRow:
        server = await servers.show(self._database, url)
        if server is None:
            raise Refusal(404, f"{short(url)} is not in the registry.")
        return server


def named_server(text: str) -> str:
    """Return the canonical URL of the server that the text names.

    Raises:
        Refusal: it names none.
    """
    try:
        return servers.server_url(text.strip())
    except UrlError as error:
        raise Refusal(400, f"That is no server: {error}.") from None


def _state(why: Explanation) -> str:
    if not why.known:
        return "unknown"
    if why.rules:
        return "blacklisted"
    if why.link.operator_hold:
        return "hold"
    hold = why.link.hold(why.at)
    return "resting" if hold is not None and hold.until is not None else why.link.state.value


def _fitting(why: Explanation) -> list[str]:
    """Return what can be done about the server as it stands."""
    actions = [] if why.server is None or why.rules else ["probe"]
    actions += ["release"] if why.link.operator_hold else ["hold"]
    if why.backlog.held and not why.link.operator_hold:
        actions.append("release")
    return [*actions, *([] if why.server is None else ["forget"])]


def _owed(number: int) -> str:
    return f"{counted(number, 'delivery')} {'is' if number == 1 else 'are'} owed"
