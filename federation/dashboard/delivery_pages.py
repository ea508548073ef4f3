"""Deliveries: lists by server, state, code and age, and one with its attempts. Not their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from sqlalchemy import bindparam, func, literal, select
from sqlmodel import col
from starlette.responses import Response

from db import BulkVerb, Database, DeliveryJob, DeliveryState, DeliveryTotal, ServerSummary
from federation.admin.attempts import attempts_at_delivery
from federation.admin.deliveries import deliveries
from federation.admin.deliveries.bulk import BulkDeliveries, Dropped, Retried, retryable
from federation.admin.deliveries.bulk_jobs import BulkJobs
from federation.admin.deliveries.deliveries import OPEN, AnyState, Selection
from federation.admin.deliveries.pages import page_of_deliveries
from federation.admin.overview import Counts, brought_up_to_date
from federation.base.settings.types import parse_duration
from federation.dashboard.delivery_fate import gone_how, job_of, unheard, what_next
from federation.dashboard.orders import command, ordered
from federation.dashboard.server_pages import named_server
from federation.delivery.rows import OPEN_STATES, series_job_id
from workers.dashboard.rendering import MenuItem
from workers.dashboard.site import SitePart
from workers.dashboard.text import counted, grouped, short
from workers.dashboard.visit import Confirmation, Refusal, Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

DELIVERIES: Final = MenuItem(title="Deliveries", path="/deliveries")
PER_PAGE: Final = 50
MOST_AT_ONCE: Final = 1_000
"""How many deliveries a page changes while somebody waits for it; more are changed by a job of the node."""
LONGEST_ID: Final = 300
TABS: Final[tuple[AnyState | None, ...]] = (None, OPEN, *DeliveryState)
"""What a list is of: deliveries in any state, those that are owed, those in one state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCounts:
    """How many deliveries are in each state."""

    counts: Counts

    def of(self, tab: AnyState | None) -> str:
        """Return how many a tab has, with a plus if there may be more."""
        chosen = OPEN_STATES if tab == OPEN else [*DeliveryState] if tab is None else [DeliveryState(tab)]
        number = grouped(sum(self.counts.states[state] for state in chosen))
        return f"{number}+" if self.counts.more.intersection(chosen) else number


async def state_counts(database: Database, selection: Selection) -> StateCounts | None:
    """Return what the recurring job `rollups` counted of all deliveries, or of those to one server, or what is there.

    None for what it does not count: deliveries by code or age.
    """
    if not replace(selection, state=None, server_url=None).is_everything:
        return None
    totals = await database.rows(_TOTALS)
    states = {row.state: int(row.number) for row in totals}
    if selection.server_url is not None:
        found = await database.rows(_OF_SERVER, {"url": selection.server_url})
        states = {state: int(row._mapping[state.value]) for row in found for state in DeliveryState}
    last = Counts(
        counted_at=max((row.counted_at for row in totals), default=None),
        states={state: states.get(state, 0) for state in DeliveryState},
        held_by_reason={},
    )
    return StateCounts(counts=await brought_up_to_date(database, last, server_url=selection.server_url))


