"""The calls that the model makes: which verbs, how often, and with what."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Final, NamedTuple, TypeAlias

from hypothesis import strategies as st

from workers.crons import Cron, Missed
from workers.deduplication import Deduplication, DeduplicationMode
from workers.jobs import DROP, AfterFailure, Retention
from workers.limits import WHOLE_QUEUE, Limit, LimitKey
from workers.testing.expected import FINISHED
from workers.testing.expected_crons import HOURLY

Call: TypeAlias = tuple[str, Mapping[str, object]]

IDS: Final = ("a", "b", "c", "d")
MINUTE: Final = timedelta(minutes=1)
TICK: Final = timedelta(seconds=1)
"""The shortest time that passes: storages that number jobs by time may be off by some milliseconds in a run."""
NOW: Final = timedelta(0)


class HoldingKeys(NamedTuple):
    """What may keep a job back: at most one of them."""

    ordering_key: str | None = None
    limit_key: LimitKey | None = None
    fair_key: str | None = None


class JobKind(NamedTuple):
    """What is drawn for a new job, beside its id."""

    name: str = "work"
    delay: timedelta = NOW
    keep: Retention = DROP
    priority: int = 0
    keys: HoldingKeys = HoldingKeys()
    max_attempts: int = 2


def _cron(name: str, every: timedelta | None, version: int, missed: Missed) -> Cron:
    """Make a definition whose jobs leave no record: one that is enqueued again would run again."""
    pattern = HOURLY if every is None else None
    return Cron(
        name=name, job="work", every=every, pattern=pattern, version=version, missed=missed, keep_completed=DROP
    )


def _deduplication(key: str, mode: DeduplicationMode, ttl: timedelta) -> Deduplication:
    return Deduplication(key=key, mode=mode, ttl=None if mode is DeduplicationMode.SIMPLE else ttl)


_ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=4)
_id = st.sampled_from(IDS)
_names = st.sampled_from(("work", "work", "other"))
_delays = st.sampled_from((NOW, NOW, NOW, TICK, MINUTE, timedelta(minutes=30)))
_leases = st.sampled_from((MINUTE, timedelta(hours=1)))
_retentions: st.SearchStrategy[Retention] = st.sampled_from((DROP, MINUTE, timedelta(hours=2)))
_priorities = st.sampled_from((0, 0, 0, 1, -1))
_keys = st.sampled_from((HoldingKeys(), HoldingKeys(), HoldingKeys(), HoldingKeys(ordering_key="key")))
_limited_keys = st.sampled_from(
    (
        HoldingKeys(),
        HoldingKeys(ordering_key="key"),
        *(3 * [HoldingKeys(limit_key=LimitKey("api"))]),
        HoldingKeys(limit_key=LimitKey("api", "one")),
        *(2 * [HoldingKeys(fair_key="one")]),
        HoldingKeys(fair_key="two"),
    )
)
_limits = st.sampled_from(
    (
        Limit(concurrency=1),
        Limit(concurrency=2, version=1),
        Limit("1/m"),
        Limit("2/m", burst=1),
        Limit("1/h", burst=2, version=1),
        Limit("1/s", concurrency=1),
        Limit(),
    )
)
"""A bucket gets a token in whole seconds, as long as time itself passes."""
_limit_names = st.sampled_from((*(5 * ["api"]), WHOLE_QUEUE))
_cron_names = st.sampled_from(("tick", "tock"))
_crons = st.builds(
    _cron,
    name=_cron_names,
    every=st.sampled_from((timedelta(minutes=20), timedelta(hours=1), None)),
    version=st.integers(min_value=1, max_value=3),
    missed=st.sampled_from(Missed),
)
_deduplications = st.builds(
    _deduplication,
    key=st.sampled_from(("key", "key", "key", "key", "other")),
    mode=st.sampled_from(DeduplicationMode),
    ttl=st.sampled_from((TICK, TICK, MINUTE)),
)
_attempts = st.integers(min_value=1, max_value=4)
_results = st.sampled_from((b"null", b"", b"1"))
_picks = st.integers(min_value=0, max_value=7)
"""Which claim to pick: up to 4, a live one, if there is any; otherwise any of the last."""


def _kinds(
    keys: st.SearchStrategy[HoldingKeys],
    *,
    name: st.SearchStrategy[str] = _names,
    delay: st.SearchStrategy[timedelta] = _delays,
) -> st.SearchStrategy[JobKind]:
    return st.builds(
        JobKind, name=name, delay=delay, keep=_retentions, priority=_priorities, keys=keys, max_attempts=_attempts
    )


def _call(weight: int, verb: str, /, **arguments: st.SearchStrategy[object]) -> list[st.SearchStrategy[Call]]:
    return [st.tuples(st.just(verb), st.fixed_dictionaries(arguments)) for _ in range(weight)]


_on_jobs: Final = st.one_of(
    *_call(
        4,
        "enqueue",
        ids=_ids,
        kind=_kinds(_keys),
        deduplication=st.none(),
    ),
    *_call(
        10,
        "enqueue",
        ids=st.lists(_id, min_size=1, max_size=2),
        kind=_kinds(_keys, name=st.just("work"), delay=st.sampled_from((NOW, NOW, TICK))),
        deduplication=_deduplications,
    ),
    *_call(
        3,
        "enqueue_after",
        ids=st.lists(_id, min_size=1, max_size=2, unique=True),
        after=st.lists(st.sampled_from((*IDS, *IDS, "nobody")), min_size=1, max_size=2),
        with_them=st.sampled_from((True, True, False)),
        after_failure=st.sampled_from(AfterFailure),
        kind=st.tuples(st.just("work"), _delays, _retentions, st.just(0), _keys).map(lambda drawn: JobKind(*drawn)),
        deduplication=st.none() | _deduplications,
    ),
    *_call(
        6,
        "claim",
        worker=st.sampled_from(("one", "two")),
        names=st.sampled_from((("*",), ("*",), ("work",), ("other", "*"))),
        lease=_leases,
        limit=st.integers(min_value=1, max_value=4),
    ),
    *_call(
        3,
        "complete",
        pick=_picks,
        result=_results,
        keep=st.none() | _retentions,
        then=st.none() | _id,
        delay=_delays,
    ),
    *_call(3, "go_on", pick=_picks, kind=_kinds(_keys)),
    *_call(2, "fail", pick=_picks, keep=st.none() | _retentions),
    *_call(2, "retry_later", pick=_picks, delay=_delays, how=st.sampled_from(("counted", "uncounted", "snoozed"))),
    *_call(1, "stop", pick=_picks, keep=st.none() | _retentions),
    *_call(2, "release", pick=_picks),
    *_call(1, "settle_again"),
    *_call(1, "renew", picks=st.lists(_picks, min_size=1, max_size=4)),
    *_call(1, "progress", picks=st.lists(_picks, min_size=1, max_size=4), value=st.sampled_from((b"1", b"2"))),
    *_call(2, "recover", limit=st.sampled_from((1, 100)), max_stalls=st.integers(min_value=0, max_value=2)),
    *_call(2, "cancel", job_id=_id),
    *_call(1, "manage", verb=st.sampled_from(("retry", "promote")), ids=_ids),
    *_call(1, "remove", ids=_ids, running=st.booleans()),
    *_call(1, "complete_from_outside", job_id=_id, result=_results, keep=st.none() | _retentions),
    *_call(1, "continue_from_outside", job_id=_id, kind=_kinds(_keys)),
    *_call(1, "update_result_ttl", job_id=_id, ttl=st.sampled_from((MINUTE, timedelta(hours=2)))),
    *_call(1, "clean", state=st.sampled_from(FINISHED), older_than=_delays),
    *_call(1, "sweep", limit=st.sampled_from((1, 100))),
    *_call(1, "pause_or_resume", paused=st.sampled_from((False, False, True))),
    *_call(3, "let_time_pass", by=st.sampled_from((TICK, TICK, MINUTE, MINUTE, timedelta(hours=1)))),
)

_on_keys: Final = st.one_of(
    *_call(
        8,
        "enqueue",
        ids=st.lists(_id, min_size=2, max_size=4),
        kind=_kinds(
            _limited_keys,
            name=st.sampled_from(("work", "work", "work", "other")),
            delay=st.sampled_from((NOW, NOW, NOW, TICK)),
        ),
        deduplication=st.none(),
    ),
    *_call(
        8,
        "claim",
        worker=st.just("one"),
        names=st.sampled_from((("*",), ("*",), ("work",))),
        lease=_leases,
        limit=st.integers(min_value=1, max_value=4),
    ),
    *_call(3, "complete", pick=_picks, result=_results, keep=st.none(), then=st.none(), delay=_delays),
    *_call(1, "go_on", pick=_picks, kind=_kinds(_limited_keys)),
    *_call(1, "fail", pick=_picks, keep=st.none()),
    *_call(
        2, "retry_later", pick=_picks, delay=st.sampled_from((NOW, TICK)), how=st.sampled_from(("counted", "snoozed"))
    ),
    *_call(2, "release", pick=_picks),
    *_call(3, "recover", limit=st.just(100), max_stalls=st.integers(min_value=0, max_value=2)),
    *_call(1, "cancel", job_id=_id),
    *_call(1, "continue_from_outside", job_id=_id, kind=_kinds(_limited_keys)),
    *_call(1, "remove", ids=_ids, running=st.booleans()),
    *_call(1, "pause_or_resume", paused=st.sampled_from((False, False, True))),
    *_call(7, "declare_limit", name=_limit_names, limit=_limits),
    *_call(1, "remove_limit", name=_limit_names),
    *_call(1, "look_at_limits"),
    *_call(3, "store_cron", cron=_crons),
    *_call(1, "change_cron", verb=st.sampled_from(("pause", "resume", "resume", "remove")), name=_cron_names),
    *_call(4, "tick", late=st.sampled_from((False, False, True))),
    *_call(3, "end_all"),
    *_call(5, "let_time_pass", by=st.sampled_from((TICK, MINUTE, timedelta(hours=1), timedelta(hours=1)))),
)

THEMES: Final = {"jobs": _on_jobs, "keys": _on_keys}
"""All verbs but those on limits and what recurs; and these, with what makes them interesting."""
