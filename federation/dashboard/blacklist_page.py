"""The blacklist: its rules, adding and removing one, and which rules cover a server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from starlette.responses import Response

from federation.admin import blacklist
from federation.admin.blacklist import RuleError
from federation.base.settings.types import parse_duration
from federation.dashboard.import_pages import APPLY, BLACKLIST, PLAN, ImportPages
from federation.dashboard.orders import command, ordered
from workers.dashboard.site import SitePart
from workers.dashboard.text import short
from workers.dashboard.visit import Confirmation, Refusal, Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

PER_PAGE: Final = 100
LONGEST_TEXT: Final = 2_500
LASTS: Final = (("", "for good"), ("12h", "12 hours"), ("7d", "7 days"), ("30d", "30 days"), ("365d", "a year"))


def blacklist_part(federation: Federation, imports: ImportPages) -> SitePart:
    """Return the page, and those of lists that are imported."""
    pages = BlacklistPages(federation)
    return SitePart(
        menu=(BLACKLIST,),
        pages={BLACKLIST.path: pages.all, PLAN: imports.look},
        actions={"/blacklist/add": pages.add, "/blacklist/remove": pages.remove, APPLY: imports.apply},
        uploads={PLAN: imports.plan},
    )


class BlacklistPages:
    """What the page shows and does."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._database = federation.database

    async def all(self, visit: Visit) -> Response:
        """Show the rules, and those that cover the server that was asked about."""
        url, row = visit.query.get("after", ""), visit.query.get("row", "")
        page = await blacklist.list_rules(self._database, limit=PER_PAGE, after=(url, row) if url else None)
        asked = visit.query.get("check", "").strip()[:LONGEST_TEXT]
        now = datetime.now(UTC)
        shown = {
            "entries": [(entry, entry.in_force(now)) for entry in page.entries],
            "is_first": not url,
            "further": None if page.after is None else urlencode({"after": page.after[0], "row": page.after[1]}),
            "asked": asked,
            "covering": await blacklist.check(self._database, asked) if asked else (),
            "block": visit.query.get("block", "").strip()[:LONGEST_TEXT],
            "lasts": LASTS,
        }
        return visit.page("blacklist.html", shown)

    async def add(self, visit: Visit) -> Response:
        """Put a rule in force."""
        rule, reason, lasts = (visit.field(name).strip()[:LONGEST_TEXT] for name in ("rule", "reason", "lasts"))
        if not visit.is_confirmed:
            options = {"reason": reason, "for": lasts or None}
            return visit.confirm(
                Confirmation(
                    question=f"Refuse {short(rule, 200)}?",
                    rows=f"1 rule, {dict(LASTS).get(lasts, lasts)}: {short(reason, 200)}. Nothing is sent to what it "
                    "covers or taken from it, in every process within two seconds.",
                    verb="Refuse it",
                    back=BLACKLIST.path,
                    command=command("blacklist", "add", rule, **options),
                    is_grave=True,
                )
            )
        try:
            expires_at = datetime.now(UTC) + parse_duration(lasts) if lasts else None
            change, entry = await blacklist.add(
                self._database,
                rule,
                reason=reason,
                expires_at=expires_at,
                own_url=self._federation.own_url,
                order=ordered(visit, "blacklist add", rule=rule, reason=reason, lasts=lasts),
            )
        except (RuleError, ValueError) as error:
            raise Refusal(400, short(str(error), 400)) from None
        return visit.back(BLACKLIST.path, f"{entry.rule}: {change.value}.")

    async def remove(self, visit: Visit) -> Response:
        """Lift a rule."""
        rule = visit.carried("rule")
        if not visit.is_confirmed:
            return visit.confirm(
                Confirmation(
                    question=f"Lift the rule {short(rule, 200)}?",
                    rows="1 rule, in whatever spelling it is stored.",
                    verb="Lift it",
                    back=BLACKLIST.path,
                    command=command("blacklist", "remove", rule),
                )
            )
        gone = await blacklist.remove(self._database, rule, order=ordered(visit, "blacklist remove", rule=rule))
        return visit.back(BLACKLIST.path, "The rule is lifted." if gone else "There was no such rule any more.")
