"""The blacklist: its rules, adding and removing one, and which rules cover a server; as pages, and for programs."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlencode

from fastapi import Body, Query, Request
from pydantic import Field
from starlette.responses import Response

from federation.admin import blacklist
from federation.admin.blacklist import Change, Changed, CsvError, Entry, ImportPlan, LineNote, RuleError, WantedRule
from federation.admin.deliveries.bulk_jobs import BulkJobs
from federation.base.settings.types import parse_duration
from federation.dashboard.import_pages import APPLY, BLACKLIST, PLAN, SHOWN, ImportPages, is_long
from federation.dashboard.orders import Node, api_order, command, ordered
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


api: Final = calls()


class CheckAnswer(ApiAnswer):
    """The rules in force that cover the server; there are none if it is not blacklisted."""

    blacklisted: bool
    rules: list[Entry]


class RuleOrder(ApiOrder):
    """A rule to put in force."""

    rule: Annotated[Text, Field(description="`https://evil.example`, or `*.evil.example` with everything below it.")]
    reason: Text
    lasts: Annotated[Text | None, Field(max_length=40, description="For how long, as `30d`; without it, for good.")] = (
        None
    )


class RuleDone(ApiAnswer):
    """What became of the rule, and its row."""

    change: Change
    entry: Entry


class NamedRule(ApiOrder):
    """A rule, in whatever spelling it is stored."""

    rule: Text


class RuleLifted(ApiAnswer):
    """The rows of the rule that are gone, which may be none."""

    rows: list[Entry]


class ImportAnswer(ApiAnswer):
    """How many rules an import adds, changes, and leaves as they are, and the first hundred of each kind.

    `skipped` lines say nothing that is ours to do, `bad` ones are wrong. `imported` tells whether it was done. An
    import of more than 1 000 rules is done by the `job` of that number, and `GET /bulk` tells how far it is.
    """

    imported: bool
    job: int | None
    added: int
    changed: int
    unchanged: int
    skipped: int
    bad: int
    first_added: list[WantedRule]
    first_changed: list[Changed]
    first_skipped: list[LineNote]
    first_bad: list[LineNote]


@api.get("/blacklist")
async def list_rules(
    request: Request, node: Node, limit: Limit = LISTED, after: After = None, row: After = None
) -> Listing[Entry]:
    """List the rules in their order, those that are over included."""
    begin = None if after is None else (after, row or "")
    page = await blacklist.list_rules(node.database, limit=limit, after=begin)
    further, further_row = page.after or (None, None)
    return Listing(items=page.entries, next=goes_on(request, after=further, row=further_row))


@api.get("/blacklist/check")
async def check_server(
    node: Node, url: Annotated[Text, Query(description="The URL of the server, or its bare name.")]
) -> CheckAnswer:
    """Say which rules cover a server."""
    rules = await blacklist.check(node.database, url.strip())
    return CheckAnswer(blacklisted=bool(rules), rules=[*rules])


@api.post("/blacklist/add")
async def add_rule(node: Node, caller: Caller, asked: RuleOrder) -> RuleDone:
    """Put a rule in force."""
    order = api_order(caller, "blacklist add", rule=asked.rule, reason=asked.reason, lasts=asked.lasts)
    try:
        change, entry = await blacklist.add(
            node.database,
            asked.rule,
            reason=asked.reason,
            expires_at=datetime.now(UTC) + parse_duration(asked.lasts) if asked.lasts else None,
            own_url=node.own_url,
            order=order,
        )
    except (RuleError, ValueError, OverflowError) as error:
        raise Refusal(400, short(str(error), 400)) from None
    return RuleDone(change=change, entry=entry)


@api.post("/blacklist/remove")
async def remove_rule(node: Node, caller: Caller, asked: NamedRule) -> RuleLifted:
    """Lift a rule."""
    order = api_order(caller, "blacklist remove", rule=asked.rule)
    return RuleLifted(rows=[*await blacklist.remove(node.database, asked.rule, order=order)])


@api.post("/blacklist/import")
async def import_list(
    node: Node,
    caller: Caller,
    uploaded: Annotated[bytes, Body(media_type="text/csv")],
    dry_run: bool = True,
    skip_bad: Annotated[
        bool, Query(description="Import the rest where rows are wrong; otherwise nothing is imported then.")
    ] = False,
) -> ImportAnswer:
    """Import a list. By default nothing is imported: the answer says what would change."""
    try:
        plan = await blacklist.plan_import(node.database, io.BytesIO(uploaded), own_url=node.own_url)
    except CsvError as error:
        raise Refusal(400, short(str(error), 400)) from None
    if dry_run or (plan.bad and not skip_bad):
        return _answer(plan, imported=False)
    order = api_order(caller, "blacklist import", skip_bad=skip_bad)
    if is_long(plan):
        job = await BulkJobs(node).start_import(uploaded, skip_bad=skip_bad, order=order)
        return _answer(plan, imported=False, job=job)
    await blacklist.apply_import(node.database, plan, skip_bad=skip_bad, order=order)
    return _answer(plan, imported=True)


def _answer(plan: ImportPlan, *, imported: bool, job: int | None = None) -> ImportAnswer:
    kinds = ("added", "changed", "unchanged", "skipped", "bad")
    found = {kind: getattr(plan, kind) for kind in kinds}
    return ImportAnswer(
        imported=imported,
        job=job,
        **{kind: len(each) for kind, each in found.items()},
        **{f"first_{kind}": [*each[:SHOWN]] for kind, each in found.items() if kind != "unchanged"},
    )
