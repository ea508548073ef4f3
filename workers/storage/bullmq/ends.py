"""What becomes of a job when an attempt ends, as commands, and what BullMQ's answers to these mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from workers.errors import LossReason, StorageError
from workers.jobs import (
    DROP,
    UNCOUNTED_RETRIES,
    Cancelled,
    Completed,
    Continued,
    ErrorInfo,
    Failed,
    NewJob,
    Retention,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
    Suspended,
)
from workers.storage.bullmq.access import QueuePart
from workers.storage.bullmq.codec import (
    CANCEL_FIELD,
    FAILURES_FIELD,
    KEEP_FIELD,
    SETTLED_FIELD,
    STOPPED_FIELD,
    UNCOUNTED_FIELD,
    BullMQJobOptions,
    decode_id,
    keep_jobs,
    link_fields,
)
from workers.storage.bullmq.record import BullMQClaim, own_claim
from workers.storage.bullmq.scripts import BullMQScripts, Finish
from workers.storage.bullmq.server import Reply
from workers.storage.failures import noted_failure
from workers.storage.on_redis.node_values import ERROR_FIELD, cancelled_error, encode_bytes, error_facts, to_ms
from workers.storage.on_redis.wire import Command
from workers.storage.rules import count_retry

APPLIED: Final = SettleOutcome(status=SettleStatus.APPLIED)

NOT_HELD: Final = frozenset({-1, -2, -6})
"""Codes of the scripts: no such job, no lock, another claim's lock."""
NOT_ACTIVE: Final = -3
NO_CHILD_LEFT: Final = 1
"""The answer to a job that wants to wait for its children, when none of them is unfinished."""
REFUSALS: Final = {-4: "children of the job in a flow are unfinished", -9: "a child of the job in a flow has failed"}


def code_outcome(code: Reply) -> SettleOutcome | None:
    """Return what a script's answer means; None if the claim does not hold its job: its record tells why."""
    if isinstance(code, StorageError):
        return SettleOutcome(status=SettleStatus.ERROR, detail=str(code))
    if not isinstance(code, int) or code >= 0:
        return APPLIED
    if code in NOT_HELD:
        return None
    if code == NOT_ACTIVE:  # another program moved the job without looking at its lock
        return SettleOutcome(status=SettleStatus.LOST, reason=LossReason.TAKEN)
    detail = REFUSALS.get(code, f"BullMQ answered with the unknown code {code}")
    return SettleOutcome(status=SettleStatus.ERROR, detail=detail)


def stop(
    lua: BullMQScripts,
    raw: str,
    token: str,
    *,
    keep: Retention | None,
    options: BullMQJobOptions,
    now_ms: int,
    was: str = "active",
) -> Command:
    """End an active job that this token holds, and tell where it `was`; `keep` as in `Cancelled`.

    Answers 0 or an error code.
    """
    error = cancelled_error(decode_id(raw))
    fields: dict[str, object] = {
        ERROR_FIELD: error_facts(error, bare=True),
        SETTLED_FIELD: token,
        STOPPED_FIELD: str(now_ms),
    }
    if keep is not None and keep is not DROP:
        fields[KEEP_FIELD] = str(to_ms(keep))
    lasts = options.keep_failed if keep is None else keep
    ending = Finish(
        raw=raw,
        token=token,
        target="failed",
        value=error.message,
        keep=keep_jobs(keep, options.remove_on_fail),
        max_attempts=options.max_attempts,
        fields=fields,
    )
    return lua.stop(ending, now_ms, until_ms=None if lasts is DROP else now_ms + to_ms(lasts), was=was)


