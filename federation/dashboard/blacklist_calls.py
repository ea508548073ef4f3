"""What programs ask of the blacklist: its rules, those that cover a server, adding, lifting and importing rules."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

from federation.admin import blacklist
from federation.admin.blacklist import Change, Changed, CsvError, Entry, ImportPlan, LineNote, RuleError, WantedRule
from federation.admin.bulk_jobs import BulkJobs
from federation.base.settings.types import parse_duration
from federation.dashboard.import_pages import SHOWN, is_long
from federation.dashboard.orders import api_order
from workers.dashboard.calls import LISTED, After, AnyCall, Call, Caller, Limit, Listing
from workers.dashboard.shapes import Longest
from workers.dashboard.text import short
from workers.dashboard.visit import Refusal

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

CSV: Final = "text/csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesAsked:
    """Rules, in their order."""

    limit: Limit = LISTED
    after: After = None
    row: After = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckAsked:
    """A server, by its URL or its bare name."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckAnswer:
    """The rules in force that cover the server; there are none if it is not blacklisted."""

    blacklisted: bool
    rules: Sequence[Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOrder:
    """A rule to put in force."""

    rule: Annotated[str, "`https://evil.example`, or `*.evil.example` with everything below it."]
    reason: str
    lasts: Annotated[str | None, "For how long, as `30d`; without it, for good.", Longest(40)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleDone:
    """What became of the rule, and its row."""

    change: Change
    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleLifted:
    """The rows of the rule that are gone, which may be none."""

    rows: Sequence[Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRule:
    """A rule, in whatever spelling it is stored."""

    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportAsked:
    """How a list is imported. By default nothing is: the answer says what would change."""

    dry_run: bool = True
    skip_bad: Annotated[bool, "Import the rest where rows are wrong; otherwise nothing is imported then."] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportAnswer:
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
    first_added: Sequence[WantedRule]
    first_changed: Sequence[Changed]
    first_skipped: Sequence[LineNote]
    first_bad: Sequence[LineNote]


def blacklist_calls(federation: Federation) -> Sequence[AnyCall]:
    """Return the calls."""
    calls = BlacklistCalls(federation)
    return (
        Call(
            method="GET",
            path="/blacklist",
            summary="List the rules, those that are over included.",
            asks=RulesAsked,
            answers=Entry,
            code=calls.all,
            lists=True,
        ),
        Call(
            method="GET",
            path="/blacklist/check",
            summary="Say which rules cover a server.",
            asks=CheckAsked,
            answers=CheckAnswer,
            code=calls.check,
        ),
        Call(
            method="POST",
            path="/blacklist/add",
            summary="Put a rule in force.",
            asks=RuleOrder,
            answers=RuleDone,
            code=calls.add,
        ),
        Call(
            method="POST",
            path="/blacklist/remove",
            summary="Lift a rule.",
            asks=NamedRule,
            answers=RuleLifted,
            code=calls.remove,
        ),
        Call(
            method="POST",
            path="/blacklist/import",
            summary="Say what importing a list would change, or import it.",
            asks=ImportAsked,
            answers=ImportAnswer,
            code=calls.import_list,
            takes=CSV,
        ),
    )


class BlacklistCalls:
    """What the calls do."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._database = federation.database
        self._jobs = BulkJobs(federation)

    async def all(self, _caller: Caller, asked: RulesAsked) -> Listing:
        """Return rules."""
        after = None if asked.after is None else (asked.after, asked.row or "")
        page = await blacklist.list_rules(self._database, limit=asked.limit, after=after)
        further = None if page.after is None else {"after": page.after[0], "row": page.after[1]}
        return Listing(items=page.entries, after=further)

    async def check(self, _caller: Caller, asked: CheckAsked) -> CheckAnswer:
        """Return the rules that cover a server."""
        rules = await blacklist.check(self._database, asked.url.strip())
        return CheckAnswer(blacklisted=bool(rules), rules=rules)

    async def add(self, caller: Caller, asked: RuleOrder) -> RuleDone:
        """Put a rule in force."""
        order = api_order(caller, "blacklist add", rule=asked.rule, reason=asked.reason, lasts=asked.lasts)
        try:
            change, entry = await blacklist.add(
                self._database,
                asked.rule,
                reason=asked.reason,
                expires_at=datetime.now(UTC) + parse_duration(asked.lasts) if asked.lasts else None,
                own_url=self._federation.own_url,
                order=order,
            )
        except (RuleError, ValueError, OverflowError) as error:
            raise Refusal(400, short(str(error), 400)) from None
        return RuleDone(change=change, entry=entry)

    async def remove(self, caller: Caller, asked: NamedRule) -> RuleLifted:
        """Lift a rule."""
        order = api_order(caller, "blacklist remove", rule=asked.rule)
        return RuleLifted(rows=await blacklist.remove(self._database, asked.rule, order=order))

    async def import_list(self, caller: Caller, asked: ImportAsked) -> ImportAnswer:
        """Import a list, or say what that would change."""
        try:
            plan = await blacklist.plan_import(
                self._database, io.BytesIO(caller.uploaded), own_url=self._federation.own_url
            )
        except CsvError as error:
            raise Refusal(400, short(str(error), 400)) from None
        if asked.dry_run or (plan.bad and not asked.skip_bad):
            return _answer(plan, imported=False)
        order = api_order(caller, "blacklist import", skip_bad=asked.skip_bad)
        if is_long(plan):
            job = await self._jobs.start_import(caller.uploaded, skip_bad=asked.skip_bad, order=order)
            return _answer(plan, imported=False, job=job)
        await blacklist.apply_import(self._database, plan, skip_bad=asked.skip_bad, order=order)
        return _answer(plan, imported=True)


def _answer(plan: ImportPlan, *, imported: bool, job: int | None = None) -> ImportAnswer:
    return ImportAnswer(
        imported=imported,
        job=job,
        added=len(plan.added),
        changed=len(plan.changed),
        unchanged=len(plan.unchanged),
        skipped=len(plan.skipped),
        bad=len(plan.bad),
        first_added=plan.added[:SHOWN],
        first_changed=plan.changed[:SHOWN],
        first_skipped=plan.skipped[:SHOWN],
        first_bad=plan.bad[:SHOWN],
    )
