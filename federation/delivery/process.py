"""One attempt at one delivery, from the job to the row's fate.

Theory of operation. The steps are those of the wire protocol, in its order. What an attempt learns on the way gathers
in a `Report`; whatever ends it, an exception or not, the row's fate is committed last, and only then is the job settled
by the worker. A crash in between repeats the attempt: receivers know the activity by its id and answer as before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Final, TypeAlias

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from db import AttemptOutcome
from federation.base.jobs import FOLLOW_JOB, FederationDeliveryJob
from federation.base.logs import crash
from federation.delivery.attempts import AttemptLog, AttemptRecord
from federation.delivery.errors import Parked, PermanentFailure, RetryableFailure
from federation.delivery.follow_ack import read_follow_ack
from federation.delivery.ledger import FollowAnswer, Ledger
from federation.delivery.payloads import Payloads
from federation.delivery.slots import ServerSlots
from federation.http.errors import BlockedUrl, BodyTooLarge, NetworkError
from federation.http.gates import FederationFetch, Fetched
from federation.http.guard import AddressGuard
from federation.http.response import Response
from federation.protocol.acks import Ack, find_ack, parse_ack_body
from federation.protocol.activities import ActivityMethod, DeliveryRequest, delivery_headers, parse_method
from federation.protocol.errors import AckMissing, KeyMaterialError, NotJson, PayloadError, UrlError
from federation.protocol.keys import OwnKeys, decode_key
from federation.protocol.sealing import seal
from federation.protocol.signing import sign_message
from federation.servers.discovery import Discover, DiscoveryError
from federation.servers.registry import KnownServer, Registry
from workers import Job

log = structlog.get_logger(__name__)

DELIVERY_TIMEOUT: Final = timedelta(seconds=15)

_ASKS_TO_WAIT: Final = frozenset({429, 503})


@dataclass(slots=True)
class Report:
    """What one attempt has learned so far."""

    delivery: FederationDeliveryJob
    payload: str = field(default="", repr=False)
    method: ActivityMethod | None = None
    cached_public_key: str | None = None
    status: int | None = None
    peer: str | None = None
    request_bytes: int | None = None
    response_bytes: int | None = None
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    started: float = field(default_factory=monotonic)


ReadAck: TypeAlias = Callable[[Ack, Report], Awaitable[FollowAnswer | None]]


class DeliveryProcessor:
    """Callable with a job of the delivery queue. `own_url` and `keys` may be None: every delivery then fails for good.
    `timeout` covers a whole exchange, from the moment a slot is held.

    Raises:
        PermanentFailure: the job fails now.
        RetryableFailure: it is tried again while attempts are left.
        Parked: the server is busy with others; the job comes back in about a second, uncounted.
    """

    def __init__(
        self,
        *,
        own_url: str | None,
        keys: OwnKeys | None,
        registry: Registry,
        discover: Discover,
        guard: AddressGuard,
        fetch: FederationFetch,
        payloads: Payloads,
        ledger: Ledger,
        attempts: AttemptLog,
        slots: ServerSlots,
        timeout: timedelta = DELIVERY_TIMEOUT,
    ) -> None:
        self._own_url = own_url
        self._keys = keys
        self._registry = registry
        self._discover = discover
        self._guard = guard
        self._fetch = fetch
        self._payloads = payloads
        self._ledger = ledger
        self._attempts = attempts
        self._slots = slots
        self._timeout = timeout
        self._ack_readers: Mapping[str, ReadAck] = {FOLLOW_JOB: self._read_follow_ack}

    async def __call__(self, job: Job) -> None:
        try:
            await self._run(job)
        except SQLAlchemyError as error:  # the row's fate is not on disk, so the attempt is not over
            raise _database_trouble(error) from None

    async def _run(self, job: Job) -> None:
        delivery = await self._parse(job)
        report = Report(delivery)
        try:
            async with self._slots.take(delivery.server_url, delivery.delivery_job_id):
                await self._attempt(job, report)
        except Parked as parked:
            await self._refuse_waiting(job, report)
            if self._slots.note_parked(delivery.server_url, delivery.delivery_job_id):
                self._log(job, report, AttemptOutcome.PARKED, "PARKED", parked)
            raise

    async def _refuse_waiting(self, job: Job, report: Report) -> None:
        """A delivery that finds its server busy ends with a rule like any other: the server may hang for long."""
        try:
            await self._refuse_blacklisted(report.delivery)
        except PermanentFailure as failure:
            self._slots.forget_parked(report.delivery.delivery_job_id)
            await self._fail(job, report, failure)
            raise failure from None
        except SQLAlchemyError:  # rules that were never read: it stays parked, as the look is no attempt
            return

    async def _parse(self, job: Job) -> FederationDeliveryJob:
        try:
            return FederationDeliveryJob.model_validate(job.payload)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'data'}: {e['msg']}" for e in error.errors()[:5])
        if (row := _row_of(job.payload)) is not None:
            await self._ledger.gone(row)
        raise PermanentFailure("INVALID_JOB", f"the data of job {job.id!r} is malformed: {problems}", keep_row=False)

    async def _attempt(self, job: Job, report: Report) -> None:
        """Deliver, and commit the row's fate whatever comes of it."""
        row = report.delivery.delivery_job_id
        try:
            payload = await self._payloads.text(report.delivery)
            if payload is None:
                log.info("delivery_over_already", delivery_id=row, job_id=job.id, server_url=report.delivery.server_url)
                return
            report.payload = payload
            follow = await self._deliver(job, report)
            if not await self._ledger.gone(row, follow=follow):
                log.info("follow_ack_unknown", delivery_id=row, server_url=report.delivery.server_url)
        except PermanentFailure as failure:
            await self._fail(job, report, failure)
            raise
        except Exception as error:
            trouble = _retryable(error, row)
            trouble.method = report.method
            self._log(job, report, AttemptOutcome.RETRYABLE, trouble.code, trouble)
            if job.attempt >= job.max_attempts:
                await self._give_up(row, trouble)
            if trouble is error:
                raise
            raise trouble from None  # a stock worker stores the whole chain, whose messages may quote payloads
        self._log(job, report, AttemptOutcome.DELIVERED, None, None)

    async def _fail(self, job: Job, report: Report, failure: PermanentFailure) -> None:
        """The attempt is on record, and the row's fate committed."""
        row = report.delivery.delivery_job_id
        failure.method = report.method
        self._log(job, report, AttemptOutcome.PERMANENT, failure.code, failure)
        if failure.keep_row:
            await self._ledger.settled(row, outcome=AttemptOutcome.PERMANENT, error=str(failure), code=failure.code)
        else:
            await self._ledger.gone(row)

    async def _give_up(self, row: str, failure: RetryableFailure) -> None:
        """The row is settled, if the database takes it: the job fails now in any case, and for its own reason."""
        try:
            await self._ledger.settled(row, outcome=AttemptOutcome.RETRYABLE, error=str(failure), code=failure.code)
        except SQLAlchemyError as error:
            log.error("delivery_row_not_settled", delivery_id=row, **crash(error))

    async def _deliver(self, job: Job, report: Report) -> FollowAnswer | None:
        delivery = report.delivery
        report.method = _method_of(report.payload)
        server = await self._find_server(report)
        body, headers = await self._prepare(report, server)
        fetched = await self._post(delivery, body, headers, report)
        await self._note_success(server, fetched)
        _require_success(fetched.response)
        ack = _acknowledgment(fetched.response)
        read_ack = self._ack_readers.get(job.name)
        return await read_ack(ack, report) if read_ack else None

    async def _find_server(self, report: Report) -> KnownServer:
        delivery = report.delivery
        await self._refuse_blacklisted(delivery)
        standing = await self._registry.standing(delivery.server_url)
        try:
            target = self._guard.check_url(delivery.target_url)
            if target.origin != delivery.server_url.rstrip("/"):  # what producers of ours never do; others may
                log.warning("delivery_target_elsewhere", server_url=delivery.server_url, target=target.origin)
            if standing.server is not None:
                report.cached_public_key = standing.server.public_key
                return standing.server
            server = await self._discover(delivery.server_url)
        except BlockedUrl as error:
            raise PermanentFailure(
                "BLOCKED_URL", f"the target may not be contacted: {error}", keep_row=False
            ) from error
        except (DiscoveryError, NetworkError) as error:
            raise RetryableFailure("DISCOVERY", str(error)) from error
        await self._refuse_blacklisted(delivery)  # a discovery may take long enough for an administrator to act
        return server

    async def _refuse_blacklisted(self, delivery: FederationDeliveryJob) -> None:
        """Neither the server nor the target, which may lie elsewhere in another producer's job, is blacklisted."""
        for url in (delivery.server_url, delivery.target_url):
            if await self._registry.is_blacklisted(url):
                raise PermanentFailure("BLACKLISTED", f"{url} is blacklisted", keep_row=False)

    async def _prepare(self, report: Report, server: KnownServer) -> tuple[bytes, dict[str, str]]:
        """The request body and headers; the attempt is on record once they exist."""
        delivery, method = report.delivery, report.method
        assert method is not None
        try:
            envelope = seal(report.payload, decode_key(server.encryption_public_key, what="encryption key"))
        except KeyMaterialError as error:
            raise RetryableFailure("KEY_MATERIAL", f"the registered key of {server.url} is unusable: {error}") from None
        await self._ledger.attempted(delivery.delivery_job_id)
        if self._own_url is None:
            raise PermanentFailure("NO_OWN_URL", "BETTER_AUTH_URL is not set: this node has no name", keep_row=True)
        if self._keys is None:
            raise PermanentFailure(
                "NO_OWN_KEYS", "FEDERATION_PRIVATE_KEY is not set: nothing to sign with", keep_row=True
            )
        signature = sign_message(report.payload, self._keys.signing.secret)
        try:
            headers = delivery_headers(own_url=self._own_url, target_url=delivery.target_url)
        except UrlError as error:
            raise PermanentFailure("BLOCKED_URL", str(error), keep_row=False) from error
        body = DeliveryRequest(method=method, payload=envelope, signature=signature).to_bytes()
        report.request_bytes = len(body)
        return body, headers

    async def _post(
        self, delivery: FederationDeliveryJob, body: bytes, headers: Mapping[str, str], report: Report
    ) -> Fetched:
        try:
            fetched = await self._fetch(
                delivery.target_url,
                method="POST",
                headers=headers,
                body=body,
                timeout=self._timeout,
                proxy_fallback=True,
                server_url=delivery.server_url,
            )
        except NetworkError as error:
            raise RetryableFailure(error.code, str(error)) from error
        except BodyTooLarge as error:
            raise PermanentFailure("BODY_TOO_LARGE", str(error), keep_row=True) from error
        report.status = fetched.response.status
        report.response_bytes = len(fetched.response.body)
        report.peer = fetched.peer
        return fetched

    async def _note_success(self, server: KnownServer, fetched: Fetched) -> None:
        """A server that takes a direct delivery is healthy, whatever its last probe said."""
        if fetched.response.ok and not fetched.proxied and not server.is_healthy:
            await self._registry.mark_healthy(server.url, reason="delivered")

    async def _read_follow_ack(self, ack: Ack, report: Report) -> FollowAnswer:
        assert self._keys is not None  # nothing was sent without them
        server_url = report.delivery.server_url

        async def find_public_key() -> str | None:
            server = await self._registry.find(server_url)
            return server.public_key if server else None

        return await read_follow_ack(
            ack,
            server_url,
            keys=self._keys,
            cached_public_key=report.cached_public_key,
            find_public_key=find_public_key,
        )

    def _log(
        self, job: Job, report: Report, outcome: AttemptOutcome, code: str | None, error: Exception | None
    ) -> None:
        """One row in the attempt log, one line in the process's log."""
        delivery = report.delivery
        duration_ms = round((monotonic() - report.started) * 1000)
        self._attempts.add(
            AttemptRecord(
                delivery_id=delivery.delivery_job_id,
                job_name=job.name,
                method=report.method,
                server_url=delivery.server_url,
                attempt=job.attempt,
                started_at=report.started_at,
                duration_ms=duration_ms,
                outcome=outcome,
                error_code=code,
                http_status=report.status,
                relayed_by=report.peer,
                request_bytes=report.request_bytes,
                response_bytes=report.response_bytes,
            )
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
            relayed_by=report.peer,
            duration_ms=duration_ms,
            code=code,
            error=str(error) if error else None,
        )


