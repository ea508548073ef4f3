"""Attempts as they end: the newest hundred, narrowed down by whoever looks, from one reader for all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from db import AttemptOutcome
from federation.admin.attempt_feed import AttemptReader
from federation.admin.attempts import LoggedAttempt, newest_attempts
from workers.clock import monotonic
from workers.dashboard.feed import Fragments, LiveSource, Parameters
from workers.dashboard.rendering import MenuItem, Templates
from workers.dashboard.site import SitePart
from workers.dashboard.visit import Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

LIVE: Final = MenuItem(title="Live", path="/live-attempts")
KEPT: Final = 1_000
"""How many attempts are remembered, for whoever narrows them down."""
SHOWN: Final = 100
AT_ONCE: Final = 2
"""How many pages of the log one reading takes at most; further ones are for the next."""
FRESH: Final = 0.5
"""Seconds for which a reading serves everybody."""
STALE: Final = 30.0
"""Seconds after which nobody has looked, and the window begins anew."""
FILTERS: Final = ("server", "outcome", "code")


class AttemptWindow:
    """The newest attempts of the log, read by whoever looks first and kept for the others."""

    def __init__(self, federation: Federation) -> None:
        self._database = federation.database
        self._reader = AttemptReader(self._database)
        self._newest: deque[LoggedAttempt] = deque(maxlen=KEPT)
        self._read_at = -STALE

    async def matching(self, chosen: Mapping[str, str]) -> list[LoggedAttempt]:
        """Return the newest attempts that match, the latest first."""
        await self._read()
        found = [each for each in reversed(self._newest) if _matches(each, chosen)]
        return found[:SHOWN]

    async def _read(self) -> None:
        now = monotonic()
        if now - self._read_at < FRESH:
            return
        if now - self._read_at >= STALE:
            await self._begin()
        for _ in range(AT_ONCE):
            attempts, more = await self._reader.read()
            seen = {each.id for each in self._newest}
            self._newest.extend(each for each in attempts if each.id not in seen)
            if not more:
                break
        self._read_at = now

    async def _begin(self) -> None:
        self._reader = AttemptReader(self._database)
        await self._reader.start()
        self._newest.clear()
        self._newest.extend(await newest_attempts(self._database, SHOWN))


def _matches(attempt: LoggedAttempt, chosen: Mapping[str, str]) -> bool:
    server, outcome, code = (chosen.get(name, "").strip() for name in FILTERS)
    return (
        server.lower() in attempt.server_url.lower()
        and outcome in ("", attempt.outcome.value)
        and (not code or code.lower() in (attempt.code or "").lower())
    )


def live_part(federation: Federation) -> SitePart:
    """Return the page."""
    window = AttemptWindow(federation)

    async def page(visit: Visit) -> Response:
        chosen = {name: visit.query.get(name, "") for name in FILTERS}
        parameters = tuple(sorted((name, value) for name, value in chosen.items() if value))
        shown = {
            "attempts": await window.matching(chosen),
            "chosen": chosen,
            "outcomes": [outcome.value for outcome in AttemptOutcome],
        }
        return visit.page("live.html", shown, live="attempts", parameters=parameters)

    def live(templates: Templates) -> LiveSource:
        async def read(parameters: Parameters) -> Fragments:
            attempts = await window.matching(dict(parameters))
            return {"attempts-live": templates.render("parts/live.html", attempts=attempts)}

        return read

    return SitePart(menu=(LIVE,), pages={LIVE.path: page}, live={"attempts": live})
