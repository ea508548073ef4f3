"""The statements that call the functions of `steps.sql`."""

from __future__ import annotations

from typing import Final

from sqlalchemy import text

JOBS: Final = {
    "ids": "text",
    "names": "text",
    "delays": "bigint",
    "priorities": "integer",
    "max_attempts": "integer",
    "keep_completed": "bigint",
    "keep_failed": "bigint",
    "keys": "text",
    "backoffs": "text",
    "payloads": "bytea",
    "chain_indexes": "integer",
    "metas": "text",
}
"""The parameters of `workers_enqueue` that are about jobs, in their order, and the type of an element of each."""

_GIVEN: Final = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in JOBS.items())
_GIVEN_TO_FOLLOW: Final = _GIVEN.replace("(:", "(:next_")
_ONE: Final = ", ".join(f"CAST(:{name} AS {kind})" for name, kind in JOBS.items())
ENQUEUE_ONE = text(f"SELECT workers_enqueue_one(:queue, {_ONE}, :sure, :wake)")
"""Its parameters are those of `ENQUEUE`, each the one element of the list there."""
ENQUEUE = text(f"SELECT * FROM workers_enqueue(:queue, {_GIVEN}, :sure, :wake) WHERE NOT inserted")  # noqa: S608 - constants
"""Its rows are the jobs that were there: of most calls none. A row for each new job took long to read."""
_CLAIMED: Final = (
    "workers_claim(:queue, :worker, CAST(:names AS text[]), CAST(:leases AS bigint[]),"
    " CAST(:any AS bigint), {limit}, CAST(:secret AS bytea), :noted)"
)
CLAIM = text(f"SELECT * FROM {_CLAIMED.format(limit=':limit')}")  # noqa: S608 - constants
CLAIMABLE_IN = text("SELECT workers_claimable_in(:queue, CAST(:names AS text[]), :any)")
RENEW = text(
    "SELECT * FROM workers_renew(:queue, CAST(:seqs AS bigint[]), CAST(:tokens AS bytea[]), CAST(:ids AS text[]),"
    " CAST(:leases AS bigint[]), CAST(:workers AS text[]), :noted)"
)
PROGRESS = text(
    "SELECT workers_progress(:queue, CAST(:seqs AS bigint[]), CAST(:tokens AS bytea[]), CAST(:ids AS text[]),"
    " CAST(:reported AS bytea[]))"
)
_SETTLED: Final = (
    "workers_settle(:queue, CAST(:seqs AS bigint[]), CAST(:tokens AS bytea[]), CAST(:ids AS text[]),"
    " CAST(:kinds AS text[]), CAST(:keeps AS bigint[]), CAST(:delays AS bigint[]), CAST(:errors AS text[]),"
    " CAST(:capped AS text[]), CAST(:results AS bytea[]), CAST(:thens AS text[]), :uncounted, :sure)"
)
SETTLE = text(f"SELECT * FROM {_SETTLED}")  # noqa: S608 - constants
# No function that calls both: `migrate` would have to run once more. PostgreSQL calls a function after those whose
# results it is given, so the claim's limit refers to what comes before it, by conditions that never hold. Only
# `limited` is meant: a claim may wait for the lock of a limit, and must not while it holds those of a settlement.
_EXCHANGE_LIMIT: Final = "CASE WHEN ended.limited OR ended.outcomes = '-' THEN 0 ELSE CAST(:limit AS integer) END"
_ENDED: Final = (
    "SELECT string_agg(s.place || ' ' || s.outcome, ',') AS outcomes,"  # noqa: S608 - constants
    " array_agg(s.place) FILTER (WHERE s.outcome = 'applied') AS applied,"
    " EXISTS (SELECT FROM workers_gates g WHERE g.queue = :queue)"
    " OR EXISTS (SELECT FROM workers_limits l WHERE l.queue = :queue) AS limited"
    f" FROM {_SETTLED} s"
)
EXCHANGE = text(
    f"SELECT ended.outcomes, ended.limited, claimed.* FROM ({_ENDED}) ended"  # noqa: S608 - constants
    f" LEFT JOIN LATERAL {_CLAIMED.format(limit=_EXCHANGE_LIMIT)} claimed ON true"
)
# What follows the jobs that have ended is enqueued between the two, for the same reason, and the claim may bring it.
_FOLLOWING: Final = (
    "SELECT count(*) AS inserted FROM ("  # noqa: S608 - constants
    f"SELECT {', '.join(f'array_agg(t.{name} ORDER BY t.place) AS {name}' for name in JOBS)}"
    f" FROM unnest(CAST(:next_places AS bigint[]), {_GIVEN_TO_FOLLOW}) AS t (place, {', '.join(JOBS)})"
    " WHERE t.place = ANY(ended.applied)) a"
    f" CROSS JOIN LATERAL workers_enqueue(:queue, {', '.join(f'a.{name}' for name in JOBS)}, :sure, :wake)"
    " WHERE a.ids IS NOT NULL"
)
_FOLLOWED_LIMIT: Final = _EXCHANGE_LIMIT.replace("ended.limited", "ended.limited OR followed.inserted < 0")
FOLLOWED_EXCHANGE = text(
    f"SELECT ended.outcomes, ended.limited, claimed.* FROM ({_ENDED}) ended"  # noqa: S608 - constants
    f" CROSS JOIN LATERAL ({_FOLLOWING}) followed"
    f" LEFT JOIN LATERAL {_CLAIMED.format(limit=_FOLLOWED_LIMIT)} claimed ON true"
)
