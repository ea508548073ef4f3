"""What programs ask of deliveries: lists, one with its attempts, the log of attempts; and what is done to them."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from fastapi import Query, Request
from pydantic import Field

from db import AttemptOutcome, BulkVerb
from federation.admin.attempts import LoggedAttempt, attempts_at_delivery, page_of_attempts
from federation.admin.deliveries.bulk import BulkDeliveries
from federation.admin.deliveries.bulk_jobs import BulkJobs, BulkProgress
from federation.admin.deliveries.deliveries import DeliveryRow, Selection, show
from federation.admin.deliveries.pages import page_of_deliveries
from federation.dashboard.delivery_fate import gone_how, job_of, unheard, what_next
from federation.dashboard.delivery_pages import LONGEST_ID, MOST_AT_ONCE, Choice, count_changed
from federation.dashboard.orders import MOST_ROWS, Node, api_order
from federation.dashboard.server_pages import named_server
from workers.dashboard.api import (
    LISTED,
    After,
    ApiAnswer,
    ApiOrder,
    Caller,
    Id,
    Ids,
    Limit,
    Listing,
    Text,
    calls,
    goes_on,
)
from workers.dashboard.visit import Refusal

api: Final = calls()

Server: TypeAlias = Annotated[
    Text, Field(max_length=LONGEST_ID, description="The server that they go to, a URL or a bare name.")
]
State: TypeAlias = Annotated[
    Text, Field(max_length=20, description="`open` (owed: ready or held), `ready`, `held`, `failed` or `expired`.")
]
Code: TypeAlias = Annotated[Text, Field(max_length=LONGEST_ID, description="The code of the last failed attempt.")]
Older: TypeAlias = Annotated[Text, Field(max_length=40, description="How long ago they were made at least, as `12h`.")]


class DeliveryAnswer(ApiAnswer):
    """A delivery, or what is left of it: `delivery` is null once it was delivered, dropped or purged.

    `next` says what becomes of it, or how it went. `attempts` are the last ones of the log, the latest first.
    """

    id: str
    delivery: DeliveryRow | None
    next: str
    attempts: list[LoggedAttempt]


class DeliveriesOrder(ApiOrder):
    """What is to be done to deliveries: to those with these ids, or with `all` to those that are described."""

    action: Literal["retry", "drop"]
    ids: Ids = ()
    all: bool = False
    server: Server = ""
    state: State = ""
    code: Code = ""
    older: Older = ""


class DeliveriesDone(ApiAnswer):
    """To how many it was done, and how many were left alone.

    If they are more than 1 000, `job` is the number of the job that does it; `GET /bulk` tells how far it is.
    """

    done: int
    left: int
    job: int | None = None


class BulkOrder(ApiOrder):
    """A bulk job that is to end."""

    id: Annotated[int, Field(ge=0, le=MOST_ROWS)]


class BulkCancelled(ApiAnswer):
    """Whether this ended it; it had ended before otherwise."""

    id: int
    cancelled: bool


@api.get("/deliveries")
async def list_deliveries(
    request: Request,
    node: Node,
    server: Server = "",
    state: State = "",
    code: Code = "",
    older: Older = "",
    limit: Limit = LISTED,
    after: After = None,
) -> Listing[DeliveryRow]:
    """List deliveries that have a row, the newest first; what is empty is not asked for."""
    selection = Choice(server=server.strip(), state=state, code=code, older=older).selection()
    try:
        page = await page_of_deliveries(node.database, selection, newest_first=True, limit=limit, after=after)
    except ValueError as error:
        raise Refusal(400, f"'after': {error}.") from None
    return Listing(items=page.rows, next=goes_on(request, after=page.after))


@api.get("/delivery")
async def show_delivery(node: Node, delivery_id: Id) -> DeliveryAnswer:
    """Show one delivery with its attempts; it may be over."""
    found = await show(node.database, delivery_id)
    attempts = [*(await attempts_at_delivery(node.database, delivery_id)).rows]
    if found is None:
        if not attempts:
            raise Refusal(404, "There is no such delivery, and the log knows no attempt at it.")
        return DeliveryAnswer(id=delivery_id, delivery=None, next=gone_how(attempts), attempts=attempts)
    row, _ = found
    job = await job_of(node, row)
    told = what_next(row, job, await unheard(node, row, job))
    return DeliveryAnswer(id=row.id, delivery=row, next=told, attempts=attempts)


@api.get("/attempts")
async def list_attempts(
    request: Request,
    node: Node,
    server: Annotated[Text | None, Query(description="The server that was asked.")] = None,
    outcome: AttemptOutcome | None = None,
    code: Text | None = None,
    limit: Limit = LISTED,
    after: After = None,
) -> Listing[LoggedAttempt]:
    """List attempts of the log, the latest first."""
    asked = None if server is None else named_server(server)
    try:
        page = await page_of_attempts(
            node.database, server_url=asked, outcome=outcome, code=code, limit=limit, after=after
        )
    except ValueError as error:
        raise Refusal(400, f"'after': {error}.") from None
    return Listing(items=page.rows, next=goes_on(request, after=page.after))


@api.post("/deliveries")
async def act_on_deliveries(node: Node, caller: Caller, asked: DeliveriesOrder) -> DeliveriesDone:
    """Retry or drop deliveries, or have it done by a job."""
    ids = tuple(dict.fromkeys(asked.ids))
    choice = Choice(server=asked.server.strip(), state=asked.state, code=asked.code, older=asked.older)
    if asked.all == bool(ids) or (ids and choice != Choice()):
        raise Refusal(400, "Give either `ids`, or `all` and what describes the deliveries.")
    selection = Selection(ids=ids) if ids else choice.selection()
    order = api_order(caller, f"deliveries {asked.action}", server_url=selection.server_url, ids=ids, **choice.options)
    if await count_changed(node.database, selection, asked.action) > MOST_AT_ONCE:
        job = await BulkJobs(node).start_deliveries(BulkVerb(asked.action), selection, order=order)
        return DeliveriesDone(done=0, left=0, job=job)
    bulk = BulkDeliveries(node.database, node.delivery_queues)
    if asked.action == "retry":
        retried = await bulk.retry(selection, order=order)
        return DeliveriesDone(done=retried.retried, left=retried.left + retried.out_of_order)
    dropped = await bulk.drop(selection, order=order)
    return DeliveriesDone(done=dropped.dropped, left=dropped.busy)


@api.get("/bulk")
async def show_bulk(node: Node, job_id: Annotated[int, Query(alias="id", ge=0, le=MOST_ROWS)]) -> BulkProgress:
    """Show how far a bulk job is."""
    return await _bulk_job(BulkJobs(node), job_id)


@api.post("/bulk/cancel")
async def cancel_bulk(node: Node, caller: Caller, asked: BulkOrder) -> BulkCancelled:
    """End a bulk job where it is."""
    jobs = BulkJobs(node)
    job = await _bulk_job(jobs, asked.id)
    ended = await jobs.cancel(job.id)
    await caller.record("bulk cancel", str(job.id), int(ended))
    return BulkCancelled(id=job.id, cancelled=ended)


async def _bulk_job(jobs: BulkJobs, job_id: int) -> BulkProgress:
    job = await jobs.progress(job_id)
    if job is None:
        raise Refusal(404, "There is no such job, or it ended long ago.")
    return job
