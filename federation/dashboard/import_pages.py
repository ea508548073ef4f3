"""Importing a list of rules: what it would change, as a page, and the change."""

from __future__ import annotations

import io
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from federation.admin import blacklist
from federation.admin.blacklist import BadRows, CsvError, ImportPlan
from federation.admin.bulk_jobs import BulkJobs
from federation.dashboard.bulk_page import bulk_address
from federation.dashboard.orders import command, ordered
from workers.dashboard.rendering import MenuItem
from workers.dashboard.text import counted, short
from workers.dashboard.visit import Refusal, Visit

if TYPE_CHECKING:
    from federation.app import Federation

BLACKLIST: Final = MenuItem(title="Blacklist", path="/blacklist")
PLAN: Final = "/blacklist/plan"
APPLY: Final = "/blacklist/import"
SHOWN: Final = 100
"""How many rules of each kind a plan shows; all are counted."""
MOST_AT_ONCE: Final = 1_000
"""How many rules a page changes while somebody waits for it; more are changed by a job of the node."""
KEPT: Final = 4
"""How many files wait for somebody to agree; one more replaces the oldest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedList:
    """A file that somebody has sent, to see what it would change."""

    by: str
    content: bytes = field(repr=False)


class ImportPages:
    """What the pages show and do. Files wait here between the plan and the import."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._database = federation.database
        self._jobs = BulkJobs(federation)
        self._lists: dict[str, UploadedList] = {}

    async def plan(self, visit: Visit) -> Response:
        """Show what a file would change."""
        assert visit.visitor is not None  # nobody else acts
        if not visit.file:
            raise Refusal(400, "Choose a file.")
        plan = await self._plan(visit.file)
        while len(self._lists) >= KEPT:
            self._lists.pop(next(iter(self._lists)))
        key = secrets.token_urlsafe(16)
        self._lists[key] = UploadedList(by=visit.visitor.name, content=visit.file)
        shown = {
            "here": BLACKLIST.path,
            "action": APPLY,
            "back": BLACKLIST.path,
            "plan": plan,
            "key": key,
            "shown": SHOWN,
            "question": _question(plan),
            "is_many": _changes(plan) > MOST_AT_ONCE,
            "number": _changes(plan),
            "command": command("blacklist", "import", "FILE", *(["--skip-bad"] if plan.bad else [])),
        }
        return visit.page("import.html", shown)

    async def apply(self, visit: Visit) -> Response:
        """Import a file that was shown, as it and the rules stand now."""
        assert visit.visitor is not None  # nobody else acts
        sent = self._lists.get(visit.field("key"))
        if sent is None or sent.by != visit.visitor.name:
            raise Refusal(410, "That file is not here any more. Send it once more.")
        skip_bad = visit.field("skip_bad") == "yes"
        plan = await self._plan(sent.content)
        order = ordered(visit, "blacklist import", skip_bad=skip_bad)
        if plan.bad and not skip_bad:
            raise Refusal(400, short(str(BadRows(plan.bad)), 400))
        self._lists.pop(visit.field("key"), None)
        if _changes(plan) > MOST_AT_ONCE:
            job = await self._jobs.start_import(sent.content, skip_bad=skip_bad, order=order)
            return visit.back(bulk_address(job), "The job is made.")
        done = await blacklist.apply_import(self._database, plan, skip_bad=skip_bad, order=order)
        return visit.back(
            BLACKLIST.path, f"{done.added} rules added, {done.changed} changed, {done.unchanged} as they were."
        )

    async def _plan(self, content: bytes) -> ImportPlan:
        try:
            return await blacklist.plan_import(self._database, io.BytesIO(content), own_url=self._federation.own_url)
        except CsvError as error:
            raise Refusal(400, short(str(error), 400)) from None


def _changes(plan: ImportPlan) -> int:
    return len(plan.added) + len(plan.changed)


def _question(plan: ImportPlan) -> str:
    if not _changes(plan):
        return "This list changes nothing."
    return f"Import {counted(_changes(plan), 'rule')}?"
