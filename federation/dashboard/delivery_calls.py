"""What programs ask of deliveries: lists, one with its attempts, the log of attempts; and what is done to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from db import AttemptOutcome, BulkVerb
from federation.admin.attempts import LoggedAttempt, attempts_at_delivery, page_of_attempts
from federation.admin.bulk_jobs import BulkJobs, BulkProgress
from federation.admin.deliveries import DeliveryRow, Selection, show
from federation.admin.deliveries_bulk import BulkDeliveries
from federation.admin.delivery_pages import page_of_deliveries
from federation.dashboard.delivery_fate import gone_how, job_of, what_next
from federation.dashboard.delivery_pages import LONGEST_ID, MOST_AT_ONCE, Choice, count_changed
from federation.dashboard.orders import api_order
from federation.dashboard.server_pages import named_server
from workers.dashboard.calls import LISTED, After, AnyCall, Call, Caller, Limit, Listing
from workers.dashboard.shapes import Between, Longest
from workers.dashboard.visit import Refusal

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

Server: TypeAlias = Annotated[str, "The server that they go to, a URL or a bare name.", Longest(LONGEST_ID)]
State: TypeAlias = Annotated[str, "`open` (owed: ready or held), `ready`, `held`, `failed` or `expired`.", Longest(20)]
Code: TypeAlias = Annotated[str, "The code of the last failed attempt.", Longest(LONGEST_ID)]
Older: TypeAlias = Annotated[str, "How long ago they were made at least, as `12h`.", Longest(40)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveriesAsked:
    """Deliveries that have a row, the newest first; what is empty is not asked for."""

    server: Server = ""
    state: State = ""
    code: Code = ""
    older: Older = ""
    limit: Limit = LISTED
    after: After = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryAsked:
    """One delivery."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryAnswer:
    """A delivery, or what is left of it: `delivery` is null once it was delivered, dropped or purged.

    `next` says what becomes of it, or how it went. `attempts` are the last ones of the log, the latest first.
    """

    id: str
    delivery: DeliveryRow | None
    next: str
    attempts: Sequence[LoggedAttempt]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryText:
    """What a delivery says, in whole."""

    id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptsAsked:
    """Attempts of the log, the latest first."""

    server: Annotated[str | None, "The server that was asked."] = None
    outcome: AttemptOutcome | None = None
    code: str | None = None
    limit: Limit = LISTED
    after: After = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveriesOrder:
    """What is to be done to deliveries: to those with these ids, or with `all` to those that are described."""

    action: Literal["retry", "drop"]
    ids: Sequence[str] = ()
    all: bool = False
    server: Server = ""
    state: State = ""
    code: Code = ""
    older: Older = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveriesDone:
    """To how many it was done, and how many were left alone.

    If they are more than 1 000, `job` is the number of the job that does it; `GET /bulk` tells how far it is.
    """

    done: int
    left: int
    job: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkAsked:
    """A bulk job."""

    id: Annotated[int, Between(0, 2**63 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkCancelled:
    """Whether this ended it; it had ended before otherwise."""

    id: int
    cancelled: bool


def delivery_calls(federation: Federation) -> Sequence[AnyCall]:
    """Return the calls."""
    calls = DeliveryCalls(federation)
    return (
        Call(
            method="GET",
            path="/deliveries",
            summary="List deliveries.",
            asks=DeliveriesAsked,
            answers=DeliveryRow,
            code=calls.all,
            lists=True,
        ),
        Call(
            method="GET",
            path="/delivery",
            summary="Show one delivery with its attempts.",
            asks=DeliveryAsked,
            answers=DeliveryAnswer,
            code=calls.one,
        ),
        Call(
            method="GET",
            path="/attempts",
            summary="List attempts.",
            asks=AttemptsAsked,
            answers=LoggedAttempt,
            code=calls.attempts,
            lists=True,
        ),
        Call(
            method="POST",
            path="/deliveries",
            summary="Retry or drop deliveries.",
            asks=DeliveriesOrder,
            answers=DeliveriesDone,
            code=calls.act,
        ),
        Call(
            method="GET",
            path="/bulk",
            summary="Show how far a bulk job is.",
            asks=BulkAsked,
            answers=BulkProgress,
            code=calls.bulk,
        ),
        Call(
            method="POST",
            path="/bulk/cancel",
            summary="End a bulk job where it is.",
            asks=BulkAsked,
            answers=BulkCancelled,
            code=calls.cancel,
        ),
    )


class DeliveryCalls:
    """What the calls do."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._database = federation.database
        self._jobs = BulkJobs(federation)

    async def all(self, _caller: Caller, asked: DeliveriesAsked) -> Listing:
        """Return deliveries."""
        selection = _choice(asked).selection()
        try:
            page = await page_of_deliveries(
                self._database, selection, newest_first=True, limit=asked.limit, after=asked.after
            )
        except ValueError as error:
            raise Refusal(400, f"'after': {error}.") from None
        return Listing(items=page.rows, after=None if page.after is None else {"after": page.after})

    async def one(self, _caller: Caller, asked: DeliveryAsked) -> DeliveryAnswer:
        """Return one delivery, which may be over."""
        found = await show(self._database, asked.id)
        attempts = (await attempts_at_delivery(self._database, asked.id)).rows
        if found is None:
            if not attempts:
                raise Refusal(404, "There is no such delivery, and the log knows no attempt at it.")
            return DeliveryAnswer(id=asked.id, delivery=None, next=gone_how(attempts), attempts=attempts)
        row, _ = found
        told = what_next(row, await job_of(self._federation, row))
        return DeliveryAnswer(id=row.id, delivery=row, next=told, attempts=attempts)

    async def attempts(self, _caller: Caller, asked: AttemptsAsked) -> Listing:
        """Return attempts."""
        try:
            page = await page_of_attempts(
                self._database,
                server_url=None if asked.server is None else named_server(asked.server),
                outcome=asked.outcome,
                code=asked.code,
                limit=asked.limit,
                after=asked.after,
            )
        except ValueError as error:
            raise Refusal(400, f"'after': {error}.") from None
        return Listing(items=page.rows, after=None if page.after is None else {"after": page.after})

    async def act(self, caller: Caller, asked: DeliveriesOrder) -> DeliveriesDone:
        """Retry or drop deliveries, or have it done by a job."""
        choice, ids = _choice(asked), tuple(dict.fromkeys(asked.ids))
        if asked.all == bool(ids) or (ids and choice != Choice()):
            raise Refusal(400, "Give either `ids`, or `all` and what describes the deliveries.")
        selection = Selection(ids=ids) if ids else choice.selection()
        action = f"deliveries {asked.action}"
        order = api_order(caller, action, server_url=selection.server_url, ids=ids, **choice.options)
        if await count_changed(self._database, selection, asked.action) > MOST_AT_ONCE:
            job = await self._jobs.start_deliveries(BulkVerb(asked.action), selection, order=order)
            return DeliveriesDone(done=0, left=0, job=job)
        bulk = BulkDeliveries(self._database, self._federation.delivery_queue)
        if asked.action == "retry":
            retried = await bulk.retry(selection, order=order)
            return DeliveriesDone(done=retried.retried, left=retried.left + retried.out_of_order)
        dropped = await bulk.drop(selection, order=order)
        return DeliveriesDone(done=dropped.dropped, left=dropped.busy)

    async def bulk(self, _caller: Caller, asked: BulkAsked) -> BulkProgress:
        """Return how far a bulk job is."""
        return await self._found(asked.id)

    async def cancel(self, caller: Caller, asked: BulkAsked) -> BulkCancelled:
        """End a bulk job."""
        job = await self._found(asked.id)
        ended = await self._jobs.cancel(job.id)
        await caller.record("bulk cancel", str(job.id), int(ended))
        return BulkCancelled(id=job.id, cancelled=ended)

    async def _found(self, job_id: int) -> BulkProgress:
        job = await self._jobs.progress(job_id)
        if job is None:
            raise Refusal(404, "There is no such job, or it ended long ago.")
        return job


def _choice(asked: DeliveriesAsked | DeliveriesOrder) -> Choice:
    return Choice(server=asked.server.strip(), state=asked.state, code=asked.code, older=asked.older)
