"""One attempt at one delivery, from the job to the row's fate.

Theory of operation. The row decides, and the job only stands for "try now". An attempt first asks the ledger whether
its job may act, and may learn that the delivery is held, or over, or that another job acts for it. What the attempt
finds out on the way is collected in a `Report`, and what its wire sees in `Trace`. However the attempt ends, what it
says about the server goes to the server's link first, then the row's fate is committed, and only then does the worker
settle the job. A crash in between repeats the attempt: receivers know the activity by its id and answer as before. A
job without a row is simply tried as often as the queue says.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Final, TypeAlias

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from db import AttemptNote, AttemptOutcome, DeliveryState, HoldReason
from federation.base.logs import crash
from federation.base.queues.job_data import FederationDeliveryJob
from federation.delivery.attempt.crash_suspects import CrashSuspects
from federation.delivery.attempt.decision import (
    AGAIN,
    FAILED,
    HELD_FOR_SERVER,
    LONGEST_OWN_PAUSE,
    Fate,
    Report,
    alone,
    fails_alone,
    fate_of,
    ours,
    waits_by_itself,
)
from federation.delivery.attempt.host_limits import Busy, HostLimits
from federation.delivery.error_codes import BLACKLISTED, INVALID_JOB, FailureClass
from federation.delivery.errors import Held, NotNow, PermanentFailure, RetryableFailure, Superseded
from federation.delivery.job_origins import OtherNodesJobs
from federation.delivery.ledger.attempt_log import AttemptLog, AttemptRecord
from federation.delivery.ledger.entries import Abandoned, Begin, Begun, Ended, NotBegun, Series
from federation.delivery.ledger.ledger import DatabaseWatch, Ledger
from federation.delivery.rows import Payloads
from federation.delivery.wire import BrokenWire, Effect, Trace, Wire, Wires, asked, code_of
from federation.servers.blacklist import Blacklist
from federation.servers.link_rules import Hold
from federation.servers.links import Links
from workers import Job
from workers.clock import Clock, SystemClock, monotonic

log = structlog.get_logger(__name__)

DATABASE_PAUSE: Final = timedelta(seconds=5)
CHECK_AGAIN_SECONDS: Final = 0.25
"""An attempt that waited longer for its turn asks again whether it may be sent."""
TYPICAL_BYTES: Final = 8 * 1024
"""The assumed memory of an attempt whose text is not read yet."""
Failure: TypeAlias = PermanentFailure | RetryableFailure


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
        wires: Wires,
        blacklist: Blacklist,
        links: Links,
        payloads: Payloads,
        ledger: Ledger,
        attempts: AttemptLog,
        host_limits: HostLimits,
        crash_suspects: CrashSuspects,
        database_watch: DatabaseWatch,
        other_nodes_jobs: OtherNodesJobs,
        clock: Clock | None = None,
    ) -> None:
        self._wires = wires
        self._blacklist = blacklist
        self._links = links
        self._payloads = payloads
        self._ledger = ledger
        self._attempts = attempts
        self._host_limits = host_limits
        self._crash_suspects = crash_suspects
        self._database_watch = database_watch
        self._other_nodes_jobs = other_nodes_jobs
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
        wire = self._wires.of(job.name)
        delivery = await self._parse(job, wire)
        await self._other_nodes_jobs.give_back(job, delivery)
        report = Report(delivery, wire, started_at=self._clock.now(), started=monotonic(), attempt=job.attempt)
        if await self._is_held(job, report):
            return
        try:
            async with self._host_limits.turn(
                delivery.server_url, size=len(delivery.payload) or TYPICAL_BYTES, leave_slot=job.leave_slot
            ) as turn:
                report.first_byte = turn.first_byte
                try:
                    async with self._crash_suspects.enter(suspect=delivery.suspect):
                        await self._attempt(job, report)
                finally:
                    turn.answered, turn.waited = report.seen.answered, report.seen.waited
        except Busy as busy:
            await self._hold_busy(job, report, busy.pause)

    async def _is_held(self, job: Job, report: Report) -> bool:
        """Tell whether there is nothing to send.

        To a server that is away, only the canary that is sent to find out goes on.

        Raises:
            Held, Superseded: the job may not act for this delivery now.
            PermanentFailure: the server is blacklisted.
        """
        try:
            await self._refuse_blacklisted(report.delivery)
        except PermanentFailure as failure:
            await self._fail(job, report, failure)
            raise
        report.checked = monotonic()
        report.link = await self._links_of(report).view(report.delivery.server_url)
        hold = report.link.hold(self._clock.now())
        return hold is not None and not report.begun and not await self._begin(job, report, hold)

    async def _hold_busy(self, job: Job, report: Report, pause: timedelta) -> None:
        """Let the delivery wait in its row, because there is no room to wait for the server.

        Raises:
            NotNow: always.
        """
        if not report.begun:
            await self._begin(job, report, Hold(reason=HoldReason.BUSY, until=self._clock.now() + pause))
        raise NotNow(f"no room to wait for {report.delivery.server_url}", pause)

    async def _parse(self, job: Job, wire: Wire) -> FederationDeliveryJob:
        try:
            delivery = FederationDeliveryJob.model_validate(job.payload)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'data'}: {e['msg']}" for e in error.errors()[:5])
        else:
            return await _named(delivery, wire)
        if (row := _row_of(job.payload)) is not None:
            await self._ledger.gone(row)
        raise PermanentFailure(INVALID_JOB, f"the data of job {job.id!r} is malformed: {problems}")

    async def _refuse_blacklisted(self, delivery: FederationDeliveryJob) -> None:
        """Refuse the delivery if its server or its target is blacklisted. In another producer's job these may differ.

        Raises:
            PermanentFailure: one of them is blacklisted.
        """
        urls = delivery.server_url, delivery.target_url
        if covered := await self._blacklist.covered(urls):
            raise PermanentFailure(BLACKLISTED, f"{next(url for url in urls if url in covered)} is blacklisted")

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
                wire=report.wire.name,
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
            effect = await self._send(job, report)
            await self._note_arrival(job, report, effect)
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

    async def _send(self, job: Job, report: Report) -> Effect | None:
        """Send the delivery by its wire.

        Raises:
            PermanentFailure, RetryableFailure: what went wrong, by a code that has a class.
            BrokenWire: it raised what no wire should.
        """
        try:
            return await asked(report.wire.send(report.sending(job.name, self._refuse_blacklisted)))
        except (PermanentFailure, RetryableFailure) as failure:
            if failure.failure_class is None and code_of(report.wire, failure.code) is None:
                raise BrokenWire(f"its code {failure.code[:100]!r} has no class") from failure
            raise

    async def _note_arrival(self, job: Job, report: Report, effect: Effect | None) -> None:
        """Note that the server has it: in its link first, then in the ledger, with what that changes here."""
        delivery, relayed = report.delivery, report.seen.relayed_by is not None
        await self._links_of(report).succeeded(delivery.server_url, relayed=relayed)
        record, series = self._record(job, report, AttemptOutcome.DELIVERED), report.series
        changed = await self._ledger.gone(
            delivery.delivery_job_id,
            effect=effect,
            attempt=None if series is None else record,
            shared=series is not None and series.shared,
        )
        self._tell(job, report, record)  # not before that is committed, which may fail
        if effect is not None and not changed:
            try:
                effect.log_missed(delivery_id=delivery.delivery_job_id)
            except Exception as error:  # it has arrived, and its row is gone
                _log_crash(error, delivery.delivery_job_id)

    async def _fail(self, job: Job, report: Report, failure: Failure) -> None:
        """Record the attempt, and commit the row's fate.

        Raises:
            Held: the row is held, so the job has nothing more to do.
        """
        failure.method = report.seen.method
        is_permanent = isinstance(failure, PermanentFailure)
        outcome = AttemptOutcome.PERMANENT if is_permanent else AttemptOutcome.RETRYABLE
        is_last = is_permanent or job.attempt >= job.max_attempts
        took = monotonic() - report.started  # to decide its fate, the server may be looked at
        series, is_invalid = report.series, report.class_of(failure) is FailureClass.INVALID
        fate = FAILED if is_last else AGAIN
        if series is not None and not is_invalid:
            failure, fate = await self._fate(job, report, series, failure, is_last=is_last)
        if fate.state is DeliveryState.FAILED:
            report.seen.note = AttemptNote.GIVEN_UP
        record = self._record(job, report, outcome, failure.code, took=took)
        self._tell(job, report, record, failure)
        delivery_id = report.delivery.delivery_job_id
        if is_invalid:
            await self._ledger.gone(delivery_id, attempt=None if series is None else record)
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
            uses_pause=fate.uses_pause,
        )
        if await self._ledger.ended(ended) and fate.reason is not None:
            raise Held(delivery_id, fate.reason) from None

    async def _fate(
        self,
        job: Job,
        report: Report,
        series: Series,
        failure: Failure,
        *,
        is_last: bool,
    ) -> tuple[Failure, Fate]:
        """Report the failure to the server's link, then decide what becomes of the row. Return what counts, too."""
        server_url, kind, code = report.delivery.server_url, report.class_of(failure), failure.code
        links = self._links_of(report)
        if kind is FailureClass.UNAVAILABLE:
            if is_last or series.canary_at is not None:
                link = await links.find(server_url)
                if fails_alone(code, series, link, is_last=is_last):
                    return failure, alone(series, self._clock.now()) if is_last else AGAIN
            # A job that its wire ends has attempts left, so this may be no more than a moment.
            await self._note_unavailable(report, series, failure, used_up=job.attempt >= job.max_attempts)
        elif kind is FailureClass.REST:
            await links.rests(server_url, failure.at_least if isinstance(failure, RetryableFailure) else None)
        elif kind is FailureClass.REJECTED and (is_last or series.is_canary):
            return await self._refused(job, report, series, failure, is_last=is_last)
        link = await links.view(server_url)
        return failure, fate_of(kind, is_last=is_last, series=series, link=link, now=self._clock.now())

    async def _refused(
        self, job: Job, report: Report, series: Series, failure: Failure, *, is_last: bool
    ) -> tuple[Failure, Fate]:
        """Decide what becomes of a refused row, which its wire may know to be refused for another reason."""
        server_url, links = report.delivery.server_url, self._links_of(report)
        may_recover = await self._may_recover(job, report, failure.code)
        now = self._clock.now()  # to tell, the server may have been looked at
        if may_recover is None:
            return failure, ours(series, now)
        if may_recover is True:
            return failure, HELD_FOR_SERVER
        # While the link is down, a canary's job never gets a second attempt, so the attempts of all series count.
        is_last = is_last or series.attempts >= job.max_attempts
        found = may_recover or failure
        kind, is_doubted = report.class_of(found), isinstance(found, RetryableFailure) and found.tried_later
        fate = waits_by_itself(kind, series, now, tried_later=is_doubted, is_last=is_last)
        told = code_of(report.wire, found.code)
        if fate is None and is_last and not (told is not None and told.is_own):
            await links.rejected(server_url, found.code)
        if series.is_canary:
            await links.canary_refused(server_url)
        link = await links.view(server_url)
        return found, fate or fate_of(kind, is_last=is_last, series=series, link=link, now=now)

    async def _note_unavailable(self, report: Report, series: Series, failure: Failure, *, used_up: bool) -> None:
        """Count the failure against the server: once, whatever the attempt was."""
        server_url, code, links = report.delivery.server_url, failure.code, self._links_of(report)
        moved_to = failure.moved_to if isinstance(failure, RetryableFailure) else None
        await links.unavailable(server_url, code, moved_to=moved_to)
        if series.is_canary:
            await links.probe_failed(server_url)
        elif used_up:
            await links.exhausted(server_url, code, first_attempted_at=series.first_attempted_at)

    def _links_of(self, report: Report) -> Links:
        return self._links.of(report.wire.name)

    async def _may_recover(self, job: Job, report: Report, code: str) -> bool | RetryableFailure | None:
        """Ask the wire whether the refusal may end by itself, or is one of ours; None if it broke off over that."""
        try:
            return await asked(report.wire.may_recover(report.sending(job.name, self._refuse_blacklisted), code))
        except RetryableFailure as found:
            return found if report.class_of(found) is FailureClass.OURS else None
        except SQLAlchemyError:
            raise
        except Exception as error:
            _log_crash(error, report.delivery.delivery_job_id)
            return None

    def _record(
        self, job: Job, report: Report, outcome: AttemptOutcome, code: str | None = None, *, took: float | None = None
    ) -> AttemptRecord:
        """Return what the attempt log has of the attempt. With a row it is part of the ledger's next entry."""
        return AttemptRecord(
            delivery_id=report.delivery.delivery_job_id,
            job_name=job.name,
            method=report.seen.method,
            server_url=report.delivery.server_url,
            attempt=job.attempt,
            started_at=report.started_at,
            duration_ms=round((monotonic() - report.started if took is None else took) * 1000),
            outcome=outcome,
            error_code=code,
            http_status=report.seen.status,
            relayed_by=report.seen.relayed_by,
            request_bytes=report.seen.request_bytes,
            response_bytes=report.seen.response_bytes,
            series=report.series.number if report.series else None,
            remote_code=report.seen.remote_code,
            note=report.seen.note,
            activity_id=report.seen.activity_id,
        )

    def _tell(self, job: Job, report: Report, record: AttemptRecord, error: Exception | None = None) -> None:
        """Log the attempt in one line, and count it. The one of a job without a row goes to the attempt log, too."""
        level = log.info if record.outcome is AttemptOutcome.DELIVERED else log.warning
        level(
            "delivery_attempt",
            outcome=record.outcome.value,
            delivery_id=record.delivery_id,
            job_id=job.id,
            job_name=record.job_name,
            method=record.method,
            server_url=record.server_url,
            attempt=record.attempt,
            max_attempts=job.max_attempts,
            status=record.http_status,
            remote_code=record.remote_code,
            relayed_by=record.relayed_by,
            duration_ms=record.duration_ms,
            code=record.error_code,
            note=record.note,
            error=str(error) if error else None,
            **_of_the_protocol(report.seen),
        )
        if report.seen.knocks > 1:
            self._attempts.count_second_knock(report.seen.signature)
        if report.series is None:
            self._attempts.add(record)
        else:
            self._attempts.count(record)


