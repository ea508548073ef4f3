"""Our handlers in a stock Python `bullmq.Worker`."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from bullmq.custom_errors import DelayedError
from bullmq.custom_errors import UnrecoverableError as BullMQUnrecoverableError

from workers.errors import Retry, UnrecoverableError
from workers.jobs import DROP, Claim, ErrorInfo, Retried
from workers.retry import RetryPolicy
from workers.storage.bullmq.codec import decode_id, decode_options
from workers.storage.bullmq.record import worker_of
from workers.storage.on_redis.node_values import decode_error, error_fields, moment, to_ms
from workers.storage.rules import count_retry
from workers.worker.attempt import call
from workers.worker.failures import policy_after, settlement_of_failure
from workers.worker.handlers import AttemptContext, Handler, HandlerFunction, Signal, make_job


def as_processor(
    handler: HandlerFunction, *, retry: RetryPolicy | None = None
) -> Callable[[Any, str], Awaitable[object]]:
    """Make a processor `(job, token)` for `bullmq.Worker` that runs `handler` with our `Job`.

    `UnrecoverableError` fails the job for good, with `keep=DROP` without a record. Any other `keep` is unknown there,
    and the job's own retention counts. `Retry` delays the job for as long as it says, counted or not; without a time,
    for as long as the job's own `backoff` says, else `retry`. Any other exception is left to `bullmq`, which does not
    count lost locks as attempts. Payload and result are JSON values. The signal never fires, progress is dropped, no
    attempt leaves its slot, and `children` and the like raise `Unsupported`.
    """
    runner = Handler(handler)
    fallback = retry or RetryPolicy()

    async def process(job: Any, token: str) -> object:
        claim = _claim(job, token)
        context = AttemptContext(
            job=make_job(claim, job.data, Signal()), queue=job.queueQualifiedName, worker_id=claim.worker_id
        )
        try:
            return await call(runner, context, ())
        except UnrecoverableError as error:
            if error.keep is DROP:
                job.opts["removeOnFail"] = True  # read by the stock worker when it fails the job, and stored nowhere
            raise BullMQUnrecoverableError(str(error)) from error
        except Retry as error:
            await _put_aside(job, claim, error, policy_after(error, claim.backoff, fallback))
            raise DelayedError from error

    return process


async def _put_aside(job: Any, claim: Claim, error: Retry, policy: RetryPolicy) -> None:
    settlement = settlement_of_failure(claim, error, policy)
    if not isinstance(settlement, Retried):
        raise BullMQUnrecoverableError(str(error)) from error
    uncounted_so_far = job.attemptsStarted - job.attemptsMade - job.stalledCounter - 1
    counted, _ = count_retry(settlement, uncounted_so_far)
    fields = {} if settlement.snoozed else _failure(job, settlement.error)
    options = {"skipAttempt": not counted, "fieldsToUpdate": fields}
    now_ms = round(time.time() * 1000)
    await job.backend.moveToDelayed(job.id, now_ms, to_ms(settlement.delay), claim.token, options)


def _failure(job: Any, error: ErrorInfo) -> dict[str, object]:
    return {**error_fields(error, json.dumps(job.stacktrace)), "failedReason": error.message}


def _claim(job: Any, token: str) -> Claim:
    """Return the job as a claim of the stock worker, which takes care of the lease itself."""
    options = decode_options(job.opts)
    return Claim(
        job_id=decode_id(job.id),
        name=job.name,
        payload=b"",
        token=token,
        worker_id=worker_of(token) or token,
        lease=timedelta(0),
        attempt=job.attemptsMade + (job.stalledCounter if options.ours else 0) + 1,
        max_attempts=options.max_attempts,
        created_at=moment(job.timestamp),
        keep_completed=options.keep_completed,
        keep_failed=options.keep_failed,
        backoff=options.backoff,
        last_error=decode_error(job.failedReason, json.dumps(job.stacktrace), None, exhausted=False),
    )