_TOTALS: Final = select(
    col(DeliveryTotal.state),
    func.sum(col(DeliveryTotal.deliveries)).label("number"),
    func.max(col(DeliveryTotal.counted_at)).label("counted_at"),
).group_by(col(DeliveryTotal.state))
_OF_SERVER: Final = select(*(col(getattr(ServerSummary, state.value)) for state in DeliveryState)).where(
    col(ServerSummary.server_url) == bindparam("url")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a list is narrowed down to, as it is written in the page's address."""

    server: str = ""
    state: str = ""
    code: str = ""
    older: str = ""

    @classmethod
    def of(cls, visit: Visit, *, carried: bool = False) -> Choice:
        """Read the choice from the address, or from a form that carries it."""
        names = ("server", "state", "code", "older")
        read = visit.carried if carried else lambda name: visit.query.get(name, "")
        return cls(**{name: read(name).strip()[:LONGEST_ID] for name in names})

    @property
    def pairs(self) -> dict[str, str | None]:
        """What is chosen, for an address; nothing for what is not."""
        given = {"server": self.server, "state": self.state, "code": self.code, "older": self.older}
        return {name: value or None for name, value in given.items()}

    @property
    def options(self) -> dict[str, str | None]:
        """The same as options of the command."""
        return {"server": self.server or None, "state": self.state or None, "code": self.code or None,
                "older_than": self.older or None}  # fmt: skip

    def selection(self, ids: Sequence[str] = ()) -> Selection:
        """Return the deliveries that are meant.

        Raises:
            Refusal: no state, no duration, no server.
        """
        try:
            older = parse_duration(self.older) if self.older else None
        except ValueError as error:
            raise Refusal(400, f"Older than: {error}.") from None
        return Selection(
            server_url=named_server(self.server) if self.server else None,
            state=_state(self.state) if self.state else None,
            code=self.code or None,
            older_than=older,
            ids=tuple(ids),
        )

    def address(self, **more: str | None) -> str:
        """Return the address of the list."""
        pairs = {name: value for name, value in {**self.pairs, **more}.items() if value is not None}
        return f"{DELIVERIES.path}?{urlencode(pairs)}" if pairs else DELIVERIES.path


def delivery_part(federation: Federation, *, shows_texts: bool = False) -> SitePart:
    """Return the pages of deliveries."""
    pages = DeliveryPages(federation, shows_texts=shows_texts)
    return SitePart(
        menu=(DELIVERIES,),
        pages={"/deliveries": pages.all, "/delivery": pages.one},
        actions={"/deliveries/act": pages.act},
    )


class DeliveryPages:
    """What the pages show and do."""

    def __init__(self, federation: Federation, *, shows_texts: bool) -> None:
        self._federation = federation
        self._shows_texts = shows_texts
        self._database = federation.database
        self._jobs = BulkJobs(federation)

    async def all(self, visit: Visit) -> Response:
        """Show a list, or the delivery whose id was searched."""
        choice = Choice.of(visit)
        selection, after = choice.selection(), visit.query.get("after")
        try:
            page = await page_of_deliveries(self._database, selection, newest_first=True, limit=PER_PAGE, after=after)
        except ValueError:
            raise Refusal(400, "The list does not go on there.") from None
        shown = {
            "choice": choice,
            "listed": page,
            "tabs": [(tab, replace(choice, state=tab or "").address()) for tab in TABS],
            "here_tab": selection.state,
            "counts": await state_counts(self._database, selection),
            "first": None if after is None else choice.address(),
            "further": None if page.after is None else choice.address(after=page.after),
            "command": command("deliveries", "list", **choice.options),
        }
        return visit.page("deliveries.html", shown)

    async def one(self, visit: Visit) -> Response:
        """Show one delivery, and what happens next."""
        delivery_id = visit.query.get("id", "").strip()[:LONGEST_ID]
        found = await deliveries.show(self._database, delivery_id)
        if found is None:
            return await self._gone(visit, delivery_id)
        row, attempts = found
        job_id = series_job_id(row.id, row.series)
        job = await job_of(self._federation, row)
        shown = {
            "here": DELIVERIES.path,
            "row": row,
            "attempts": attempts,
            "next": what_next(row, job, await unheard(self._federation, row, job)),
            "job": job,
            "job_id": job_id,
            "queue": self._federation.delivery_queues.of(row.job_name).storage.queue,
            "retryable": row.state is not DeliveryState.READY,
            "shows_text": self._shows_texts,
            "command": command("deliveries", "show", row.id),
        }
        return visit.page("delivery.html", shown)

    async def _gone(self, visit: Visit, delivery_id: str) -> Response:
        """Show what the log knows of a delivery that has no row any more."""
        attempts = (await attempts_at_delivery(self._database, delivery_id)).rows
        if not attempts:
            told = f"Delivery {short(delivery_id)} has no row, and the log knows no attempt at it."
            raise Refusal(404, told)
        shown = {
            "here": DELIVERIES.path,
            "id": delivery_id,
            "next": gone_how(attempts),
            "last": attempts[0],
            "attempts": attempts[::-1],
        }
        return visit.page("gone.html", shown)

    async def act(self, visit: Visit) -> Response:
        """Retry or drop deliveries: those that were chosen, or all of the list."""
        choice, verb = Choice.of(visit, carried=True), visit.field("action")
        if verb not in ("retry", "drop"):
            raise Refusal(400, "There is no such action.")
        ids = () if visit.field("all") == "yes" else visit.all_carried("id")
        if not ids and visit.field("all") != "yes":
            raise Refusal(400, "No delivery was chosen.")
        selection = Selection(ids=tuple(ids)) if ids else choice.selection()
        words = ["deliveries", verb, *(ids[:3] if ids else ()), *(["..."] if len(ids) > 3 else [])]
        if not ids and selection.is_everything:
            words.append("--all")
        line = command(*words, **({} if ids else choice.options))
        number = await count_changed(self._database, selection, verb)
        is_many = number > MOST_AT_ONCE
        back = choice.address()
        if not visit.is_confirmed:
            return visit.confirm(_question(verb, number, is_many=is_many, back=back, line=line))
        order = ordered(visit, f"deliveries {verb}", server_url=selection.server_url, ids=ids, **choice.options)
        if is_many:
            job = await self._jobs.start_deliveries(BulkVerb(verb), selection, order=order)
            return visit.back(f"/bulk?{urlencode({'id': job})}", "The job is made.")
        bulk = BulkDeliveries(self._database, self._federation.delivery_queues)
        done = await (bulk.retry(selection, order=order) if verb == "retry" else bulk.drop(selection, order=order))
        return visit.back(back, _report(done, asked=len(ids) or None))


async def count_changed(database: Database, selection: Selection, verb: str) -> int:
    """Count those that the action would change, but no further than matters."""
    chosen = [*selection.conditions(), *([retryable(selection)] if verb == "retry" else [])]
    some = select(literal(1)).select_from(DeliveryJob).where(*chosen).limit(MOST_AT_ONCE + 1).subquery()
    return int((await database.rows(select(func.count()).select_from(some)))[0][0])


def _state(text: str) -> AnyState:
    if text == OPEN:
        return OPEN
    if text not in list(DeliveryState):
        raise Refusal(400, "There is no such state.")
    return DeliveryState(text)


def _question(verb: str, number: int, *, is_many: bool, back: str, line: str) -> Confirmation:
    things = f"more than {counted(MOST_AT_ONCE, 'delivery')}" if is_many else counted(number, "delivery")
    if not number:
        raise Refusal(409, f"None of these can be {'retried' if verb == 'retry' else 'dropped'} any more.")
    by = " A process that delivers does it, while you may go away." if is_many else ""
    if verb == "retry":
        rows = f"They are owed again, with new attempts. What is on the way already is left alone.{by}"
        return Confirmation(question=f"Retry {things}?", rows=rows, verb="Retry", back=back, command=line)
    rows = f"Row, text and job are deleted, and nobody delivers them any more. Those under way are left alone.{by}"
    return Confirmation(question=f"Drop {things}?", rows=rows, verb="Drop", back=back, command=line, is_grave=True)


def _report(done: Retried | Dropped, *, asked: int | None) -> str:
    """Say what was done; of deliveries that were `asked` for by their ids, also how many had changed meanwhile."""
    if isinstance(done, Dropped):
        number, left = done.dropped, done.busy
        told = [f"{counted(number, 'delivery')} dropped."]
        told += [f"{counted(left, 'delivery')} under way, and left alone."] if left else []
    else:
        number, left = done.retried, done.left + done.out_of_order
        told = [f"{counted(number, 'delivery')} owed again."]
        told += [f"{counted(left, 'delivery')} left alone: sent now, they would undo what is newer."] if left else []
    if (changed := 0 if asked is None else asked - number - left) > 0:
        told.append(f"{counted(changed, 'delivery')} had changed meanwhile.")
    return " ".join(told)
