"""How a job of BullMQ's comes to be cancelled: a failed one to Node, with a mark of ours."""

from __future__ import annotations

from workers.jobs import DROP, Retention
from workers.storage.bullmq.codec import (
    KEEP_FIELD,
    SETTLED_FIELD,
    STOPPED_FIELD,
    BullMQJobOptions,
    decode_id,
    keep_jobs,
)
from workers.storage.bullmq.scripts import BullMQScripts, Finish
from workers.storage.on_redis.node_values import ERROR_FIELD, cancelled_error, error_facts, to_ms
from workers.storage.on_redis.wire import Command


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
