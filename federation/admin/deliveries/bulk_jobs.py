"""Actions on many deliveries as jobs of the node: whoever asked for one may go away.

Theory of operation. A job is a row of `bulk_jobs`, written together with its row in the audit log. Any process may run
it, one at a time: it takes the row for a lease, and renews that while it works. If the process dies, another one takes
the job over when the lease is over, and begins anew, which is harmless: what was done is not chosen any more, because a
retried delivery is not given up and a dropped one is gone. What was retried and given up again since the job began is
left alone. A list of rules is in the row until it is imported, in one transaction; a second time that
changes nothing. How many things were changed is counted in the transactions that change them. Two jobs on the
same rows do no harm for the same reason: each row is changed, and counted, by one of them.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog
from sqlalchemy import Connection, bindparam, case, insert, literal, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import col

from db import AdminAction, BulkJob, BulkVerb, DeliveryState
from federation.admin.blacklist.importing import apply_import, plan_import
from federation.admin.deliveries import deliveries
from federation.admin.deliveries.bulk import BulkDeliveries, UnderWay, retryable
from federation.admin.deliveries.deliveries import OPEN, Selection
from federation.base.audit import Order, Record, begin, finish

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

log = structlog.get_logger(__name__)

INTERVAL: Final = timedelta(seconds=2)
"""The time between two looks for a job that nobody works on."""
LEASE: Final = timedelta(seconds=30)
MAX_CLAIMS: Final = 20
"""A job that was begun so often, and never ended, is given up."""
MAX_CHOSEN: Final = 1_000
"""How many ids one job takes by name."""
CANCELLED: Final = "cancelled"

_ON_DELIVERIES: Final = (BulkVerb.RETRY, BulkVerb.DROP)


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkProgress:
    """How far a job is: `done` of `total` things are changed; the total is None before it has begun.

    At the end some may be left, as `result` tells. `error` says why it ended without one.
    """

    id: int
    verb: BulkVerb
    created_at: datetime
    done: int
    total: int | None
    finished_at: datetime | None
    result: dict[str, Any] | None  # what the action returns, as JSON
    error: str | None


class LostLease(Exception):
    """Another process has the job, or it was cancelled."""


class BulkJobs:
    """Starts, runs, shows and cancels the bulk jobs of a node."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._database = federation.database

    async def start_deliveries(self, verb: BulkVerb, selection: Selection, *, order: Order) -> int:
        """Have the selected deliveries retried or dropped. Return the number of the job, and of its audit row.

        Raises:
            ValueError: the verb is not one for deliveries, or too many ids are selected.
        """
        if verb not in _ON_DELIVERIES or len(selection.ids) > MAX_CHOSEN:
            raise ValueError(f"{verb} takes no such deliveries")
        age = selection.older_than
        chosen = {**asdict(selection), "older_than": None if age is None else age.total_seconds()}
        return await self._start(verb, chosen, order)

    async def start_import(self, csv: bytes, *, skip_bad: bool, order: Order) -> int:
        """Have the rules of a list imported. Return the number of the job, and of its audit row."""
        # A list may hold any bytes, which JSON does not.
        chosen = {"csv": base64.b64encode(csv).decode(), "skip_bad": skip_bad}
        return await self._start(BulkVerb.IMPORT, chosen, order)

    async def _start(self, verb: BulkVerb, chosen: dict[str, Any], order: Order) -> int:
        def add(connection: Connection) -> int:
            action = begin(connection, order)
            values = {"id": action, "created_at": datetime.now(UTC), "verb": verb, "chosen": chosen}
            connection.execute(insert(_TABLE).values(**values, token=0))
            return action

        return await self._database.transact(add)

    async def progress(self, job_id: int) -> BulkProgress | None:
        """Return how far the job is, or None if there is none."""
        rows = await self._database.rows(_PROGRESS, {"job": job_id})
        return BulkProgress(**rows[0]._mapping) if rows else None

    async def cancel(self, job_id: int) -> bool:
        """End the job where it is, within seconds. Return False if it has ended."""
        return await self._end(job_id, result=None, error=CANCELLED)

    async def tick(self) -> bool:
        """Run a job that nobody works on, to its end. Return whether there was one.

        Raises:
            SQLAlchemyError, WorkersError: the database or the queue failed; the job goes on when its lease is over.
        """
        now = datetime.now(UTC)
        found = await self._database.rows(_NEXT, {"now": now, "latest": now + LEASE})
        if not found:
            return False
        [row] = found
        token = row.token + 1
        lease = {"job": row.id, "before": row.token, "becomes": token, "until": now + LEASE}
        if not await self._database.transact(partial(_take, lease=lease)):
            return False
        if token > MAX_CLAIMS:
            await self._end(row.id, result=None, error=f"it was begun {MAX_CLAIMS} times, and never ended")
            return True
        log.info("bulk_job_began", job=row.id, verb=row.verb.value, time=token)
        with suppress(LostLease):
            result = await self._holding(row.id, token, self._work(row))
            await self._end(row.id, result=result, error=None)
            log.info("bulk_job_ended", job=row.id, verb=row.verb.value, **result)
        return True

    async def _holding(self, job_id: int, token: int, work: Any) -> dict[str, Any]:  # Any: a coroutine of any kind
        """Return the result of the work; renew the lease meanwhile, and stop the work once it is lost."""
        working = asyncio.ensure_future(work)
        renewing = asyncio.create_task(self._renew(job_id, token), name="bulk-job-lease")
        try:
            await asyncio.wait([working, renewing], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise LostLease
            return dict(working.result())
        finally:
            for task in (working, renewing):
                task.cancel()
            await asyncio.gather(working, renewing, return_exceptions=True)

    async def _renew(self, job_id: int, token: int) -> None:
        """Renew the lease until it is lost."""
        while True:
            await asyncio.sleep(LEASE.total_seconds() / 6)
            lease = {"job": job_id, "before": token, "becomes": token, "until": datetime.now(UTC) + LEASE}
            with suppress(SQLAlchemyError):  # the work itself will tell of it
                if not await self._database.transact(partial(_take, lease=lease)):
                    return

    async def _work(self, row: Any) -> dict[str, Any]:  # Any: a row of `bulk_jobs`
        return await (self._import(row) if row.verb is BulkVerb.IMPORT else self._change_deliveries(row))

    async def _import(self, row: Any) -> dict[str, Any]:  # Any: a row of `bulk_jobs`
        file = io.BytesIO(base64.b64decode(row.chosen["csv"]))
        plan = await plan_import(self._database, file, own_url=self._federation.own_url)
        if row.total is None:
            await self._note_total(row.id, len(plan.added) + len(plan.changed))
        done = await apply_import(self._database, plan, skip_bad=row.chosen["skip_bad"], record=Record(row.id))
        return {"unchanged": done.unchanged, "bad": len(plan.bad)}

    async def _change_deliveries(self, row: Any) -> dict[str, Any]:  # Any: a row of `bulk_jobs`
        selection = _selection(row.chosen, row.created_at)
        bulk = BulkDeliveries(self._database, self._federation.delivery_queues)
        under_way = UnderWay(since=row.created_at, record=Record(row.id))
        changes: dict[BulkVerb, Callable[..., Awaitable[Any]]] = {BulkVerb.RETRY: bulk.retry, BulkVerb.DROP: bulk.drop}
        if row.total is None:
            wanted = [*selection.conditions(), *([retryable(selection)] if row.verb is BulkVerb.RETRY else [])]
            await self._note_total(row.id, await deliveries.count(self._database, wanted))
        done = await changes[row.verb](selection, under_way=under_way)
        return {name: value for name, value in asdict(done).items() if name not in ("retried", "dropped")}

    async def _note_total(self, job_id: int, total: int) -> None:
        values = {"job": job_id, "number": total}
        await self._database.transact(lambda connection: connection.execute(_COUNTED, values))

    async def _end(self, job_id: int, *, result: dict[str, Any] | None, error: str | None) -> bool:
        ended = {"job": job_id, "now": datetime.now(UTC), "what": result, "problem": error}

        def end(connection: Connection) -> bool:
            if connection.execute(_ENDED, ended).rowcount != 1:
                return False
            finish(connection, job_id, error=error)
            return True

        return await self._database.transact(end)


def _take(connection: Connection, *, lease: dict[str, object]) -> bool:
    return connection.execute(_TAKEN, lease).rowcount == 1


def _selection(chosen: dict[str, Any], created_at: datetime) -> Selection:  # Any: JSON of ours
    """Return the selection as it was meant when the job was made, whenever it is run."""
    state, age = chosen["state"], chosen["older_than"]
    since = datetime.now(UTC) - created_at
    return Selection(
        server_url=chosen["server_url"],
        state=state if state in (None, OPEN) else DeliveryState(state),
        code=chosen["code"],
        older_than=None if age is None else timedelta(seconds=age) + since,
        ids=tuple(chosen["ids"]),
    )


_TABLE: Final = BulkJob.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_OPEN: Final = _TABLE.c.finished_at.is_(None)
_NEXT: Final = (
    select(_TABLE)
    .where(
        _OPEN,
        _TABLE.c.verb.in_(list(BulkVerb)),  # another version may know more
        or_(
            _TABLE.c.leased_until.is_(None),
            _TABLE.c.leased_until < bindparam("now"),
            _TABLE.c.leased_until > bindparam("latest"),  # written by a clock that was ahead
        ),
    )
    .order_by(_TABLE.c.id)
    .limit(1)
)
_THIS: Final = (_TABLE.c.id == bindparam("job"), _OPEN)
_TAKEN: Final = (
    update(_TABLE)
    .where(*_THIS, _TABLE.c.token == bindparam("before"))
    .values(token=bindparam("becomes"), leased_until=bindparam("until"))
)
_COUNTED: Final = update(_TABLE).where(*_THIS).values(total=bindparam("number"))
_ENDED: Final = (
    update(_TABLE)
    .where(*_THIS)
    .values(
        finished_at=bindparam("now"),
        result=bindparam("what"),
        error=bindparam("problem"),
        chosen=case((_TABLE.c.verb == BulkVerb.IMPORT, literal({}, _TABLE.c.chosen.type)), else_=_TABLE.c.chosen),
    )
)
_PROGRESS: Final = (
    select(
        _TABLE.c.id,
        _TABLE.c.verb,
        _TABLE.c.created_at,
        col(AdminAction.affected).label("done"),
        _TABLE.c.total,
        _TABLE.c.finished_at,
        _TABLE.c.result,
        _TABLE.c.error,
    )
    .join(AdminAction, col(AdminAction.id) == _TABLE.c.id)
    .where(_TABLE.c.id == bindparam("job"))
)