class Endings(QueuePart):
    """Makes the commands that end attempts of one queue's jobs; `now_ms` is by the clock that delays go by."""

    def of(self, settlement: Settlement, now_ms: int) -> Finish | Command:
        """Return what a settlement other than a release does."""
        claim = own_claim(settlement.claim)
        match settlement:
            case Completed():
                value, keep, remove = encode_bytes(settlement.result), settlement.keep, claim.options.remove_on_complete
                return self._finish(claim, "completed", value, keep, remove, {})
            case Failed():
                return self._fail(claim, settlement.error, settlement.keep, now_ms, noted_failure(settlement))
            case Retried():
                return self._retry(claim, settlement, now_ms)
            case Cancelled():
                keep, options = settlement.keep, claim.options
                ended_ms = self._queue.server_ms()
                return stop(self._lua, claim.raw, claim.token, keep=keep, options=options, now_ms=ended_ms)
            case Continued():
                return self._go_on(claim, settlement.then, now_ms)
            case Suspended():
                return self._lua.suspend(claim.raw, claim.token, now_ms)
        raise AssertionError("releases are settled apart")

    def _fail(
        self, claim: BullMQClaim, error: ErrorInfo, keep: Retention | None, now_ms: int, noted: str | None = None
    ) -> Finish:
        remove = claim.options.remove_on_fail
        return self._finish(claim, "failed", error.message, keep, remove, claim.failure(error, noted, now_ms))

    def _finish(
        self,
        claim: BullMQClaim,
        target: str,
        value: str | bytes,
        keep: Retention | None,
        remove: Mapping[str, object],
        fields: dict[str, object],
    ) -> Finish:
        if target == "failed" or claim.marked:
            fields[SETTLED_FIELD] = claim.token
        if keep is not None and keep is not DROP:
            fields[KEEP_FIELD] = str(to_ms(keep))
        return Finish(
            raw=claim.raw,
            token=claim.token,
            target=target,
            value=value,
            keep=keep_jobs(keep, remove),
            max_attempts=claim.max_attempts,
            fields=fields,
            related=claim.related,
        )

    def _retry(self, claim: BullMQClaim, settlement: Retried, now_ms: int) -> Finish | Command:
        if settlement.snoozed:
            return self._snooze(claim, settlement, now_ms)
        counted, in_a_row = count_retry(settlement, claim.uncounted)
        if counted and not settlement.counted and claim.attempt >= claim.max_attempts:
            noted = noted_failure(settlement)
            return self._fail(claim, replace(settlement.error, exhausted=True), None, now_ms, noted)
        fields = {
            **claim.failure(settlement.error, noted_failure(settlement) if counted else None, now_ms),
            "failedReason": settlement.error.message,
            SETTLED_FIELD: claim.token,
            UNCOUNTED_FIELD: str(in_a_row),
        }
        delay_ms = to_ms(settlement.delay)
        if counted and delay_ms == 0:
            lifo = claim.options.written.get("lifo") is True
            return self._lua.retry(claim.raw, claim.token, lifo=lifo, fields=fields, now_ms=now_ms)
        return self._lua.delay(claim.raw, claim.token, delay_ms=delay_ms, counted=counted, fields=fields, now_ms=now_ms)

    def _snooze(self, claim: BullMQClaim, settlement: Retried, now_ms: int) -> Command:
        delay_ms, fields = to_ms(settlement.delay), {SETTLED_FIELD: claim.token}
        return self._lua.go_on(
            claim.raw, claim.token, delay_ms=delay_ms, fields=fields, over=(CANCEL_FIELD,), now_ms=now_ms
        )

    def run_again(self, claim: BullMQClaim, now_ms: int) -> Finish | Command:
        """Queue a job again that wants to wait for children of which none is unfinished; not without end."""
        if claim.uncounted >= UNCOUNTED_RETRIES:
            message = f"it waited {claim.uncounted} times in a row for children, and none was unfinished"
            return self._fail(claim, ErrorInfo(type="WaitForChildren", message=message), None, now_ms)
        fields = {SETTLED_FIELD: claim.token, UNCOUNTED_FIELD: str(claim.uncounted + 1)}
        return self._lua.delay(claim.raw, claim.token, delay_ms=0, counted=False, fields=fields, now_ms=now_ms)

    def _go_on(self, claim: BullMQClaim, then: NewJob, now_ms: int) -> Command:
        return go_on(self._lua, claim.raw, claim.token, then, claim.options, now_ms)


def go_on(lua: BullMQScripts, raw: str, token: str, then: NewJob, options: BullMQJobOptions, now_ms: int) -> Command:
    """Let an active job go on as the next link of its chain; `options` are its own. Answers 0 or an error code."""
    fields = {**link_fields(then, raw, options.written), SETTLED_FIELD: token}
    over = ("failedReason", "stacktrace", ERROR_FIELD, UNCOUNTED_FIELD, CANCEL_FIELD, KEEP_FIELD, FAILURES_FIELD)
    return lua.go_on(raw, token, delay_ms=to_ms(then.delay), fields=fields, over=over, now_ms=now_ms)
