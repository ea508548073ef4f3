"""Importing a list of rules: what it would change, as a page, and the change.

A list is compared with the rules beside the pages, one list at a time: a long one takes its time, and its page looks
again until the result is there.
"""

from __future__ import annotations

import asyncio
import io
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from federation.admin import blacklist
from federation.admin.blacklist import CsvError, ImportPlan
from federation.admin.deliveries.bulk_jobs import BulkJobs
from federation.dashboard.bulk_page import bulk_address
from federation.dashboard.orders import command, ordered
from workers.dashboard.rendering import MenuItem
from workers.dashboard.text import counted, short
from workers.dashboard.visit import SEE_OTHER, Refusal, Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

BLACKLIST: Final = MenuItem(title="Blacklist", path="/blacklist")
PLAN: Final = "/blacklist/plan"
APPLY: Final = "/blacklist/import"
SHOWN: Final = 100
"""How many rules of each kind a plan shows; all are counted."""
MOST_AT_ONCE: Final = 1_000
"""How many rules of a list a page imports while somebody waits for it; more are imported by a job of the node."""
KEPT: Final = 4
"""How many files wait for somebody to agree; one more replaces the oldest."""
WAITS: Final = 2.0
"""Seconds for which a page waits until a list is compared; one that takes longer is looked at again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPart:
    """Rules, or lines, of one kind: how many there are, and the first hundred of them."""

    number: int
    first: Sequence[object]

    @classmethod
    def of(cls, things: Sequence[object]) -> ListPart:
        return cls(number=len(things), first=things[:SHOWN])

    @property
    def left(self) -> int:
        return self.number - len(self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListChanges:
    """What a list would change. The whole of a long one, `plan`, is not kept: the job that imports it makes its own."""

    added: ListPart
    changed: ListPart
    unchanged: ListPart
    skipped: ListPart
    bad: ListPart
    plan: ImportPlan | None

    @classmethod
    def of(cls, plan: ImportPlan) -> ListChanges:
        return cls(
            added=ListPart.of(plan.added),
            changed=ListPart.of(plan.changed),
            unchanged=ListPart.of(plan.unchanged),
            skipped=ListPart.of(plan.skipped),
            bad=ListPart.of(plan.bad),
            plan=None if is_long(plan) else plan,
        )

    @property
    def number(self) -> int:
        return self.added.number + self.changed.number


@dataclass(frozen=True, slots=True, kw_only=True)
class SentList:
    """A file that somebody has sent, and what it would change, once that is known."""

    by: str
    content: bytes = field(repr=False)
    comparing: asyncio.Task[ListChanges]


class ImportPages:
    """What the pages show and do. Files wait here between the plan and the import."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._database = federation.database
        self._jobs = BulkJobs(federation)
        self._lists: dict[str, SentList] = {}
        self._one_at_a_time = asyncio.Lock()

    async def close(self) -> None:
        """Forget the files."""
        under_way = [sent.comparing for sent in self._lists.values()]
        for key in [*self._lists]:
            self._forget(key)
        await asyncio.gather(*under_way, return_exceptions=True)

    async def plan(self, visit: Visit) -> Response:
        """Take a file, and show what it would change, or that this takes its time."""
        assert visit.visitor is not None  # nobody else acts
        if not visit.file:
            raise Refusal(400, "Choose a file.")
        while len(self._lists) >= KEPT:
            self._forget(next(iter(self._lists)))
        key = secrets.token_urlsafe(16)
        comparing = asyncio.create_task(self._compared(visit.file), name="dashboard-import")
        comparing.add_done_callback(_take_note)
        self._lists[key] = SentList(by=visit.visitor.name, content=visit.file, comparing=comparing)
        await asyncio.wait([comparing], timeout=WAITS)
        if comparing.done():
            return self._shown(visit, key, self._sent(visit, key))
        return RedirectResponse(f"{PLAN}?{urlencode({'key': key})}", status_code=SEE_OTHER)

    async def look(self, visit: Visit) -> Response:
        """Show what a file would change that was sent before."""
        key = visit.query.get("key", "")
        return self._shown(visit, key, self._sent(visit, key))

    async def apply(self, visit: Visit) -> Response:
        """Import a file that was shown, as the rules stand now."""
        key, skip_bad = visit.field("key"), visit.field("skip_bad") == "yes"
        sent = self._sent(visit, key)
        if not sent.comparing.done():
            raise Refusal(409, "That file is still being compared.")
        changes = self._result(key, sent)
        if changes.bad.number and not skip_bad:
            raise Refusal(400, f"{counted(changes.bad.number, 'line')} wrong, and nothing was imported.")
        self._forget(key)
        order = ordered(visit, "blacklist import", skip_bad=skip_bad)
        if changes.plan is None:
            job = await self._jobs.start_import(sent.content, skip_bad=skip_bad, order=order)
            return visit.back(bulk_address(job), "The job is made.")
        done = await blacklist.apply_import(self._database, changes.plan, skip_bad=skip_bad, order=order)
        return visit.back(
            BLACKLIST.path, f"{done.added} rules added, {done.changed} changed, {done.unchanged} as they were."
        )

    def _shown(self, visit: Visit, key: str, sent: SentList) -> Response:
        shown: dict[str, object] = {"here": BLACKLIST.path, "back": BLACKLIST.path}
        if not sent.comparing.done():
            return visit.page("comparing.html", shown)
        changes = self._result(key, sent)
        shown |= {
            "action": APPLY,
            "changes": changes,
            "key": key,
            "question": _question(changes),
            "command": command("blacklist", "import", "FILE", *(["--skip-bad"] if changes.bad.number else [])),
        }
        return visit.page("import.html", shown)

    async def _compared(self, content: bytes) -> ListChanges:
        async with self._one_at_a_time:
            file = io.BytesIO(content)
            return ListChanges.of(await blacklist.plan_import(self._database, file, own_url=self._federation.own_url))

    def _sent(self, visit: Visit, key: str) -> SentList:
        sent = self._lists.get(key)
        if sent is None or visit.visitor is None or sent.by != visit.visitor.name:
            raise Refusal(410, "That file is not here any more. Send it once more.")
        return sent

    def _result(self, key: str, sent: SentList) -> ListChanges:
        """Return what the file would change; a file that could not be compared is not kept."""
        if sent.comparing.exception() is not None:
            self._forget(key)
        try:
            return sent.comparing.result()
        except CsvError as error:
            raise Refusal(400, short(str(error), 400)) from None

    def _forget(self, key: str) -> None:
        if (sent := self._lists.pop(key, None)) is not None:
            sent.comparing.cancel()


def is_long(plan: ImportPlan) -> bool:
    """Tell whether a list has so many rules that nobody waits until they are imported."""
    return len(plan.wanted) > MOST_AT_ONCE


def _take_note(comparing: asyncio.Task[ListChanges]) -> None:
    """Look at the error of a list to which nobody may come back; whoever does is told."""
    if not comparing.cancelled():
        comparing.exception()


def _question(changes: ListChanges) -> str:
    return f"Import {counted(changes.number, 'rule')}?" if changes.number else "This list changes nothing."