def _row_of(data: object) -> str | None:
    """The row that malformed job data belongs to, if it names one a database can be asked for."""
    row = data.get("deliveryJobId") if isinstance(data, dict) else None
    return row if isinstance(row, str) and row.isprintable() else None


def _retryable(error: Exception, delivery_id: str) -> RetryableFailure:
    if isinstance(error, RetryableFailure):
        return error
    if isinstance(error, SQLAlchemyError):
        return _database_trouble(error)
    # A bug of ours: on record like any failure.
    log.error("delivery_attempt_crashed", delivery_id=delivery_id, **crash(error))
    return RetryableFailure("INTERNAL", f"the attempt broke off: {type(error).__name__}")


def _database_trouble(error: SQLAlchemyError) -> RetryableFailure:
    return RetryableFailure("DATABASE", f"the database did not take the attempt: {type(error).__name__}")


def _method_of(payload: str) -> ActivityMethod:
    try:
        return parse_method(payload)
    except PayloadError as error:
        raise PermanentFailure("INVALID_PAYLOAD", str(error), keep_row=False) from None


def _require_success(response: Response) -> None:
    if response.ok:
        return
    pause = response.retry_after(datetime.now(UTC)) if response.status in _ASKS_TO_WAIT else None
    raise RetryableFailure(f"HTTP_{response.status}", f"the server answered {response.status}", at_least=pause)


def _acknowledgment(response: Response) -> Ack:
    try:
        return find_ack(parse_ack_body(response.body))
    except NotJson as error:
        raise PermanentFailure("NOT_JSON", f"the server's answer is not JSON: {error}", keep_row=True) from None
    except AckMissing as error:
        raise PermanentFailure("NO_ACK", str(error), keep_row=True) from None