def _of_the_protocol(seen: Trace) -> dict[str, object]:
    """Return what the log says of an attempt only where the wire has such a thing."""
    told = {"activity": seen.activity_id, "signature": seen.signature, "knocks": seen.knocks}
    return {name: value for name, value in told.items() if value}


async def _named(delivery: FederationDeliveryJob, wire: Wire) -> FederationDeliveryJob:
    """Return the delivery with its server's name as the wire spells it; as it is, if the wire breaks off over that."""
    try:
        server_url = await asked(wire.name_of(delivery.server_url))
    except SQLAlchemyError:
        raise
    except Exception as error:
        _log_crash(error, delivery.delivery_job_id)
        return delivery
    return delivery if server_url == delivery.server_url else delivery.model_copy(update={"server_url": server_url})


def _row_of(data: object) -> str | None:
    """Return the row that malformed job data belongs to, if it names one that a database can be asked for."""
    row = data.get("deliveryJobId") if isinstance(data, dict) else None
    return row if isinstance(row, str) and row.isprintable() else None


def _retryable(error: Exception, delivery_id: str) -> RetryableFailure:
    if isinstance(error, RetryableFailure):
        return error
    _log_crash(error, delivery_id)
    return RetryableFailure("INTERNAL", f"the attempt broke off: {type(error).__name__}")


def _log_crash(error: Exception, delivery_id: str) -> None:
    """Record a bug of ours like any failure."""
    log.error("delivery_attempt_crashed", delivery_id=delivery_id, **crash(error))


def _database_trouble(error: SQLAlchemyError) -> RetryableFailure:
    return RetryableFailure("DATABASE", f"the database did not take the attempt: {type(error).__name__}")
