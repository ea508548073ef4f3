"""One attempt at one delivery, from the job to the row's fate.

Theory of operation. The row decides, and the job only stands for "try now". An attempt first asks the ledger whether
its job may act, and may learn that the delivery is held, or over, or that another job acts for it. What the attempt
finds out on the way is collected in a `Report`. However the attempt ends, what it says about the server goes to the
server's link first, then the row's fate is committed, and only then does the worker settle the job. A crash in between
repeats the attempt: receivers know the activity by its id and answer as before. A job without a row is simply tried as
often as the queue says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from db import AttemptNote, AttemptOutcome, DeliveryState, HoldReason
from federation.base.jobs import FederationDeliveryJob
from federation.base.logs import crash
from federation.delivery.apart import Apart
from federation.delivery.attempts import AttemptLog, AttemptRecord
from federation.delivery.codes import OWN_FAULTS, FailureClass, may_be_misunderstood
from federation.delivery.database_watch import DatabaseWatch
from federation.delivery.entries import Abandoned, Begin, Begun, Ended, NotBegun, Series
from federation.delivery.errors import Held, NotNow, PermanentFailure, RetryableFailure, Superseded
from federation.delivery.exchange import Exchange, Report
from federation.delivery.fates import (
    AGAIN,
    FAILED,
    HELD_FOR_SERVER,
    LONGEST_OWN_PAUSE,
    Fate,
    alone,
    fails_alone,
    fate_of,
)
from federation.delivery.foreign import ForeignJobs
from federation.delivery.ledger import Ledger
from federation.delivery.payloads import Payloads
from federation.delivery.room import Busy, Room
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin
from federation.servers.link_rules import Hold
from federation.servers.links import Links
from federation.servers.profiles import profile_of
from federation.servers.registry import Registry
from workers import Job
from workers.clock import Clock, SystemClock, monotonic

log = structlog.get_logger(__name__)

DATABASE_PAUSE: Final = timedelta(seconds=5)
LOOK_INTERVAL: Final = timedelta(minutes=10)
LOOK_TAKES: Final = timedelta(seconds=10)
"""How long a look at a server takes to have its effect: refused deliveries that were sent before get another try."""
CHECK_AGAIN_SECONDS: Final = 0.25
"""An attempt that waited longer for its turn asks again whether it may be sent."""
TYPICAL_BYTES: Final = 8 * 1024
"""The assumed memory of an attempt whose text is not read yet."""

LookAgain = Callable[[str, str | None], Awaitable[bool]]
"""Called with a server that refused us, and the code it gave. Returns whether it knows us now, or shows other keys."""


class DeliveryProcessor:
    """Callable with a job of the delivery queue.

    Raises:
        PermanentFailure: the job fails now.
        RetryableFailure: the job is tried again while it has attempts left.
        Held, Superseded: the job ends and leaves nothing behind; the row says how the delivery goes on.
        NotNow: the database did not do its part, there is no room for a job without a row, or the job is another
            node's. The job comes back, and the attempt is not counted.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        registry: Registry,
        links: Links,
        look_again: LookAgain,
        payloads: Payloads,
        ledger: Ledger,
        attempts: AttemptLog,
        room: Room,
        apart: Apart,
        database_watch: DatabaseWatch,
        foreign: ForeignJobs,
        clock: Clock | None = None,
    ) -> None:
        self._exchange = exchange
        self._registry = registry
        self._links = links
        self._look_again = look_again
        self._payloads = payloads
        self._ledger = ledger
        self._attempts = attempts
        self._room = room
        self._apart = apart
        self._database_watch = database_watch
        self._foreign = foreign
        self._clock = clock or SystemClock()

    async def __call__(self, job: Job) -> None:
        try:
            await self._run(job)
        except (DataError, IntegrityError) as error:  # the database accepts others: this one is at fault
            trouble = _database_trouble(error)
            if job.attempt >= job.max_attempts:
                await self._abandon(job, trouble)
            raise trouble from None
        except SQLAlchemyError as error:  # the row's fate is not on disk, so the attempt is not over
            self._database_watch.note_trouble(error)
            raise NotNow(f"the database did not do its part: {type(error).__name__}", DATABASE_PAUSE) from None

    async def _abandon(self, job: Job, trouble: RetryableFailure) -> None:
        """Hold the row, if the database accepts that.

        Otherwise the sweeper finds the row ready although its job has ended.
        """
        row, now = _row_of(job.payload), self._clock.now()
        if row is None:
            return
        until = now + LONGEST_OWN_PAUSE
        entry = Abandoned(delivery_id=row, job_id=job.id, at=now, until=until, error=str(trouble), code=trouble.code)
        with contextlib.suppress(SQLAlchemyError):
            await self._ledger.abandoned(entry)

    async def _run(self, job: Job) -> None:
        delivery = await self._parse(job)
        await self._foreign.give_back(job, delivery)
        report = Report(delivery, started_at=self._clock.now(), started=monotonic(), attempt=job.attempt)
        if await self._is_held(job, report):
            return
        try:
            async with self._room.turn(
                delivery.server_url, size=len(delivery.payload) or TYPICAL_BYTES, leave_slot=job.leave_slot
            ) as turn:
                report.first_byte = turn.first_byte
                try:
                    async with self._apart.enter(suspect=delivery.suspect):
                        await self._attempt(job, report)
                finally:
                    turn.answered, turn.waited = report.answered, report.waited
        except Busy as busy:
            await self._hold_busy(job, report, busy.pause)

    async def _is_held(self, job: Job, report: Report) -> bool:
        """Tell whether there is nothing to send.

        To a server that is away, only the canary that is sent to find out goes on.

        Raises:
            Held, Superseded: the job may not act for this delivery now.
            PermanentFailure: the server is blacklisted.
        """
        await self._refuse_blacklisted(job, report)
        report.checked = monotonic()
        link = await self._links.view(report.delivery.server_url)
        report.link, report.acknowledged, report.profile = link, link.acknowledged, profile_of(link.profile)
        hold = link.hold(self._clock.now())
        return hold is not None and not report.begun and not await self._begin(job, report, hold)

    async def _hold_busy(self, job: Job, report: Report, pause: timedelta) -> None:
        """Let the delivery wait in its row, because there is no room to wait for the server.

        Raises:
            NotNow: always.
        """
        if not report.begun:
            await self._begin(job, report, Hold(reason=HoldReason.BUSY, until=self._clock.now() + pause))
        raise NotNow(f"no room to wait for {report.delivery.server_url}", pause)

    async def _parse(self, job: Job) -> FederationDeliveryJob:
        try:
            delivery = FederationDeliveryJob.model_validate(job.payload)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'data'}: {e['msg']}" for e in error.errors()[:5])
        else:
            return await self._canonical(delivery)
        if (row := _row_of(job.payload)) is not None:
            await self._ledger.gone(row)
        raise PermanentFailure("INVALID_JOB", f"the data of job {job.id!r} is malformed: {problems}")

    async def _canonical(self, delivery: FederationDeliveryJob) -> FederationDeliveryJob:
        """Replace the server's URL by its canonical form, unless an adopted node's registry has the given spelling."""
        try:
            server_url = canonical_origin(delivery.server_url)
        except UrlError:
            return delivery  # the guard will say what is wrong with it
        if server_url == delivery.server_url or await self._registry.known(delivery.server_url):
            return delivery
        return delivery.model_copy(update={"server_url": server_url})

    async def _refuse_blacklisted(self, job: Job, report: Report) -> None:
        try:
            await self._exchange.refuse_blacklisted(report.delivery)
        except PermanentFailure as failure:
            await self._fail(job, report, failure)
            raise failure from None

    async def _begin(self, job: Job, report: Report, hold: Hold | None) -> bool:
        """Begin the attempt, with the text in `report`. Return False if there is nothing to send.

        Raises:
            Held, Superseded: the job may not act for this delivery now.
        """
        delivery = report.delivery
        began = await self._ledger.begin(
            Begin(
                delivery_id=delivery.delivery_job_id,
                job_id=job.id,
                job_name=job.name,
                server_url=delivery.server_url,
                attempt=job.attempt,
                at=report.started_at,
                hold=hold,
            )
        )
        if isinstance(began, NotBegun):
            if began.held is not None:
                raise Held(delivery.delivery_job_id, began.held)
            if began.exists:
                raise Superseded(delivery.delivery_job_id)
            if delivery.payload_id is not None or delivery.database is not None:
                log.info("delivery_over_already", delivery_id=delivery.delivery_job_id, server_url=delivery.server_url)
                return False
            report.begun, report.payload = True, delivery.payload
            return True
        report.begun, report.series = True, began.series
        report.payload = await self._text(delivery, began) or ""  # without a text, this is no activity
        return True

    async def _text(self, delivery: FederationDeliveryJob, began: Begun) -> str | None:
        if delivery.payload_id is None:
            return delivery.payload
        return await self._payloads.shared(delivery.payload_id) if began.text is None else began.text

    async def _attempt(self, job: Job, report: Report) -> None:
        """Deliver, and commit the row's fate whatever comes of it."""
        delivery = report.delivery
        # Checked again, as the attempt may have waited long for its turn. One that has not begun yet begins here.
        if monotonic() - report.checked > CHECK_AGAIN_SECONDS and await self._is_held(job, report):
            return
        if not report.begun and not await self._begin(job, report, None):
            return
        try:
            follow = await self._exchange(job.name, report)
        except SQLAlchemyError:
            raise
        except PermanentFailure as failure:
            await self._fail(job, report, failure)
            raise
        except Exception as error:
            trouble = _retryable(error, delivery.delivery_job_id)
            await self._fail(job, report, trouble)
            if trouble is error:
                raise
            raise trouble from None  # a stock worker stores the whole chain, whose messages may quote payloads
        await self._links.succeeded(delivery.server_url, relayed=report.peer is not None)
        record = self._log(job, report, AttemptOutcome.DELIVERED, None, None)
        shared = report.series is not None and report.series.shared
        if not await self._ledger.gone(delivery.delivery_job_id, follow=follow, attempt=record, shared=shared):
            log.info("follow_ack_unknown", delivery_id=delivery.delivery_job_id, server_url=delivery.server_url)

    async def _fail(self, job: Job, report: Report, failure: PermanentFailure | RetryableFailure) -> None:
        """Record the attempt, and commit the row's fate.

        Raises:
            Held: the row is held, so the job has nothing more to do.
        """
        failure.method = report.method
        is_permanent = isinstance(failure, PermanentFailure)
        outcome = AttemptOutcome.PERMANENT if is_permanent else AttemptOutcome.RETRYABLE
        is_last = is_permanent or job.attempt >= job.max_attempts
        took = monotonic() - report.started  # to decide its fate, the server may be looked at
        series, is_invalid = report.series, failure.failure_class is FailureClass.INVALID
        fate = FAILED if is_last else AGAIN
        if series is not None and not is_invalid:
            fate = await self._fate(report, series, failure, is_last=is_last, most=job.max_attempts)
        if fate.state is DeliveryState.FAILED:
            report.note = AttemptNote.GIVEN_UP
        record = self._log(job, report, outcome, failure.code, failure, took=took)
        delivery_id = report.delivery.delivery_job_id
        if is_invalid:
            await self._ledger.gone(delivery_id, attempt=record)
            return
        if series is None:
            return
        ended = Ended(
            series=series,
            state=fate.state,
            at=self._clock.now(),
            code=failure.code,
            error=str(failure),
            reason=fate.reason,
            until=fate.until,
            outcome=outcome,
            attempt=record,
        )
        if await self._ledger.ended(ended) and fate.reason is not None:
            raise Held(delivery_id, fate.reason) from None

    async def _fate(
        self, report: Report, series: Series, failure: PermanentFailure | RetryableFailure, *, is_last: bool, most: int
    ) -> Fate:
        """Report the failure to the server's link, then decide what becomes of the row. A job has `most` attempts."""
        server_url, kind, code = report.delivery.server_url, failure.failure_class, failure.code
        if kind is FailureClass.UNAVAILABLE:
            if is_last or series.canary_at is not None:
                link = await self._links.find(server_url)
                if fails_alone(code, series, link, is_last=is_last):
                    return alone(series, self._clock.now()) if is_last else AGAIN
            await self._note_unavailable(report, series, failure, is_last=is_last)
        elif kind is FailureClass.REST:
            await self._links.rests(server_url, failure.at_least if isinstance(failure, RetryableFailure) else None)
        elif kind is FailureClass.REJECTED and (is_last or series.is_canary):
            if await self._is_misunderstood(report, code):
                return HELD_FOR_SERVER
            # While the link is down, a canary's job never gets a second attempt, so the attempts of all series count.
            is_last = is_last or series.attempts >= most
            if is_last and code not in OWN_FAULTS:
                await self._links.rejected(server_url, code)
            if series.is_canary:
                await self._links.canary_refused(server_url)
        link = await self._links.view(server_url)
        return fate_of(kind, is_last=is_last, series=series, link=link, now=self._clock.now())

    async def _note_unavailable(
        self, report: Report, series: Series, failure: PermanentFailure | RetryableFailure, *, is_last: bool
    ) -> None:
        """Count the failure against the server: once, whatever the attempt was."""
        server_url, code = report.delivery.server_url, failure.code
        moved_to = failure.moved_to if isinstance(failure, RetryableFailure) else None
        await self._links.unavailable(server_url, code, moved_to=moved_to)
        if series.is_canary:
            await self._links.probe_failed(server_url)
        elif is_last:
            await self._links.exhausted(server_url, code, first_attempted_at=series.first_attempted_at)

    async def _is_misunderstood(self, report: Report, code: str) -> bool:
        """Tell whether the refusal may end once we know the server's new keys, or it knows ours."""
        if not may_be_misunderstood(code):
            return False
        server_url = report.delivery.server_url
        if await self._links.looked(server_url, interval=LOOK_INTERVAL, takes=LOOK_TAKES):
            may_end = await self._look_again(server_url, report.remote_code)
            await self._links.look_ended(server_url)
            return may_end
        looked_at = (await self._links.find(server_url)).looked_at
        return looked_at is not None and report.started_at < looked_at + LOOK_TAKES

    def _log(
        self,
        job: Job,
        report: Report,
        outcome: AttemptOutcome,
        code: str | None,
        error: Exception | None,
        *,
        took: float | None = None,
    ) -> AttemptRecord | None:
        """Log the attempt in one line, and return it for its delivery's next entry in the ledger.

        Returns None for a job without a row: its attempt is in the attempt log already.
        """
        delivery = report.delivery
        record = AttemptRecord(
            delivery_id=delivery.delivery_job_id,
            job_name=job.name,
            method=report.method,
            server_url=delivery.server_url,
            attempt=job.attempt,
            started_at=report.started_at,
            duration_ms=round((monotonic() - report.started if took is None else took) * 1000),
            outcome=outcome,
            error_code=code,
            http_status=report.status,
            relayed_by=report.peer,
            request_bytes=report.request_bytes,
            response_bytes=report.response_bytes,
            series=report.series.number if report.series else None,
            remote_code=report.remote_code,
            note=report.note,
        )
        level = log.info if outcome is AttemptOutcome.DELIVERED else log.warning
        level(
            "delivery_attempt",
            outcome=outcome.value,
            delivery_id=delivery.delivery_job_id,
            job_id=job.id,
            job_name=job.name,
            method=report.method,
            server_url=delivery.server_url,
            attempt=job.attempt,
            max_attempts=job.max_attempts,
            status=report.status,
            remote_code=report.remote_code,
            relayed_by=report.peer,
            duration_ms=record.duration_ms,
            code=code,
            note=record.note,
            error=str(error) if error else None,
        )
        if report.series is None:
            self._attempts.add(record)
            return None
        self._attempts.count(record)
        return record


def _row_of(data: object) -> str | None:
    """Return the row that malformed job data belongs to, if it names one that a database can be asked for."""
    row = data.get("deliveryJobId") if isinstance(data, dict) else None
    return row if isinstance(row, str) and row.isprintable() else None


def _retryable(error: Exception, delivery_id: str) -> RetryableFailure:
    if isinstance(error, RetryableFailure):
        return error
    # A bug of ours is recorded like any failure.
    log.error("delivery_attempt_crashed", delivery_id=delivery_id, **crash(error))
    return RetryableFailure("INTERNAL", f"the attempt broke off: {type(error).__name__}")


def _database_trouble(error: SQLAlchemyError) -> RetryableFailure:
    return RetryableFailure("DATABASE", f"the database did not take the attempt: {type(error).__name__}")
